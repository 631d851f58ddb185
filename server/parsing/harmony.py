"""gpt-oss writes messages in channels.

The channel `analysis` is a thought, `commentary` addressed to a function is a call, and other
messages are text.

Format: https://github.com/openai/harmony (docs/format.md) and the chat template of
openai/gpt-oss-20b.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import regex

from ...runtime.sampling.grammar import after
from ...runtime.sampling.json_schema import held_schema
from .calls_grammar import json_of, literal
from .events import CallBegins, Event, Parser, PlainText, Text, Thought, as_text
from .reasoning import ReasoningFormat
from .scan import ScanParser, Steps
from .tool_calls import Call, CallRules, InTemplate, Tool

if TYPE_CHECKING:
    from ...runtime.tokenizer.tokenizer import Tokenizer

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
_ANALYSIS, _FINAL = f"{CHANNEL}analysis{MESSAGE}", f"{CHANNEL}final{MESSAGE}"
_ENDS = (END, CALL, RETURN, START, CHANNEL)
_TO = r"(?:\s{0,4}to=(?P<to>[\w.\-]{1,128}))?"
_HEAD = regex.compile(
    r"(?:\s{0,8}<\|(?:end|call|return)\|>)?\s{0,8}(?:<\|start\|>assistant)?"
    rf"{_TO}<\|channel\|>(?P<channel>\w{{1,20}}){_TO}"
    r"\s{0,4}(?:<\|constrain\|>)?\s{0,4}\w{0,20}\s{0,4}<\|message\|>"
)


class HarmonyParser(ScanParser):
    """Parses messages in channels.

    Args:
        rest: Parses the text of the answer, if it is not plain.
        is_apart: Whether thoughts are separate from the text.
        is_open: Whether the text begins within a thought.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        rest: Parser | None = None,
        is_apart: bool = False,
        is_open: bool = False,
    ) -> None:
        super().__init__(tools)
        self._rest = rest or PlainText()
        self._is_apart, self._is_open = is_apart, is_open

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        return [*super().finish(is_cut=is_cut), *self._rest.finish(is_cut=is_cut)]

    def tell(self, event: Event) -> None:
        if isinstance(event, Text):
            self._events += self._rest.push(event.text)
        else:
            super().tell(event)

    def read(self) -> Steps[None]:
        if self._is_open:
            yield from self._say(Thought if self._is_apart else Text)
        while True:
            found = yield from self.match(_HEAD)
            if found is None:
                # Text without a head continues the previous message.
                yield from self._say(Text)
            elif (found["to"] or "").removeprefix("functions.") in self.tools:
                self.tell(CallBegins(found["to"].removeprefix("functions.")))
                yield from self.json_object()
            elif found["channel"] == "analysis" and found["to"] is None and self._is_apart:
                yield from self._say(Thought)
            else:
                yield from self._say(Text)
            if self.is_whole and not self.text:
                return

    def _say(self, kind: type[Text] | type[Thought]) -> Steps[None]:
        """Emit a message up to its end."""
        while True:
            places = [place for mark in _ENDS if (place := self.text.find(mark)) >= 0]
            if self.is_cut and not places:
                self.text = self.text[: len(self.text) - max(_begun(self.text, m) for m in _ENDS)]
            if places or self.is_whole:
                self.tell(kind(self.take(min(places, default=len(self.text)))))
                if self.text.startswith((END, CALL, RETURN)):
                    self.take(self.text.index(">") + 1)
                elif places:
                    head = _HEAD.match(self.text, partial=not self.is_whole)
                    if head is None and self.is_cut and _HEAD.match(self.text, partial=True):
                        self.break_off()
                        return
                    if head is None:
                        # The mark does not begin a message.
                        self.tell(kind(self.take(1)))
                        continue
                    if head.partial:
                        yield
                        continue
                return
            kept = max(_begun(self.text, mark) for mark in _ENDS)
            self.tell(kind(self.take(len(self.text) - kept)))
            yield


