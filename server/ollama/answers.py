"""Answers of Ollama's chats and generations. A stream is made of the same objects, one per line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ...runtime.core.generation import FinishReason
from ...runtime.tokenizer.output_processor import RequestOutput
from ..core.answers import Answer
from ..openai.conversation import AnswerReader
from ..openai.logprobs import ChosenLogprob, TokenTrail
from ..parsing.events import Arguments, CallBegins, Text, Thought, arguments_of

DoneReason = Literal["stop", "length", "abort", "load"]


class OllamaFunction(Answer):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(Answer):
    id: str
    function: OllamaFunction


class OllamaContent(Answer, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET


class OllamaAnswer(Answer, kw_only=True):
    """Members after `done` are set in the last object. Durations are in nanoseconds.

    `load_duration` is the time until the engine has begun with the prompt.
    """

    model: str
    created_at: str
    done: bool = False
    done_reason: DoneReason | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[ChosenLogprob | msgspec.Raw] | UnsetType = UNSET


class OllamaChat(OllamaAnswer, kw_only=True):
    message: OllamaContent


class OllamaGeneration(OllamaAnswer, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET


def now() -> str:
    """Return the time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def chat_answer(content: OllamaContent, **members: Any) -> OllamaChat:
    return OllamaChat(message=content, created_at=now(), **members)


def generate_answer(content: OllamaContent, **members: Any) -> OllamaGeneration:
    return OllamaGeneration(
        response=content.content, thinking=content.thinking, created_at=now(), **members
    )


Part = tuple[OllamaContent, Sequence[msgspec.Raw]]  # New content, and its log-probabilities.


class ContentReader:
    """Reads the outputs of one sequence. A call is sent once its arguments are complete."""

    def __init__(self, reader: AnswerReader, trail: TokenTrail | None, call_id: str) -> None:
        """`trail` is None if no log-probabilities are asked for."""
        self._reader, self._trail, self._call_id = reader, trail, call_id
        self._name: str | None = None  # The function of the open call.
        self._arguments: list[str] = []
        self._calls = 0

    def read(self, output: RequestOutput) -> Iterator[Part]:
        """Yield what is new."""
        trail = self._trail
        if trail is not None:
            trail.push(output.logprobs or ())
        for event in self._reader.push(output):
            entries = trail.read(event) if trail is not None else []
            if isinstance(event, Arguments):
                self._arguments.append(event.text)
                continue
            yield from self._end_call()
            match event:
                case Text(text):
                    yield OllamaContent(content=text), entries
                case Thought(text):
                    yield OllamaContent(thinking=text), entries
                case CallBegins(name):
                    self._name = name
        if output.finish_reason is not None:
            yield from self._end_call()
            if trail is not None and (rest := trail.rest()):
                yield OllamaContent(), rest

    def _end_call(self) -> Iterator[Part]:
        if self._name is None:
            return
        arguments = arguments_of("".join(self._arguments))
        function = OllamaFunction(self._calls, self._name, arguments)
        call = OllamaToolCall(f"call_{self._call_id}_{self._calls}", function)
        self._name, self._arguments, self._calls = None, [], self._calls + 1
        yield OllamaContent(tool_calls=[call]), []


def joined(parts: Sequence[Part]) -> Part:
    """Return the parts of a whole answer as one."""
    thoughts = "".join([part.thinking for part, _ in parts if part.thinking is not UNSET])
    calls = [call for part, _ in parts if part.tool_calls is not UNSET for call in part.tool_calls]
    content = OllamaContent(
        content="".join([part.content for part, _ in parts]),
        thinking=thoughts or UNSET,
        tool_calls=calls or UNSET,
    )
    return content, [entry for _, entries in parts for entry in entries]


def done_reason(output: RequestOutput) -> DoneReason:
    match output.finish_reason:
        case FinishReason.LENGTH:
            return "length"
        case FinishReason.ABORT:
            return "abort"
    return "stop"
