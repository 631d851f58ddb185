"""Grammars of texts with calls in them, whatever a call looks like."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import regex

from ...runtime.sampling.json_schema import held_schema
from .tool_calls import Call, CallRules, Tool

_BLANK = r"[ \n]{0,12}"


def literal(text: str, special: Mapping[str, int]) -> str:
    """A text in Lark, with what are special tokens by their ids."""
    marks = sorted(special, key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, marks)) + ")", text) if marks else [text]
    return " ".join(
        [
            f"<[{special[part]}]>" if part in special else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        ]
    )


WORDS: Mapping[str, tuple[str, str]] = {
    "NUMBER": ("/[0-9]{1,3}/", "0"),
    "ID": ("/[a-zA-Z0-9_-]{1,40}/", "call-1"),
}
"""What stands in a call's head for a number and an id: any in Lark, and one of them."""


def filled(text: str, words: Mapping[str, str], special: Mapping[str, int]) -> str:
    """A text in Lark, with the Lark of `words` instead of these words."""
    words = {**{word: lark for word, (lark, _) in WORDS.items()}, **words}
    parts = re.split(rf"\b({'|'.join(words)})\b", text)
    return " ".join([words.get(part) or literal(part, special) for part in parts if part])


def written_head(before: str, name: str) -> str:
    """What stands before the arguments of a call."""
    words = {**{word: text for word, (_, text) in WORDS.items()}, "NAME": name}
    return re.sub(rf"\b({'|'.join(words)})\b", lambda found: words[found[0]], before)


def written_call(
    call: Call, before: str, arguments: Callable[[Mapping[str, Any]], str], after: str
) -> str:
    """A call as a text. `arguments`: writes an object; a text that is none stays as it is."""
    told = call.arguments if isinstance(call.arguments, str) else arguments(call.arguments)
    return written_head(before, call.name) + told + after


def ended_text(text: str, end: str, special: Mapping[str, int]) -> tuple[str, str] | None:
    """A terminal of texts of the terminal `text` up to the first special token of `end`, and the
    rest of `end` in Lark. None if no special token is in `end`.
    """
    places = [place for mark in special if (place := end.find(mark)) >= 0]
    if not places:
        return None
    # A special token ends a terminal, so that what stands before the token may be part of it.
    before, rest = end[: min(places)], literal(end[min(places) :], special)
    return (f"({text}) {literal(before, {})}" if before else text), rest


def bounded_text(
    rule: str, pattern: str, end: str, closing: str, special: Mapping[str, int]
) -> tuple[str, list[str]]:
    """Texts of `pattern`, a terminal of Lark, without `end`, and `closing`, which begins with that:
    how they are written in Lark, and the rules of it, whose names begin with `rule`.
    """
    without = str(regex.escape(end)).replace("/", "\\/")
    text, terminal = rf"({pattern}) & ~/(.|\n)*{without}(.|\n)*/", rule.upper()
    if (ended := ended_text(text, closing, special)) is not None:
        text, rest = ended
        return f"{terminal} {rest}", [f"{terminal}: {text}"]
    # Up to the first end: what stands before it is all of the text.
    return f"{rule}_text", [
        f"{rule}_text[lazy]: {terminal}",
        f"{terminal}: ({text}) {literal(closing, special)}",
    ]


class Section(NamedTuple):
    """Where calls stand: `mark` begins them, after which the model no longer has a choice; then
    `opening`, calls with `between` each two, `closing`. Without a mark they are the whole answer,
    perhaps behind the special token `lead`; `free`, a terminal of Lark, says which other texts
    there are.
    """

    mark: str
    opening: str
    between: str
    closing: str
    lead: str = ""
    free: str = r"/(.|\n)*/"

    def grammar(
        self,
        calls: Sequence[str],
        lines: Sequence[str],
        rules: CallRules,
        firsts: Sequence[str] = (),
    ) -> str:
        """Lark. `calls`: one of each tool; `lines`: more rules, which those use; `firsts`: the same
        where they are the first one, with `opening`.
        """
        named = {f"call_{index}": call for index, call in enumerate(calls)}
        begins = {f"first_{index}": call for index, call in enumerate(firsts)}
        is_free = not rules.required and rules.content is None
        # Calls that have a mark each may have free text between them.
        repeats = rules.parallel and not (is_free and self.mark and self.mark in self.between)
        more = f"({_joined(_spaced(self.between, rules.special), 'one')})*" if repeats else ""
        opening, closing = (_spaced(each, rules.special) for each in (self.opening, self.closing))
        section = _joined("first" if firsts else f"{opening} one", more, closing)
        if firsts:
            lines = [*lines, f"first: {' | '.join(begins)}"]
        return "\n".join(
            [
                "%llguidance {}",
                *self._start(rules),
                f"section: {section}",
                f"one: {' | '.join(named)}",
                *(f"{name}: {call}" for name, call in {**named, **begins}.items()),
                *lines,
            ]
        )

    def written(self, calls: Sequence[str]) -> str:
        """A text of these calls."""
        return f"{self.mark}{self.opening}{self.between.join(calls)}{self.closing}"

    def _start(self, rules: CallRules) -> list[str]:
        mark = literal(self.mark, rules.special)
        begun = _joined(mark, "section")
        if rules.required:
            return [f"start: {begun}"]
        if rules.content is not None:
            content = json.dumps(held_schema(dict(rules.content), whose="the text's schema"))
            return [f"start: {begun} | content", f"content: %json {content}"]
        text = ["text: TEXT", f"TEXT: {self.free}"]
        if not self.mark:
            is_token = self.lead in rules.special
            lead = f"({literal(self.lead, rules.special)})? " if is_token else ""
            return [f"start: {lead}section | text", *text]
        # Behind a call that must be the only one no text may begin another.
        start = "(entered section)* text" if rules.parallel else "entered section | text"
        lines = [f"spelled[lazy]: TEXT {json.dumps(self.mark, ensure_ascii=False)}", *text]
        # A special token may be spelled, too.
        ended = ended_text(self.free, self.mark, rules.special)
        if ended is None:
            return [f"start: {start}", "entered: spelled", *lines]
        return [
            f"start: {start}",
            f"entered: spelled | BEFORE? {ended[1]}",
            f"BEFORE: {ended[0]}",
            *lines,
        ]


_SIGN = re.compile(r"\s*[\[\],]\s*")


def _spaced(text: str, special: Mapping[str, int]) -> str:
    """A text in Lark. White space may differ around a bracket or comma that begins the text:
    templates of one format differ there.
    """
    found = _SIGN.match(text)
    # Marks may begin with a bracket, too: those of Mistral and of MiniMax M3.
    if found is None or regex.match(r"\w|<\]", text[found.end() :]):
        return literal(text, special)
    sign = re.escape(found[0].strip())
    return _joined(f"/{_BLANK}{sign}{_BLANK}/", literal(text[found.end() :], special))


def _joined(*parts: str) -> str:
    return " ".join([part for part in parts if part])


def json_of(tool: Tool) -> str:
    """A tool's arguments as JSON, in Lark."""
    return f"%json {json.dumps(tool.held())}"
