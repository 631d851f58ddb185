"""One sequence inside the engine: its tokens, how far it is computed, and the pages it holds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .cache.radix import Node
from .messages import GenerateRequest, TokenLogprob
from .sampling_params import SamplingParams


class Request:
    """Tokens [0, num_computed) have their keys and values in `pages`; the rest is to be computed.

    A request decodes when one token is left, the one sampled last; before that it prefills.
    `shared_pages` of its pages, from the front, belong to the prefix tree and are held by the lock on `node`.
    """

    def __init__(self, message: GenerateRequest, *, seed: int, stop_ids: frozenset[int], max_tokens: int) -> None:
        self.rid = message.rid
        self.params: SamplingParams = message.params
        self.priority = message.priority
        self.arrival_time = message.arrival_time
        self.seed = seed
        self.stop_ids = stop_ids
        self.max_tokens = max_tokens
        """Length, prompt included, at which the request ends."""
        self.num_prompt = len(message.input_ids)
        self.num_tokens = self.num_prompt + len(message.output_ids)
        self.num_computed = 0
        self.pages: list[int] = []
        self.shared_pages = 0
        self.node: Node | None = None
        self.cached_tokens: int | None = None
        """Prompt tokens found in the prefix tree when it first ran; None before."""
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.prompt_logprobs_due = self.params.prompt_logprobs is not None and not message.output_ids
        self._tokens = np.empty(self.num_tokens + 64, np.int64)
        self._tokens[: self.num_prompt] = message.input_ids
        self._tokens[self.num_prompt : self.num_tokens] = message.output_ids

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """Prompt and output so far."""
        return self._tokens[: self.num_tokens]

    @property
    def output_tokens(self) -> npt.NDArray[np.int64]:
        return self._tokens[self.num_prompt : self.num_tokens]

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def order(self) -> tuple[int, float, str]:
        """Who goes first: the higher priority, then the earlier arrival."""
        return (-self.priority, self.arrival_time, self.rid)

    def append(self, token: int) -> None:
        if self.num_tokens == len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.empty_like(self._tokens)))
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1
