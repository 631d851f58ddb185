"""Formats of thoughts, which stand between two marks before the answer.

form = choose_reasoning("auto", tokenizer.templates)
is_open = form.is_open(prompt)       # Templates may begin the thought themselves.
parser = form.parser(PlainText(), is_open=is_open)
grammar = form.grammar(grammar, is_open=is_open)     # For the answer, not the thought.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from ...runtime.sampling.grammar import after
from .calls_grammar import ended_text, literal
from .events import Event, Parser, Thought, held_back

if TYPE_CHECKING:
    from ...runtime.tokenizer.tokenizer import Tokenizer


class _Marks(NamedTuple):
    name: str
    opening: str
    closing: str
    tokens: tuple[str, ...] = ()
    around: tuple[tuple[str, str], ...] = ()
    told_by: tuple[str, ...] = ()


class ReasoningFormat(_Marks):
    """How a model writes thoughts.

    Attributes:
        opening, closing: The marks around a thought.
        tokens: Special tokens in the marks, if the marks as a whole are not special tokens.
        around: Pairs of marks around the answer, which are not part of it. One mark of a pair may
            be empty.
        told_by: Texts of which chat templates of this format contain one. Empty means `closing`.
    """

    __slots__ = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that the parser must see even if they are special tokens."""
        answer = [mark for pair in self.around for mark in pair if mark]
        return self.tokens or (self.opening, self.closing, *answer)

    def matches(self, template: str) -> bool:
        """Return whether a chat template has thoughts of this format."""
        return any(text in template for text in self.told_by or (self.closing,))

    def is_open(self, prompt: str, begun: str = "") -> bool:
        """Return whether the answer to a prompt begins within a thought.

        `begun` is the message at the end of the prompt that the answer continues.
        """
        _, opening, thought = begun.rpartition(self.opening)
        is_begun = bool(opening) and self.closing not in thought
        return is_begun or prompt.rstrip().endswith(self.opening)

    def parser(self, rest: Parser, *, is_open: bool) -> Parser:
        """Return a parser of one text. `rest` parses the text after the thought."""
        if self.around:
            rest = AnswerParser(rest, [mark for pair in self.around for mark in pair if mark])
        return _ThoughtParser(self, rest, is_open)

    def grammar(
        self,
        body: str,
        *,
        is_open: bool,
        special: Mapping[str, int] | None = None,
        has_calls: bool = False,
    ) -> str:
        """Return the grammar of texts with a thought, or without one, before `body`.

        `special` are the marks that are special tokens, with their ids. If `has_calls`, `body`
        belongs to a format of tool calls.
        """
        special = special or {}
        thought = "thought" if is_open else f"(BLANK {literal(self.opening, special)} thought)?"
        before, behind = (self._around(place, special) for place in (0, 1))
        ended = ended_text("TEXT", self.closing, special)
        lark = [
            f"start: {thought} BLANK {before} @body {behind}",
            "thought: spelled" + (f" | BEFORE? {ended[1]}" if ended else ""),
            *([f"BEFORE: {ended[0]}"] if ended else []),
            f"spelled[lazy]: TEXT {json.dumps(self.closing, ensure_ascii=False)}",
            r"BLANK: /[ \n\r\t]{0,8}/",
            r"TEXT: /(.|\n)*/",
        ]
        return after("\n".join(lark), body)

    def _around(self, place: int, special: Mapping[str, int]) -> str:
        """Return the marks before (0) or after (1) an answer, in Lark."""
        marks = [literal(pair[place], special) for pair in self.around if pair[place]]
        return f"(({' | '.join(marks)}) BLANK)?" if marks else ""

    def budget(self, tokenizer: Tokenizer, tokens: int, *, is_open: bool) -> dict[str, Any]:
        """Return the members of `SamplingParams` that close a thought after `tokens` tokens."""
        begin = [] if is_open else tokenizer.encode(self.opening, add_special_tokens=False)
        return {
            "thinking_budget": tokens,
            "thought_begin_ids": begin,
            "thought_end_ids": tokenizer.encode(self.closing, add_special_tokens=False),
        }

    def count_tokens(self, tokenizer: Tokenizer, ids: Sequence[int], *, is_open: bool) -> int:
        """Return the number of an answer's tokens that belong to its thought and closing mark."""
        if not is_open:
            head = tokenizer.decode(ids[:16], skip_special_tokens=False)
            if not head.lstrip().startswith(self.opening):
                return 0
        mark = tokenizer.backend.token_to_id(self.closing)
        if mark is not None:
            return ids.index(mark) + 1 if mark in ids else len(ids)

        def has_ended(count: int) -> bool:
            return self.closing in tokenizer.decode(ids[:count], skip_special_tokens=False)

        if has_ended(len(ids)):
            return bisect_left(range(len(ids)), True, key=has_ended)
        return len(ids)


