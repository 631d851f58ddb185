"""Messages of one text: the request, and what each step gives it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from .images import ImageInput, named
from .sampling_params import SamplingParams

_MARK = b"\xff"  # No part of any text in UTF-8.


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Generate a continuation of `input_ids`.

    Attributes:
        output_ids: Tokens that were delivered before the engine restarted. They are computed again,
            but neither sampled nor sent again.
        priority: Requests of higher priority run first.
        arrival_time: Seconds by `time.monotonic()`. Orders requests of equal priority.
        eos_token_ids: Tokens that end a text according to the tokenizer's files and the chat
            template, which the engine does not read. The model's own end tokens count too.
        prediction_ids: Text that the client expects. It makes the answer faster, and does not
            change it.
        tenant: Requests of different tenants share neither cached prefixes nor what speculation
            learns from answers.
        adapter: Identity of the adapter (LoRA) that answers (`AdapterInfo`). "": the base model.
        loaded: Numbers of tokens that the engine has loaded for the request from the host's memory
            and from disk.
        images: The images of the prompt, in order. They do not overlap.
        keep: Prefixes of the prompt that the client wants to find later: numbers of tokens, and
            seconds. If memory is needed meanwhile, other prefixes are evicted first.
        client: Name of the API key. Clients share the memory of prefixes that are kept.
    """

    rid: str
    input_ids: list[int]
    params: SamplingParams
    output_ids: list[int] = field(default_factory=list)
    priority: int = 0
    arrival_time: float = 0.0
    eos_token_ids: list[int] = field(default_factory=list)
    prediction_ids: list[int] = field(default_factory=list)
    tenant: str = ""
    adapter: str = ""
    loaded: tuple[int, int] = (0, 0)
    images: list[ImageInput] = field(default_factory=list)
    keep: list[tuple[int, float]] = field(default_factory=list)
    client: str = ""

    @property
    def namespace(self) -> bytes:
        """Requests find only cached prefixes of their own namespace."""
        tenant = self.tenant.encode()
        return _MARK + self.adapter.encode() + _MARK + tenant if self.adapter else tenant

    def names(self) -> npt.NDArray[np.int64]:
        """Return the ids of prompt and output by which the prefix cache knows them.

        Positions of images have the names of their image.
        """
        return named([*self.input_ids, *self.output_ids], self.images)


def adapter_of(namespace: bytes) -> str:
    """Return the adapter of a namespace; "" for the base model."""
    return namespace.split(_MARK)[1].decode() if namespace.startswith(_MARK) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """The log-probability of the token at one position.

    `top` are the most likely tokens, best first, as (id, log-probability). `rank`, for tokens of
    prompts only, counts the tokens that are at least as likely, the token itself included.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """The result of one step for one request.

    Attributes:
        token_ids: The new tokens.
        stop_token_id: The last of `token_ids`, if it ended the sequence (`FinishReason.STOP`).
        cached_tokens: Number of prompt tokens found in the prefix cache.
        loaded: How many of them came from the host's memory and from disk.
        predicted: Numbers of tokens of the prediction that the step verified and that were right,
            and wrong.
        logprobs: One entry per new token, if asked for.
        prompt_logprobs: One entry per prompt position from `prompt_logprobs_start` on, sent once,
            with the first token. Position 0 has no log-probability, so its entry is None.
        error: Explains `FinishReason.ERROR`.
        code: Set if the client can correct the error.
    """

    rid: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    cached_tokens: int = 0
    loaded: tuple[int, int] = (0, 0)
    predicted: tuple[int, int] = (0, 0)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error: str | None = None
    code: str | None = None
