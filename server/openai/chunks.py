"""Streams of OpenAI's shape: chunks of one choice each, then the usage, then `[DONE]`."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from ...runtime.tokenizer.output_processor import RequestOutput, RequestState
from ..collector import Update
from ..sse import DONE, encode_json, event
from ..state import Serving
from .protocol import GenerationBody


def head(serving: Serving, request_id: str, kind: str) -> dict[str, Any]:
    """The members that a response and every chunk of a stream begin with."""
    return {
        "id": request_id,
        "object": kind,
        "created": int(time.time()),
        "model": serving.model_name,
        "system_fingerprint": serving.fingerprint,
    }


class Usage:
    """Counts the tokens of one request: each prompt once, and every token that was sampled."""

    def __init__(self, requests: Sequence[RequestState], samples: int) -> None:
        self._samples = samples
        self._prompt_tokens = sum([len(request.prompt_ids) for request in requests[::samples]])
        self._cached_tokens = 0
        self.completion_tokens = 0

    def begin(self, index: int, output: RequestOutput) -> None:
        """The first output of sequence `index` tells of its prompt."""
        if index % self._samples == 0:
            self._cached_tokens += output.cached_tokens

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self._prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }


def total_usage(
    requests: Sequence[RequestState], samples: int, outputs: Sequence[RequestOutput]
) -> dict[str, Any]:
    """The usage of a whole answer."""
    usage = Usage(requests, samples)
    for index, output in enumerate(outputs):
        usage.begin(index, output)
        usage.completion_tokens += len(output.token_ids)
    return usage.as_dict()


class ChunkWriter(ABC):
    """Chunks that begin with `start`, which is encoded once."""

    def __init__(self, start: dict[str, Any], usage: Usage, body: GenerationBody) -> None:
        options = body.stream_options
        self._start = start
        self._prefix = b"data: " + encode_json(start)[:-1] + b',"choices":['
        self._usage = usage
        self._include_usage = options is not None and options.include_usage
        self._continuous_usage = options is not None and options.continuous_usage_stats
        self._suffix = b'],"usage":null}\n\n' if self._include_usage else b"]}\n\n"
        self._begun: set[int] = set()

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice that comes before any token of sequence `index` is told of."""
        return None

    @abstractmethod
    def choices(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """The choices that tell what is new about sequence `index`."""

    def events(self, updates: list[Update]) -> bytes:
        events = []
        for index, output in updates:
            if index not in self._begun:
                self._begun.add(index)
                self._usage.begin(index, output)
                if (opening := self.opening(index)) is not None:
                    events.append(self._chunk(opening))
            self._usage.completion_tokens += len(output.token_ids)
            for choice in self.choices(index, output):
                events.append(self._chunk(choice))
        return b"".join(events)

    def end(self) -> bytes:
        if not self._include_usage:
            return DONE
        return event({**self._start, "choices": [], "usage": self._usage.as_dict()}) + DONE

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        suffix = self._suffix
        if self._continuous_usage:
            suffix = b'],"usage":' + encode_json(self._usage.as_dict()) + b"}\n\n"
        return self._prefix + encode_json(choice) + suffix
