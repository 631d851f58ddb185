"""Grammars of texts with calls, for all formats."""

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
    """Return a text in Lark. Special tokens are written by their ids."""
    marks = sorted(special, key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, marks)) + ")", text) if marks else [text]
    return " ".join(
        [
            f"<[{special[part]}]>" if part in special else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        ]
    )


# Words in the head of a call: the Lark of the values, and an example.
WORDS: Mapping[str, tuple[str, str]] = {
    "NUMBER": ("/[0-9]{1,3}/", "0"),
    "ID": ("/[a-zA-Z0-9_-]{1,40}/", "call-1"),
}


def filled(text: str, words: Mapping[str, str], special: Mapping[str, int]) -> str:
    """Return a text in Lark, with the words replaced by the Lark in `words`."""
    words = {**{word: lark for word, (lark, _) in WORDS.items()}, **words}
    parts = re.split(rf"\b({'|'.join(words)})\b", text)
    return " ".join([words.get(part) or literal(part, special) for part in parts if part])


def written_head(before: str, name: str) -> str:
    """Return the text before the arguments of a call."""
    words = {**{word: text for word, (_, text) in WORDS.items()}, "NAME": name}
    return re.sub(rf"\b({'|'.join(words)})\b", lambda found: words[found[0]], before)


def written_call(
    call: Call, before: str, arguments: Callable[[Mapping[str, Any]], str], after: str
) -> str:
    """Return a call as a text.

    `arguments` writes an object as text. Arguments that are already text stay as they are.
    """
    written = call.arguments if isinstance(call.arguments, str) else arguments(call.arguments)
    return written_head(before, call.name) + written + after


def ended_text(text: str, end: str, special: Mapping[str, int]) -> tuple[str, str] | None:
    """Return a terminal and the rest of `end` in Lark, or None if `end` has no special token.

    The terminal matches texts of the terminal `text` up to the first special token of `end`.
    """
    places = [place for mark in special if (place := end.find(mark)) >= 0]
    if not places:
        return None
    # A special token ends a terminal. Therefore the text before the token belongs to the terminal.
    before, rest = end[: min(places)], literal(end[min(places) :], special)
    return (f"({text}) {literal(before, {})}" if before else text), rest


def bounded_text(
    rule: str, pattern: str, end: str, closing: str, special: Mapping[str, int]
) -> tuple[str, list[str]]:
    """Return the Lark of a text followed by `closing`, and the rules that it needs.

    The text follows `pattern`, a terminal of Lark, and does not contain `end`, with which `closing`
    begins. The names of the rules begin with `rule`.
    """
    without = str(regex.escape(end)).replace("/", "\\/")
    text, terminal = rf"({pattern}) & ~/(.|\n)*{without}(.|\n)*/", rule.upper()
    if (ended := ended_text(text, closing, special)) is not None:
        text, rest = ended
        return f"{terminal} {rest}", [f"{terminal}: {text}"]
    # Match lazily up to the first end, which is the end of the text.
    return f"{rule}_text", [
        f"{rule}_text[lazy]: {terminal}",
        f"{terminal}: ({text}) {literal(closing, special)}",
    ]


class Section(NamedTuple):
    """The section of a text that holds the calls.

    Attributes:
        mark: Begins the section. After the mark the model must write calls. If it is empty, the
            section is the whole answer.
        opening, between, closing: Texts before the first call, between calls and after the last
            call.
        lead: A special token that may precede a section without a mark.
        free: A terminal of Lark for answers without calls, if the section has no mark.
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
        """Return the grammar in Lark.

        Args:
            calls: The Lark of a call, for each tool.
            lines: Rules that the calls use.
            firsts: Like `calls`, for the first call with its `opening`, if that differs.
        """
        named = {f"call_{index}": call for index, call in enumerate(calls)}
        begins = {f"first_{index}": call for index, call in enumerate(firsts)}
        is_free = not rules.required and rules.content is None
        # If each call has its own mark, free text may stand between calls.
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
        """Return a text of these calls."""
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
        # After a call that must be the only call, no other call may begin.
        start = "(entered section)* text" if rules.parallel else "entered section | text"
        lines = [f"spelled[lazy]: TEXT {json.dumps(self.mark, ensure_ascii=False)}", *text]
        # A special token may also be written as text.
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
    """Return a text in Lark. White space around a leading bracket or comma may vary.

    Templates of the same format differ there.
    """
    found = _SIGN.match(text)
    # Marks of Mistral and MiniMax M3 begin with a bracket, too.
    if found is None or regex.match(r"\w|<\]", text[found.end() :]):
        return literal(text, special)
    sign = re.escape(found[0].strip())
    return _joined(f"/{_BLANK}{sign}{_BLANK}/", literal(text[found.end() :], special))


def _joined(*parts: str) -> str:
    return " ".join([part for part in parts if part])


def json_of(tool: Tool) -> str:
    """Return a tool's arguments as JSON, in Lark."""
    return f"%json {json.dumps(tool.held())}"
