"""Streams in OpenAI's format: chunks with one choice each, then the usage, then `[DONE]`."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from ...runtime.tokenizer.output_processor import RequestOutput, RequestState
from ..core.answers import Answer
from ..core.errors import ApiError
from ..serving.cached_tokens import CachedTokensDetails, cached_tokens_details
from ..serving.collector import Update
from ..serving.sse import DONE, encode_json, event
from ..serving.state import Serving
from .requests import GenerationBody


class PromptTokensDetails(Answer):
    """`cached_tokens_details` is set if some of the cached tokens came from a lower tier, and
    `image_tokens` for prompts with images.
    """

    cached_tokens: int
    cached_tokens_details: CachedTokensDetails | UnsetType = UNSET
    image_tokens: int | UnsetType = UNSET


class CompletionTokensDetails(Answer):
    """Thoughts are counted for models that think, and the other two for requests with a
    `prediction`: its tokens that were verified, and were right or wrong.
    """

    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class UsageAnswer(Answer):
    """`completion_tokens_details` is set if it has a member."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class GenerationAnswer(Answer, kw_only=True):
    """What a whole answer and each chunk of a stream have in common."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[Answer]
    usage: UsageAnswer | UnsetType | None = UNSET


def head(serving: Serving, request_id: str, request: RequestState) -> dict[str, Any]:
    """Return the members that are the same in a whole answer and in every chunk of a stream.

    `request` is one of the sequences.
    """
    return {
        "id": request_id,
        "created": int(time.time()),
        "model": request.adapter_name or serving.model_name,
        "system_fingerprint": serving.fingerprint,
    }


def usage_of(requests: Sequence[RequestState], samples: int, completion_tokens: int) -> UsageAnswer:
    """Return `usage` of one HTTP request: each prompt once, and every sampled token."""
    prompt_tokens = cached_tokens = image_tokens = 0
    for request in requests[::samples]:
        prompt_tokens += len(request.prompt_ids)
        cached_tokens += request.cached_tokens or 0
        image_tokens += request.image_tokens
    usage = UsageAnswer(
        prompt_tokens,
        completion_tokens,
        prompt_tokens + completion_tokens,
        PromptTokensDetails(
            cached_tokens,
            cached_tokens_details(requests[::samples]),
            image_tokens=image_tokens or UNSET,
        ),
    )
    if requests[0].prediction_ids:
        usage.completion_tokens_details = CompletionTokensDetails(
            accepted_prediction_tokens=sum(each.accepted_prediction for each in requests),
            rejected_prediction_tokens=sum(each.rejected_prediction for each in requests),
        )
    return usage


class ChunkWriter(ABC):
    """Writes chunks, which differ from `start` in their choices and their usage.

    `start` is encoded once. For chunks that hold only text, the bytes around the text are encoded
    once, too.
    """

    def __init__(
        self,
        serving: Serving,
        start: GenerationAnswer,
        requests: Sequence[RequestState],
        body: GenerationBody,
        *,
        is_plain: bool = True,
    ) -> None:
        """If `is_plain`, the text of a sequence is sent as it arrives, without a parser."""
        self._tokenizer = serving.engine.tokenizer
        options = body.stream_options
        self._requests = requests
        self._samples = body.samples
        self._include_usage = options is not None and options.include_usage
        self._continuous_usage = options is not None and options.continuous_usage_stats
        self._is_plain = is_plain and not self._continuous_usage
        self._start = start
        start.usage = None if self._include_usage else UNSET
        before, after = event(start).rsplit(b"[]", 1)
        self._prefix, self._suffix = before + b"[", b"]" + after
        self._sent: dict[int, int] = {}  # Tokens of each sequence whose output the client has got.
        self._around_text: dict[int, tuple[bytes, bytes]] = {}

    def opening(self, index: int) -> Answer | None:
        """Return the choice that is sent before any token of sequence `index`, or None."""
        return None

    @abstractmethod
    def text_choice(self, index: int, text: str) -> Answer:
        """Return a choice with only new text."""

    @abstractmethod
    def choices(self, index: int, output: RequestOutput) -> Sequence[Answer]:
        """Return the choices for new output of sequence `index`."""

    def events(self, updates: list[Update]) -> bytes:
        events = []
        for index, output in updates:
            around = self._around_text.get(index)
            if around is not None and output.logprobs is None and output.finish_reason is None:
                self._sent[index] = output.completion_tokens
                if output.text:
                    events += [around[0], encode_json(output.text), around[1]]
                continue
            if index not in self._sent:
                self._sent[index] = 0
                if (opening := self.opening(index)) is not None:
                    events.append(self._chunk(opening))
                if self._is_plain:
                    before, _, after = self._chunk(self.text_choice(index, "")).rpartition(b'""')
                    self._around_text[index] = before, after
            self._sent[index] = output.completion_tokens
            events += [self._chunk(choice) for choice in self.choices(index, output)]
        return b"".join(events)

    def end(self) -> bytes:
        if not self._include_usage:
            return DONE
        self._start.usage = self.usage()
        return event(self._start) + DONE

    def error(self, error: ApiError) -> bytes:
        return event(error.answer())

    @property
    def sent_tokens(self) -> int:
        """Number of tokens whose output the client has got."""
        return sum(self._sent.values())

    def usage(self) -> UsageAnswer:
        """Return the `usage` up to now."""
        return usage_of(self._requests, self._samples, self.sent_tokens)

    def _chunk(self, choice: Answer) -> bytes:
        suffix = self._suffix
        if self._continuous_usage:
            suffix = b'],"usage":' + encode_json(self.usage()) + b"}\n\n"
        return self._prefix + encode_json(choice) + suffix
