"""One sequence inside the engine: its tokens, how far it is computed, and the pages it holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..cache.block_pool import Block
from ..cache.radix import Column, Node
from ..sampling.grammar import Matcher
from ..sampling.logits_processors import LogitsProcessor, processors_for
from .messages import GenerateRequest, TokenLogprob
from .sampling_params import SamplingParams
from .thought_budget import ThoughtBudget


class Request:
    """Tokens [0, num_computed) have their keys and values in `pages`; the rest is to be computed.

    A request decodes when one token is left, the one sampled last; before that it prefills. The
    last `num_placeholders` tokens stand for those that a step in flight samples: the device knows
    them and the host does not yet. `shared_pages` of its pages, from the front, belong to the
    prefix tree and are held by the lock on `node`.

    Of a model with sliding windows `window` has a block for each page too, and holes before
    `window_begin`, which no window reaches any more.

    Of a model with a recurrent state, whose slots are blocks: `state` has the request's own, into
    which its next step copies that of `state_source` (None: it goes on with what is there), and
    behind which it is copied to `snapshot` where one is wanted. `saved`: the last snapshot, until
    it is shared, or its slot is needed; `saved_at`: behind how many tokens that was. `branch`: how
    many tokens the prefix tree knew when the request began, more of them perhaps than it had a
    snapshot behind.
    """

    def __init__(
        self,
        message: GenerateRequest,
        *,
        seed: int,
        stop_ids: frozenset[int],
        max_tokens: int,
        grammar: Matcher | None = None,
    ) -> None:
        self.rid = message.rid
        self.params: SamplingParams = message.params
        self.priority = message.priority
        self.arrival_time = message.arrival_time
        self.seed = seed
        self.stop_ids = stop_ids
        self.max_tokens = max_tokens
        """Length, prompt included, at which the request ends."""
        self.grammar = grammar
        if grammar is not None:
            grammar.accept(message.output_ids)
        self.thought: ThoughtBudget | None = None
        if self.params.thinking_budget is not None:
            self.thought = ThoughtBudget(self.params, message.output_ids)
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
        self.state: Block | None = None
        self.state_source: int | None = None
        self.snapshot: Block | None = None
        self.saved: Column = {}
        self.window: list[Block] = []
        self.window_begin = 0
        self.saved_at = self.branch = 0
        self.node: Node | None = None
        self.cached_tokens: int | None = None
        """Prompt tokens found in the prefix tree when it first ran; None before."""
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self.prompt_logprobs_due = (
            self.params.prompt_logprobs is not None and not message.output_ids
        )
        self._tokens = np.empty(self.num_tokens + 64, np.int64)
        self._tokens[: self.num_prompt] = message.input_ids
        self._tokens[self.num_prompt : self.num_tokens] = message.output_ids
        self.processors: Sequence[LogitsProcessor] = processors_for(
            self.params, self._tokens[: self.num_prompt], self.stop_ids, grammar
        )
        self.needs_last_token = any(processor.needs_last_token for processor in self.processors)
        """Whether a processor must know the last token before the next is sampled."""

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
    def awaits_token(self) -> bool:
        """Whether the step in flight must be read before this goes on: its token ends it, whatever
        it is, a logits processor must know it, or the thought may be closed behind it.
        """
        return self.num_computed == self.num_tokens or (
            self.num_placeholders > 0
            and (
                self.num_tokens >= self.max_tokens
                or self.needs_last_token
                or (self.thought is not None and self.thought.may_close(self.num_placeholders))
            )
        )

    @property
    def contradiction(self) -> str | None:
        """Why no token can follow, where `min_new_tokens` bans all that the grammar allows."""
        has_enough = self.num_known - self.num_prompt >= self.params.min_new_tokens
        if self.grammar is None or has_enough or not self.grammar.takes_only(self.stop_ids):
            return None
        return "before min_new_tokens nothing that it allows may be chosen"

    @property
    def order(self) -> tuple[int, float, str]:
        """Who goes first: the higher priority, then the earlier arrival."""
        return (-self.priority, self.arrival_time, self.rid)

    def span(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Tokens [begin, end), with 0 for a placeholder."""
        return self._tokens[begin:end]

    def token(self, position: int) -> int:
        """One of them."""
        return self._tokens.item(position)

    def add_placeholder(self, row: int) -> None:
        """A step that was launched samples one more token, the one in this row."""
        self._append(0)
        self.num_placeholders += 1
        self.sampled_row = row

    def drop_placeholders(self) -> None:
        """The step in flight will not be read."""
        self.num_tokens -= self.num_placeholders
        self.num_placeholders = 0
        self.num_computed = min(self.num_computed, self.num_tokens)

    def resolve(self, tokens: list[int]) -> None:
        """A step has given these: the first stands where the first placeholder is. More than one
        are for requests of which no other step is in flight.
        """
        if not tokens:
            assert not self.num_placeholders, "a step sampled for this request and gave nothing"
            return
        self._tokens[self.num_known] = tokens[0]
        self.num_placeholders -= 1
        for token in tokens[1:]:
            assert not self.num_placeholders, "several tokens before a placeholder"
            self._append(token)

    def _append(self, token: int) -> None:
        if self.num_tokens == len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.empty_like(self._tokens)))
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1