_KIMI = ("<|open|>", "<|close|>", "<|sep|>")
# If several formats match a template, the first is used. Sources: the chat templates of
# DeepSeek-R1, Qwen3, GLM-4.5 and others; Hunyuan-A13B, Granite 3.3, Magistral, Kimi-VL, Kimi-K3,
# Seed-OSS, MiniMax-M3, Hy3, EXAONE-Deep, Apertus, Apriel 1.5, Command R7B, Granite 3.2 and Gemma 4.
THOUGHT_FORMATS = (
    ReasoningFormat(
        "think_answer",
        "<think>",
        "</think>",
        around=(("<answer>", "</answer>"),),
        told_by=("<answer>",),
    ),
    ReasoningFormat(
        "think_response",
        "<think>",
        "</think>",
        around=(("<response>", "</response>"),),
        told_by=("<response></response>", "</think>\\n\\n<response>"),
    ),
    ReasoningFormat("think", "<think>", "</think>"),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("kimi", "◁think▷", "◁/think▷"),
    ReasoningFormat(
        "kimi_k3",
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        tokens=_KIMI,
        around=(
            ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
            ("", "<|close|>message<|sep|>"),
        ),
        told_by=("<|end_of_msg|>",),
    ),
    ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
    ReasoningFormat("minimax_m3", "<mm:think>", "</mm:think>"),
    ReasoningFormat("hy_v3", "<think:opensource>", "</think:opensource>"),
    ReasoningFormat("exaone_deep", "<thought>", "</thought>"),
    ReasoningFormat("apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
    ReasoningFormat(
        "apriel",
        "Here are my reasoning steps:",
        "[BEGIN FINAL RESPONSE]",
        around=(("", "[END FINAL RESPONSE]"),),
    ),
    ReasoningFormat(
        "cohere_command",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        around=(
            ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
            ("<|START_TEXT|>", "<|END_TEXT|>"),
        ),
        told_by=("<|END_THINKING|>", "<|START_RESPONSE|>", "<|START_TEXT|>"),
    ),
    ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
    ReasoningFormat(
        "gemma4", "<|channel>thought", "<channel|>", tokens=("<|channel>", "<channel|>")
    ),
)


class _ThoughtParser:
    """Parses a thought. Drops white space at both ends of the thought and after it."""

    def __init__(self, form: ReasoningFormat, rest: Parser, is_open: bool) -> None:
        self._form, self._rest, self._is_open = form, rest, is_open
        self._text = ""
        self._part = _Part.BEGINNING
        self._has_thought = False

    def push(self, text: str) -> list[Event]:
        self._text += text
        events: list[Event] = []
        if self._part is _Part.BEGINNING:
            opening, head = self._form.opening, self._text.lstrip()
            if head.startswith(opening):
                # If the prompt opens the thought, models may open it again.
                self._text, self._part = head.removeprefix(opening), _Part.THOUGHT
            elif not opening.startswith(head):
                self._part = _Part.THOUGHT if self._is_open else _Part.REST
        if self._part is _Part.THOUGHT:
            closing = self._form.closing
            place = self._text.find(closing)
            if place >= 0:
                thought, self._text = self._text[:place], self._text[place + len(closing) :]
                self._part = _Part.BLANK
            else:
                certain = len(self._text) - held_back(self._text, closing)
                thought, self._text = self._text[:certain], self._text[certain:]
            events += self._thought(thought)
        if self._part is _Part.BLANK:
            self._text = self._text.lstrip()
            self._part = _Part.REST if self._text else _Part.BLANK
        if self._part is _Part.REST:
            text, self._text = self._text, ""
            events += self._rest.push(text)
        return events

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        is_thought = self._part is _Part.THOUGHT or (
            self._part is _Part.BEGINNING and self._is_open
        )
        text, self._text = self._text, ""
        if is_cut and self._part is _Part.BEGINNING and text.strip():
            text = ""
        elif is_cut and is_thought:
            text = text[: len(text) - held_back(text, self._form.closing)]
        events = self._thought(text) if is_thought else self._rest.push(text)
        return events + self._rest.finish(is_cut=is_cut)

    def _thought(self, text: str) -> list[Event]:
        text = text if self._has_thought else text.lstrip()
        text = text if self._part is _Part.THOUGHT else text.rstrip()
        self._has_thought |= bool(text)
        return [Thought(text)] if text else []


class AnswerParser:
    """A `Parser` that removes the marks around an answer and the white space inside them.

    `rest` parses the answer.
    """

    def __init__(self, rest: Parser, marks: Sequence[str]) -> None:
        self._rest, self._marks = rest, marks
        self._text = ""
        self._is_behind_mark = False

    def push(self, text: str) -> list[Event]:
        self._text += text
        events: list[Event] = []
        while found := [
            (place, mark) for mark in self._marks if (place := self._text.find(mark)) >= 0
        ]:
            place, mark = min(found)
            events += self._say(self._text[:place].rstrip())
            self._text, self._is_behind_mark = self._text[place + len(mark) :], True
        certain = len(self._text) - max(held_back(self._text, mark) for mark in self._marks)
        text, self._text = self._text[:certain], self._text[certain:]
        return events + self._say(text)

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        held = max(held_back(self._text, mark) for mark in self._marks)
        if is_cut and self._text[len(self._text) - held :].strip():
            self._text = self._text[: len(self._text) - held]
        return self._say(self._text) + self._rest.finish(is_cut=is_cut)

    def _say(self, text: str) -> list[Event]:
        text = text.lstrip() if self._is_behind_mark else text
        self._is_behind_mark &= not text
        return self._rest.push(text) if text else []


class _Part(Enum):
    """The part of a text that a parser is in."""

    BEGINNING, THOUGHT, BLANK, REST = range(4)