def _begun(text: str, mark: str) -> int:
    """Return the length of the end of a text that may be the beginning of the mark."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((size for size in sizes if mark.startswith(text[-size:])), 0)


def _up_to_end(name: str, special: Mapping[str, int]) -> list[str]:
    """Return the rules of a text with its `<|end|>`."""
    token = f" | TEXT? {literal(END, special)}" * (END in special)
    return [
        f"{name}: {name}_spelled{token}",
        f"{name}_spelled[lazy]: TEXT {json.dumps(END)}",
        r"TEXT: /(.|\n)*/",
    ]


class HarmonyFormat(InTemplate):
    """gpt-oss's `ToolCallFormat`. A message has one call, which ends the message."""

    name = "openai"
    aliases = ("gpt_oss", "gpt-oss", "harmony")
    marks = MARKS

    def matches(self, template: str) -> bool:
        return CHANNEL in template and START in template

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return HarmonyParser(tools)

    def grammar(self, tools: Sequence[Tool], rules: CallRules) -> str:
        named = {f"call_{index}": tool for index, tool in enumerate(tools)}
        head = f"{CHANNEL}commentary to=functions.NAME {CONSTRAIN}json{MESSAGE}"
        final = literal(_FINAL, rules.special)
        lines = [f"one: {' | '.join(named)}"]
        for rule, tool in named.items():
            call = literal(head.replace("NAME", tool.name), rules.special)
            lines.append(f"{rule}: {call} {json_of(tool)}")
        if rules.required:
            start = "one"
        elif rules.content is not None:
            content = held_schema(dict(rules.content), whose="the text's schema")
            start = f"one | {final} %json {json.dumps(content)}"
        else:
            preamble = literal(f"{CHANNEL}commentary{MESSAGE}", rules.special)
            restart = literal(f"{START}assistant", rules.special)
            start = f"({preamble} said {restart})? (one | {final} TEXT)"
            lines += _up_to_end("said", rules.special)
        return "\n".join(["%llguidance {}", f"start: {start}", *lines])

    def written(self, calls: Sequence[Call]) -> str:
        return f"{START}assistant".join(
            [
                f"{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json{MESSAGE}"
                f"{as_text(arguments)}{CALL}"
                for name, arguments in calls
            ]
        )

    def for_template(self, messages: Sequence[dict[str, Any]], tools: Sequence[Tool]) -> list[Any]:
        """Rename thoughts for the template, and drop them beside a text with calls, which it
        refuses.
        """
        return [
            {**message, "thinking": message["reasoning_content"]}
            if "reasoning_content" in message
            and not (message.get("tool_calls") and message.get("content"))
            else message
            for message in messages
        ]


class HarmonyReasoning(ReasoningFormat):
    """gpt-oss's `ReasoningFormat`, in which answers have a channel, too."""

    __slots__ = ()

    @property
    def marks(self) -> tuple[str, ...]:
        return MARKS

    def matches(self, template: str) -> bool:
        return FORMATS[0].matches(template)

    def parser(self, rest: Parser, *, is_open: bool) -> Parser:
        if isinstance(rest, HarmonyParser):
            return HarmonyParser(list(rest.tools.values()), is_apart=True, is_open=is_open)
        return HarmonyParser([], rest=rest, is_apart=True, is_open=is_open)

    def grammar(
        self,
        body: str,
        *,
        is_open: bool,
        special: Mapping[str, int] | None = None,
        has_calls: bool = False,
    ) -> str:
        special = special or {}
        restart = literal(f"{START}assistant", special)
        thought = f"thought {restart}"
        if not is_open:
            thought = f"({literal(self.opening, special)} {thought})?"
        head = "" if has_calls else literal(_FINAL, special)
        lark = [f"start: {thought} {head} @body", *_up_to_end("thought", special)]
        return after("\n".join(lark), body)

    def budget(self, tokenizer: Tokenizer, tokens: int, *, is_open: bool) -> dict[str, Any]:
        closing = f"{END}{START}assistant"
        return {
            **super().budget(tokenizer, tokens, is_open=is_open),
            "thought_end_ids": tokenizer.encode(closing, add_special_tokens=False),
        }

    def count_tokens(self, tokenizer: Tokenizer, ids: Sequence[int], *, is_open: bool) -> int:
        if not is_open and "analysis" not in tokenizer.decode(list(ids[:3])):
            return 0
        end = tokenizer.backend.token_to_id(END)
        return ids.index(end) + 1 if end in ids else len(ids)


FORMATS = (HarmonyFormat(),)
REASONING = HarmonyReasoning("gpt_oss", _ANALYSIS, END)
