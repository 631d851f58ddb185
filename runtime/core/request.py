"""One sequence inside the engine: its tokens, how far it is computed, and the pages it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .generation import GenerateRequest, TokenLogprob
from .logits_processor import GrammarState, LogitsProcessor, MakesProcessors
from .sampling_params import SamplingParams
from .thought_budget import ThoughtBudget


class Request:
    """One sequence from its arrival to its end.

    The keys and values of tokens [0, num_computed) are in the cache; the later tokens are not
    computed yet. A request decodes if exactly one token is left, the one sampled last; before that
    it prefills.

    The fields from `pages` to `node` belong to the cache (`cache.holder`); other rooms read them.

    Attributes:
        namespace: Requests find only prefixes of their own namespace in the cache.
        max_tokens: Length, prompt included, at which the request ends.
        grammar: Position of the output in its grammar, or None without a grammar.
        thought: Counts the tokens of a thought, or None if thoughts have no budget.
        num_tokens: Length of prompt and output, placeholders included.
        num_placeholders: Number of last tokens that a step in flight samples. The device knows
            them, the host does not.
        sampled_row: Row of the last placeholder's token among the tokens that its step samples.
        proposals: Tokens that may follow the known ones. The next step verifies them.
        guesses: What speculation knows of the request (`speculative`).
        prediction: Text that the client expects.
        predicted: Numbers of its tokens that the last step accepted and rejected.
        finished: Whether the request ended or was aborted. Tokens of a step in flight are dropped.
        num_computed: Number of tokens computed by the steps that were launched.
        cached_tokens: Prompt tokens found in the prefix tree when the request first ran; None
            before.
        loaded: That of `GenerateRequest`.
        prompt_logprobs_due: Whether log-probabilities of the prompt are still to be computed.
        adapter, keep, client: Those of `GenerateRequest`.
        adapter_slot: Where the device has the adapter while the request runs; -1: nowhere.
        images: The images of the prompt, in order. The last one ends before `images_end`.
        turns: The positions [prompt] by which tokens of the prompt are rotated, if these are others
            than those of the text (M-RoPE). Rows of images get theirs from the encoder.
        turn_shift: What is added to later positions before they rotate.
        needs_last_token: Whether a logits processor must know the last token before the next one is
            sampled.

    Attributes of the cache:
        pages: Page of each run of `page_size` tokens. The first `shared_pages` belong to the prefix
            tree, and the lock on `node` holds them.
        window: For models with sliding windows, a block for each page. Blocks before `window_begin`
            are holes, because no window reaches them any more.
        state: For models with a recurrent state, the slot of the request. Before its next step,
            slot `state_source` is copied into it, unless that is None.
        snapshot: Slot into which the state is copied after the next step, or None.
        saved: The last snapshot, until it enters the prefix tree. It may have been evicted.
        saved_at: Number of tokens before the last snapshot.
        branch: Number of tokens that the prefix tree knew when the request began. The tree may have
            had no snapshot there.
        before: Slot into which the state is copied before a step that verifies proposals, or None.
        before_at: Number of tokens before that step.
    """

    def __init__(
        self,
        message: GenerateRequest,
        *,
        seed: int,
        stop_ids: frozenset[int],
        max_tokens: int,
        grammar: GrammarState | None = None,
        make_processors: MakesProcessors | None = None,
    ) -> None:
        self.rid = message.rid
        self.params: SamplingParams = message.params
        self.priority = message.priority
        self.arrival_time = message.arrival_time
        self.tenant, self.prediction = message.tenant, message.prediction_ids
        self.namespace = message.namespace
        self.loaded = message.loaded
        self.predicted = 0, 0
        self.adapter, self.adapter_slot = message.adapter, -1
        self.keep, self.client = message.keep, message.client
        self.images = message.images
        self.images_end = self.images[-1].end if self.images else 0
        self._image_names = [(image.start, image.end, image.names()) for image in self.images]
        self.turns: npt.NDArray[np.int64] | None = None
        self.turn_shift = 0
        self.seed = seed
        self.stop_ids = stop_ids
        self.max_tokens = max_tokens
        self.grammar = grammar
        if grammar is not None:
            grammar.accept(message.output_ids)
        self.thought: ThoughtBudget | None = None
        if self.params.thinking_budget is not None:
            self.thought = ThoughtBudget(self.params, message.output_ids)
        self.num_prompt = len(message.input_ids)
        self.num_tokens = self.num_prompt + len(message.output_ids)
        self.num_placeholders = 0
        self.sampled_row = 0
        self.proposals: list[int] = []
        self.guesses: Any = None
        self.finished = False
        self.num_computed = 0
        self.cached_tokens: int | None = None
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self.prompt_logprobs_due = (
            self.params.prompt_logprobs is not None and not message.output_ids
        )
        self.pages: list[int] = []
        self.shared_pages = 0
        self.window: list[Any] = []
        self.window_begin = 0
        self.state: Any = None
        self.state_source: int | None = None
        self.snapshot: Any = None
        self.saved: Any = None
        self.saved_at = self.branch = 0
        self.before: Any = None
        self.before_at = 0
        self.node: Any = None
        self._tokens = np.empty(self.num_tokens + 64, np.int64)
        self._tokens[: self.num_prompt] = message.input_ids
        self._tokens[self.num_prompt : self.num_tokens] = message.output_ids
        self.processors: Sequence[LogitsProcessor] = ()
        if make_processors is not None:
            prompt = self._tokens[: self.num_prompt]
            self.processors = make_processors(self.params, prompt, stop_ids, grammar)
        self.needs_last_token = any(processor.needs_last_token for processor in self.processors)

    @property
    def ahead(self) -> Sequence[int]:
        """No proposals: `Ahead` is a request after some of them."""
        return ()

    @property
    def num_known(self) -> int:
        """Number of tokens that the host knows."""
        return self.num_tokens - self.num_placeholders

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """The tokens of prompt and output that the host knows."""
        return self._tokens[: self.num_known]

    @property
    def names(self) -> npt.NDArray[np.int64]:
        """The known tokens, by the ids under which the prefix cache keeps them.

        Positions of images have the names of their image (`ImageInput.names`).
        """
        if not self._image_names:
            return self.tokens
        names = self.tokens.copy()
        for start, end, own in self._image_names:
            names[start:end] = own
        return names

    @property
    def output_tokens(self) -> npt.NDArray[np.int64]:
        return self.tokens[self.num_prompt :]

    @property
    def num_output(self) -> int:
        """Tokens after the prompt, placeholders included."""
        return self.num_tokens - self.num_prompt

    @property
    def awaits_token(self) -> bool:
        """Whether the next step must wait until the step in flight is read.

        That is so if the sampled token ends the request by length, if a logits processor must know
        the token, if the budget of the thought may end with it, or if proposals are verified.
        """
        return self.num_computed == self.num_tokens or (
            self.num_placeholders > 0
            and (
                self.num_tokens >= self.max_tokens
                or self.needs_last_token
                or bool(self.proposals)
                or (self.thought is not None and self.thought.may_close(self.num_placeholders))
            )
        )

    @property
    def contradiction(self) -> str | None:
        """Why no token can follow: `min_new_tokens` bans every token that the grammar allows."""
        has_enough = self.num_known - self.num_prompt >= self.params.min_new_tokens
        if self.grammar is None or has_enough or not self.grammar.takes_only(self.stop_ids):
            return None
        return "before min_new_tokens nothing that it allows may be chosen"

    @property
    def order(self) -> tuple[int, float, str]:
        """Sort key: the higher priority first, then the earlier arrival."""
        return (-self.priority, self.arrival_time, self.rid)

    def span(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Return tokens [begin, end), proposals included. A placeholder is 0."""
        return self._tokens[begin:end]

    def token(self, position: int) -> int:
        """Return the token at `position`. A placeholder is 0."""
        return self._tokens.item(position)

    def propose(self, tokens: list[int]) -> None:
        """Have the next step verify `tokens`, which may follow the known ones."""
        assert not self.num_placeholders, "the tokens before a proposal must be known"
        self.proposals = tokens
        self._make_room(len(tokens))
        self._tokens[self.num_tokens : self.num_tokens + len(tokens)] = tokens

    def add_placeholder(self, row: int) -> None:
        """Append a placeholder: a launched step samples the token in its row `row`."""
        self._append(0)
        self.num_placeholders += 1
        self.sampled_row = row

    def drop_placeholders(self) -> None:
        """Remove the placeholders, because the step in flight will not be read."""
        self.num_tokens -= self.num_placeholders
        self.num_placeholders = 0
        self.proposals = []
        self.num_computed = min(self.num_computed, self.num_tokens)

    def resolve(self, tokens: list[int]) -> None:
        """Store the tokens that a step sampled. The first one replaces the first placeholder.

        More than one token is allowed only if no other step of this request is in flight.
        """
        if not tokens:
            assert not self.num_placeholders, "a step sampled for this request and gave nothing"
            return
        self._tokens[self.num_known] = tokens[0]
        self.num_placeholders -= 1
        for token in tokens[1:]:
            assert not self.num_placeholders, "several tokens before a placeholder"
            self._append(token)

    def follow(self, tokens: npt.NDArray[np.int64]) -> None:
        """Take over the tokens of another request with the same prompt.

        Keys and values of tokens that were taken over before and differ now are computed again.
        """
        length = min(self.num_tokens, len(tokens))
        differing = np.flatnonzero(self._tokens[:length] != tokens[:length])
        alike = int(differing[0]) if len(differing) else length
        self.num_tokens = alike
        self._make_room(len(tokens) - alike)
        self._tokens[alike : len(tokens)] = tokens[alike:]
        self.num_tokens = len(tokens)
        # The last token is always computed, because its logits are wanted.
        self.num_computed = min(self.num_computed, alike, len(tokens) - 1)

    def _append(self, token: int) -> None:
        self._make_room(1)
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1

    def _make_room(self, count: int) -> None:
        if self.num_tokens + count > len(self._tokens):
            more = np.empty(max(count, len(self._tokens)), np.int64)
            self._tokens = np.concatenate((self._tokens, more))


class Scheduled(NamedTuple):
    """The step computes `num_new` tokens of `request`, from its `num_computed` on.

    The last of them are its `proposals`, if it has some.
    """

    request: Request
    num_new: int
