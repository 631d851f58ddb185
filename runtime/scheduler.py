"""The loop: receive, plan a batch, run it, deliver.

A step is a list of (request, number of new tokens) under a token budget: a prefill chunk is many new tokens, a decode is
one. So chunked prefill, prefix hits, decodes and mixed batches are one path.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from .batch import Batch, Scheduled, build_batch
from .cache.kv_cache import KVCache
from .logprobs import token_logprobs
from .messages import EngineStats, FinishReason, GenerateRequest, StepOutput, TokenLogprob, TokenOutput
from .request import Request
from .sampler import Sampled, sample
from .step_graphs import GraphCounts

_LOGIT_ROWS = 256
"""Prompt positions whose logits are held at once: 256 rows of a vocabulary of 150,000 take 150 MB."""


class Runner(Protocol):
    """What the scheduler needs of a model."""

    device: torch.device
    slot_dtype: torch.dtype
    vocab_size: int
    eos_token_ids: frozenset[int]

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states [T, hidden] of a step; writes keys and values of its tokens."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] float32 of hidden [N, hidden]; a tensor of its own."""
        ...

    def graph_counts(self) -> GraphCounts:
        """How the steps so far have run."""
        ...


class Scheduler:
    """Holds every request of an engine from arrival to its last token."""

    def __init__(
        self,
        runner: Runner,
        cache: KVCache,
        *,
        token_budget: int,
        max_running_requests: int,
        context_length: int,
        draw_seed: Callable[[], int],
    ) -> None:
        self._runner = runner
        self._cache = cache
        self._token_budget = token_budget
        self._max_running = max_running_requests
        self._context_length = context_length
        self._draw_seed = draw_seed
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._rejected: list[TokenOutput] = []
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = self._preemptions = self._steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._rejected)

    def add(self, message: GenerateRequest) -> None:
        """Queue a request; one that can never run is answered with an error at the next step."""
        try:
            insort(self._waiting, self._admit(message), key=_order)
        except ValueError as error:
            self._rejected.append(TokenOutput(rid=message.rid, token_ids=[], finish_reason=FinishReason.ERROR, error=str(error)))

    def abort(self, rids: Iterable[str]) -> None:
        """Free these requests at once; they deliver nothing more."""
        gone = set(rids)
        for request in [r for r in self._running + self._waiting if r.rid in gone]:
            self._remove(request)

    def flush_cache(self) -> int:
        """Drop cached prefixes that no request uses; returns the number of tokens."""
        return self._cache.flush()

    @torch.inference_mode()
    def step(self) -> StepOutput:
        """Compute one batch and say what it delivered."""
        outputs, self._rejected = self._rejected, []
        scheduled = self._plan()
        if scheduled:
            batch = build_batch(scheduled, self._cache.page_size, self._runner.device, self._runner.slot_dtype)
            hidden = self._runner.forward(batch)
            self._collect_prompt_logprobs(batch, hidden)
            samples = self._sample(batch, hidden)
            self._advance(scheduled)
            outputs += self._deliver(batch, samples)
        return StepOutput(outputs=outputs, stats=self.stats())

    def stats(self) -> EngineStats:
        graphs = self._runner.graph_counts()
        return EngineStats(
            piecewise_steps_total=graphs.piecewise_steps,
            graph_replays_total=graphs.replays,
            padded_tokens_total=graphs.padded_tokens,
            graph_fallbacks_total=dict(graphs.fallbacks),
            running_requests=len(self._running),
            queued_requests=len(self._waiting),
            kv_tokens_used=self._cache.used_tokens,
            kv_tokens_cached=self._cache.cached_tokens,
            kv_tokens_total=self._cache.total_tokens,
            prompt_tokens_total=self._prompt_tokens,
            cached_tokens_total=self._cached_tokens,
            generation_tokens_total=self._generated_tokens,
            preemptions_total=self._preemptions,
            steps_total=self._steps,
        )

    def check(self) -> None:
        """Assert that every page has exactly one owner and that what waits holds none."""
        assert not any(request.pages for request in self._waiting)
        self._cache.check(self._running)

    # Planning

    def _admit(self, message: GenerateRequest) -> Request:
        length = len(message.input_ids) + len(message.output_ids)
        limit = min(self._context_length, self._cache.total_tokens)
        if not message.input_ids:
            raise ValueError("the prompt is empty")
        if length > limit - (message.params.max_new_tokens > 0):
            raise ValueError(f"the prompt has {length} tokens, but at most {limit - 1} fit with room for an answer")
        vocab = self._runner.vocab_size
        if not all(0 <= token < vocab for token in message.input_ids):
            raise ValueError(f"the prompt has a token id outside of 0 to {vocab - 1}")
        if not all(0 <= token < vocab for token in [*message.params.logit_bias, *message.params.stop_token_ids]):
            raise ValueError(f"logit_bias and stop_token_ids take token ids of 0 to {vocab - 1}")
        return Request(
            message,
            seed=self._draw_seed() if message.params.seed is None else message.params.seed,
            stop_ids=frozenset(message.params.stop_token_ids) | (frozenset() if message.params.ignore_eos else self._runner.eos_token_ids),
            max_tokens=min(limit, len(message.input_ids) + message.params.max_new_tokens),
        )

    def _plan(self) -> list[Scheduled]:
        """Running requests first, in order, then waiting ones, until the budget of tokens, pages or requests is spent."""
        self._yield_to_urgent()
        before = self._preemptions
        scheduled, budget = self._plan_running()
        if self._preemptions > before:
            # Pages are so scarce that a request had to go back; starting another would push out the next.
            return scheduled
        return scheduled + self._plan_waiting(budget)

    def _plan_running(self) -> tuple[list[Scheduled], int]:
        scheduled, budget, position = list[Scheduled](), self._token_budget, 0
        while position < len(self._running) and budget > 0:
            request = self._running[position]
            num_new = min(budget, request.num_tokens - request.num_computed)
            while not self._cache.reserve(request, num_new):
                victim = self._running[-1]
                self._preempt(victim)
                if victim is request:
                    return scheduled, budget
            scheduled.append(Scheduled(request, num_new))
            budget -= num_new
            position += 1
        return scheduled, budget

    def _plan_waiting(self, budget: int) -> list[Scheduled]:
        scheduled: list[Scheduled] = []
        coming: set[tuple[int, bytes]] = set()
        for request in list(self._waiting):
            if budget <= 0 or len(self._running) >= self._max_running:
                break
            self._cache.attach(request)
            beginning = self._next_page(request)
            if beginning in coming:
                # Another request of this step computes the same tokens: one step later they are in the prefix tree.
                self._cache.release(request)
                continue
            num_new = min(budget, request.num_tokens - request.num_computed)
            if not self._fits(request) or not self._cache.reserve(request, num_new):
                self._cache.release(request)
                break
            self._start(request)
            if beginning is not None:
                coming.add(beginning)
            scheduled.append(Scheduled(request, num_new))
            budget -= num_new
        return scheduled

    def _fits(self, request: Request) -> bool:
        """Whether the whole sequence finds pages, with one to spare for each running request so that it can go on."""
        wanted = self._cache.pages_wanted(request, request.num_tokens - request.num_computed)
        return wanted + len(self._running) <= self._cache.available_pages or not self._running

    def _next_page(self, request: Request) -> tuple[int, bytes] | None:
        """What identifies the first page of a request that is not in the prefix tree; None where it is not whole."""
        page = request.tokens[request.num_computed : request.num_computed + self._cache.page_size]
        if len(page) < self._cache.page_size or request.prompt_logprobs_due or not self._cache.shares_prefixes:
            return None
        return id(request.node), page.tobytes()

    def _yield_to_urgent(self) -> None:
        """Where places or pages are taken, the first in the queue gets those of running requests of lower priority."""
        while self._waiting and self._running and (urgent := self._waiting[0]).priority > self._running[-1].priority:
            wanted = self._cache.pages_wanted(urgent, urgent.num_tokens)
            if len(self._running) < self._max_running and wanted + len(self._running) <= self._cache.available_pages:
                return
            self._preempt(self._running[-1])

    def _start(self, request: Request) -> None:
        self._waiting.remove(request)
        insort(self._running, request, key=_order)
        if request.cached_tokens is None:
            request.cached_tokens = request.num_computed
            self._prompt_tokens += request.num_prompt
            self._cached_tokens += request.cached_tokens

    def _preempt(self, request: Request) -> None:
        """Back to the queue; its tokens are kept and computed again, as far as the prefix tree does not hold them."""
        self._running.remove(request)
        self._cache.release(request)
        insort(self._waiting, request, key=_order)
        self._preemptions += 1

    def _remove(self, request: Request) -> None:
        (self._running if request in self._running else self._waiting).remove(request)
        self._cache.release(request)

    # Running

    def _sample(self, batch: Batch, hidden: torch.Tensor) -> list[Sampled]:
        if not batch.samplers:
            return []
        return sample(self._runner.compute_logits(hidden.index_select(0, batch.sample_rows)), batch.samplers)

    def _collect_prompt_logprobs(self, batch: Batch, hidden: torch.Tensor) -> None:
        row = 0
        for request, num_new in batch.scheduled:
            if request.prompt_logprobs_due:
                self._prompt_logprobs_of(request, num_new, hidden[row : row + num_new])
            row += num_new

    def _prompt_logprobs_of(self, request: Request, num_new: int, hidden: torch.Tensor) -> None:
        """The logits at position p speak of the token at p + 1; position 0 has nothing before it."""
        start, first = request.params.prompt_logprobs_start, request.num_computed
        if first == 0:
            request.prompt_logprobs = [None] if start == 0 else []
        wanted = range(max(first, start - 1), min(first + num_new, request.num_prompt - 1))
        assert request.prompt_logprobs is not None
        for begin in range(wanted.start, wanted.stop, _LOGIT_ROWS):
            end = min(begin + _LOGIT_ROWS, wanted.stop)
            logits = self._runner.compute_logits(hidden[begin - first : end - first])
            targets = request.tokens[begin + 1 : end + 1].tolist()
            top: list[TokenLogprob] = token_logprobs(logits, targets, [request.params.prompt_logprobs or 0] * (end - begin))
            request.prompt_logprobs += top

    # Delivering

    def _advance(self, scheduled: list[Scheduled]) -> None:
        self._steps += 1
        for request, num_new in scheduled:
            prefilled = request.num_computed < request.num_prompt
            request.num_computed += num_new
            if prefilled:
                self._cache.share(request)

    def _deliver(self, batch: Batch, samples: list[Sampled]) -> list[TokenOutput]:
        outputs = [self._output(request, sampled) for request, sampled in zip(batch.samplers, samples, strict=True)]
        scored = [r for r, _ in batch.scheduled if r.params.max_new_tokens == 0 and r.num_computed == r.num_tokens]
        outputs += [self._output(request, None) for request in scored]
        self._generated_tokens += len(samples)
        return outputs

    def _output(self, request: Request, sampled: Sampled | None) -> TokenOutput:
        reason = stop = None
        if sampled is not None:
            request.append(sampled.token)
            if sampled.token in request.stop_ids:
                reason, stop = FinishReason.STOP, sampled.token
        if reason is None and request.num_tokens >= request.max_tokens:
            reason = FinishReason.LENGTH
        due, request.prompt_logprobs_due = request.prompt_logprobs_due, False
        output = TokenOutput(
            rid=request.rid,
            token_ids=[] if sampled is None else [sampled.token],
            finish_reason=reason,
            stop_token_id=stop,
            cached_tokens=request.cached_tokens or 0,
            logprobs=[sampled.logprob] if sampled is not None and sampled.logprob is not None else None,
            prompt_logprobs=request.prompt_logprobs if due else None,
        )
        if reason is not None:
            self._remove(request)
        return output


def _order(request: Request) -> tuple[int, float, str]:
    return request.order
