"""One sequence inside the engine: its tokens, how far it is computed, and the pages it holds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..cache.radix import Node
from ..sampling.params import SamplingParams
from ..sampling.token_counts import TokenCounts
from .messages import GenerateRequest, TokenLogprob


class Request:
    """Tokens [0, num_computed) have their keys and values in `pages`; the rest is to be computed.

    A request decodes when one token is left, the one sampled last; before that it prefills. The
    last `num_placeholders` tokens stand for those that a step in flight samples: the device knows
    them and the host does not yet. `shared_pages` of its pages, from the front, belong to the
    prefix tree and are held by the lock on `node`.
    """

    def __init__(
        self, message: GenerateRequest, *, seed: int, stop_ids: frozenset[int], max_tokens: int
    ) -> None:
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
        """Length with the placeholders."""
        self.num_placeholders = 0
        self.sampled_row = 0
        """Where the last placeholder's token stands among those that its step samples."""
        self.finished = False
        """It has ended or was aborted: what a step in flight gives it is of no use."""
        self.num_computed = 0
        """How far it is computed, by steps that have been launched."""
        self.pages: list[int] = []
        self.shared_pages = 0
        self.node: Node | None = None
        self.cached_tokens: int | None = None
        """Prompt tokens found in the prefix tree when it first ran; None before."""
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self.prompt_logprobs_due = (
            self.params.prompt_logprobs is not None and not message.output_ids
        )
        self._counts: TokenCounts | None = None
        self._tokens = np.empty(self.num_tokens + 64, np.int64)
        self._tokens[: self.num_prompt] = message.input_ids
        self._tokens[self.num_prompt : self.num_tokens] = message.output_ids

    @property
    def num_known(self) -> int:
        """Length as far as the host knows the tokens."""
        return self.num_tokens - self.num_placeholders

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """Prompt and output as far as the host knows them."""
        return self._tokens[: self.num_known]

    @property
    def output_tokens(self) -> npt.NDArray[np.int64]:
        return self.tokens[self.num_prompt :]

    @property
    def num_output(self) -> int:
        """Tokens after the prompt, placeholders included."""
        return self.num_tokens - self.num_prompt

    @property
    def awaits_end(self) -> bool:
        """Whether nothing is left to compute: the token in flight ends it, whatever it is."""
        return self.num_computed == self.num_tokens or (
            self.num_placeholders > 0 and self.num_tokens >= self.max_tokens
        )

    @property
    def order(self) -> tuple[int, float, str]:
        """Who goes first: the higher priority, then the earlier arrival."""
        return (-self.priority, self.arrival_time, self.rid)

    def count_tokens(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """The distinct ones of `tokens` [U], and how often `output_tokens` has each [U]. Both are
        views that the next call may change.
        """
        if self._counts is None:
            self._counts = TokenCounts(self.tokens[: self.num_prompt])
        return self._counts.of(self.output_tokens)

    def span(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Tokens [begin, end), with 0 for a placeholder."""
        return self._tokens[begin:end]

    def add_placeholder(self, row: int) -> None:
        """A step that was launched samples one more token, the one in this row."""
        if self.num_tokens == len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.empty_like(self._tokens)))
        self._tokens[self.num_tokens] = 0
        self.num_tokens += 1
        self.num_placeholders += 1
        self.sampled_row = row

    def drop_placeholders(self) -> None:
        """The step in flight will not be read."""
        self.num_tokens -= self.num_placeholders
        self.num_placeholders = 0
        self.num_computed = min(self.num_computed, self.num_tokens)

    def resolve(self, token: int) -> None:
        """The first placeholder is this token."""
        self._tokens[self.num_tokens - self.num_placeholders] = token
        self.num_placeholders -= 1
