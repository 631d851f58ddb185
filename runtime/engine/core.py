"""The loop: receive, plan a batch, launch it, deliver.

A step is a list of (request, number of new tokens) under a token budget: a prefill chunk is many
new tokens, a decode is one. So chunked prefill, prefix hits, decodes and mixed batches are one
path.

Where the device runs beside the host, steps overlap: one is planned and launched while the one
before it runs, and only then the host waits for the earlier one's tokens. A decode begins with a
token that the host has not seen, so whether that token ends its request is found out one step late,
and what that step gave the request is discarded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from ..cache.kv_cache import KVCache
from ..core.batch import digest
from ..core.logits_processor import GrammarState
from ..core.messages import (
    EngineStats,
    FinishReason,
    GenerateRequest,
    StepOutput,
    TokenLogprob,
    TokenOutput,
)
from ..core.request import Request, Scheduled
from ..distributed.ranks import ALONE, Ranks
from ..executor.step import PendingStep, StepTokens
from ..graphs.graph_runner import GraphCounts
from ..sampling.grammar import INVALID_GRAMMAR, GrammarFault, Grammars
from ..sampling.logits_processors import processors_for
from ..sampling.sampler import NO_TOKEN
from .scheduler import Scheduler, StepInFlight

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """What the core needs of a model."""

    vocab_size: int
    eos_token_ids: frozenset[int]

    def execute(self, scheduled: list[Scheduled], previous: PendingStep | None) -> PendingStep:
        """Launch a step. `previous`: the step in flight, whose tokens this one begins with."""
        ...

    def graph_counts(self) -> GraphCounts:
        """How the steps so far have run."""
        ...

    def synchronize(self) -> None:
        """Wait for the device. Raises where it is broken."""
        ...


class EngineCore:
    """Holds every request of an engine from arrival to its last token. `overlap`: whether steps
    overlap, for a runner whose steps give a request one token at most.

    With several ranks each message and step of rank 0 is told to the others, and a step that raises
    ends them all: who was in the middle of what cannot be known. Else
    what one request brings about ends that one: where a step raises, its requests are computed one
    at a time until each has got a token, and one whose step raises again, alone, is answered with
    an error. What a broken device raises is let through.
    """

    def __init__(
        self,
        runner: Runner,
        cache: KVCache,
        *,
        token_budget: int,
        max_running_requests: int,
        context_length: int,
        draw_seed: Callable[[], int],
        overlap: bool,
        ranks: Ranks = ALONE,
        grammars: Grammars | None = None,
    ) -> None:
        self._runner, self._ranks = runner, ranks
        self._cache = cache
        self._scheduler = Scheduler(
            cache, token_budget=token_budget, max_running_requests=max_running_requests
        )
        self._context_length = context_length
        self._draw_seed = draw_seed
        self._overlap = overlap
        self.grammars = grammars
        self._in_flight: PendingStep | None = None
        self._outputs: list[TokenOutput] = []
        """To be told with this step."""
        self._at_work: list[Request] = []
        """Whom what is done just now is done for."""
        self._quarantine: list[Request] = []
        """Who is computed alone, because a step of several raised."""
        self._last_fault = ""
        self._generated_tokens = self._discarded_tokens = self._steps = self._overlapped_steps = 0

    @property
    def has_work(self) -> bool:
        # A step in flight is of use to a request that runs, or it is dropped.
        return bool(self._scheduler.running or self._scheduler.waiting or self._outputs)

    @property
    def load(self) -> tuple[int, int]:
        """How many requests run and wait."""
        return len(self._scheduler.running), len(self._scheduler.waiting)

    def add(self, message: GenerateRequest) -> None:
        """Queue a request; one that can never run is answered with an error at the next step."""
        self._ranks.tell("add", message)
        try:
            self._scheduler.add(self._admit(message))
        except GrammarFault as error:
            self._outputs.append(_error(message.rid, str(error), INVALID_GRAMMAR))
        except ValueError as error:
            self._outputs.append(_error(message.rid, str(error)))
        except Exception as error:
            logger.exception("request %s cannot be taken", message.rid)
            reason = f"it cannot be taken ({type(error).__name__})"
            self._outputs.append(_error(message.rid, reason))

    def abort(self, rids: Iterable[str]) -> None:
        """Free these requests at once; they deliver nothing more."""
        gone = set(rids)
        self._ranks.tell("abort", sorted(gone))
        known = self._scheduler.running + self._scheduler.waiting
        for request in [each for each in known if each.rid in gone]:
            self._scheduler.remove(request)
        self._let_go()
        self._drop_useless_step()

    def flush_cache(self) -> int:
        """Drop cached prefixes that no request uses; returns the number of tokens."""
        self._ranks.tell("flush_cache")
        return self._cache.flush()

    def step(self) -> StepOutput:
        """Launch one batch, and say what the one before it delivered; without overlap, what it
        delivered itself.
        """
        self._ranks.tell("step")
        try:
            self._advance()
        except Exception as error:
            self._isolate(error)
        self._let_go()
        outputs, self._outputs = self._outputs, []
        started, self._scheduler.started = self._scheduler.started, {}
        return StepOutput(outputs=outputs, started=started)

    def _advance(self) -> None:
        previous, self._in_flight = self._in_flight, None
        if self._quarantine:
            # Nothing is in flight: it was withdrawn when they came into quarantine, and since then
            # each step was read at once.
            scheduled = self._scheduler.plan_alone(self._quarantine[0])
        else:
            try:
                scheduled = self._scheduler.plan(in_flight=previous is not None)
            except StepInFlight:
                assert previous is not None
                self._deliver(previous)
                previous = None
                scheduled = self._scheduler.plan(in_flight=False)
        step = self._launch(scheduled, previous) if scheduled else None
        if previous is not None:
            self._deliver(previous)
        if step is not None and (self._quarantine or not self._overlap):
            self._deliver(step)
            step = None
        self._in_flight = step
        self._drop_useless_step()

    def _let_go(self) -> None:
        """Of who has ended: else an engine at rest keeps the last requests and their prompts."""
        self._at_work = []
        self._quarantine = [request for request in self._quarantine if not request.finished]

    def _isolate(self, error: Exception) -> None:
        """A step has raised: its one request ends, or its several requests are computed one at a
        time.
        """
        at_work = [request for request in self._at_work if not request.finished]
        if not at_work or self._ranks.size > 1:
            raise error
        self._runner.synchronize()
        self._in_flight = None
        self._scheduler.withdraw()
        told, self._last_fault = self._last_fault, repr(error)
        logger.error(
            "a step of %d requests failed: %r",
            len(at_work),
            error,
            exc_info=error if self._last_fault != told else None,
        )
        if len(at_work) == 1:
            self._outputs.append(
                self._fail(
                    at_work[0],
                    f"its computation failed ({type(error).__name__}); the server's log has the "
                    "details",
                )
            )
        else:
            self._quarantine = at_work

    def stats(self) -> EngineStats:
        graphs, scheduler = self._runner.graph_counts(), self._scheduler
        return EngineStats(
            piecewise_steps_total=graphs.piecewise_steps,
            graph_replays_total=graphs.replays,
            padded_tokens_total=graphs.padded_tokens,
            graph_fallbacks_total=dict(graphs.fallbacks),
            running_requests=len(scheduler.running),
            queued_requests=len(scheduler.waiting),
            kv_tokens_used=self._cache.used_tokens,
            kv_tokens_cached=self._cache.cached_tokens,
            kv_tokens_touched=self._cache.touched_tokens,
            kv_tokens_total=self._cache.total_tokens,
            states_used=self._cache.used_states,
            states_total=self._cache.total_states,
            prompt_tokens_total=scheduler.prompt_tokens,
            cached_tokens_total=scheduler.cached_tokens,
            generation_tokens_total=self._generated_tokens,
            discarded_tokens_total=self._discarded_tokens,
            preemptions_total=scheduler.preemptions,
            steps_total=self._steps,
            overlapped_steps_total=self._overlapped_steps,
        )

    def check(self) -> None:
        """Assert that every page has exactly one owner, that what waits holds none, and that what
        is pending is in flight.
        """
        assert not any(each.pages or each.num_placeholders for each in self._scheduler.waiting)
        assert self._in_flight is None or self._in_flight.is_of_use
        coming = [] if self._in_flight is None else self._in_flight.samplers
        for request in self._scheduler.running:
            assert request.num_placeholders == sum(request is sampler for sampler in coming)
            assert request.num_computed <= request.num_known, (
                "a token is computed that the host does not know"
            )
        self._cache.check(self._scheduler.running)

    def _admit(self, message: GenerateRequest) -> Request:
        length = len(message.input_ids) + len(message.output_ids)
        limit = min(self._context_length, self._cache.total_tokens)
        if not message.input_ids:
            raise ValueError("the prompt is empty")
        if length > limit - (message.params.max_new_tokens > 0):
            raise ValueError(
                f"the prompt has {length} tokens, but at most {limit - 1} fit with room for an "
                "answer"
            )
        vocab = self._runner.vocab_size
        if not all(0 <= token < vocab for token in message.input_ids):
            raise ValueError(f"the prompt has a token id outside of 0 to {vocab - 1}")
        if not all(
            0 <= token < vocab
            for token in [
                *message.params.logit_bias,
                *message.params.stop_token_ids,
                *message.params.thought_end_ids,
            ]
        ):
            raise ValueError(
                f"logit_bias, stop_token_ids and thought_end_ids take token ids of 0 to {vocab - 1}"
            )
        ends = (
            frozenset()
            if message.params.ignore_eos
            else self._runner.eos_token_ids.union(message.eos_token_ids)
        )
        grammar = message.params.grammar
        if grammar is not None and self.grammars is None:
            raise ValueError("this engine has no grammars")
        return Request(
            message,
            seed=self._draw_seed() if message.params.seed is None else message.params.seed,
            stop_ids=ends.union(message.params.stop_token_ids),
            max_tokens=min(limit, len(message.input_ids) + message.params.max_new_tokens),
            grammar=self.grammars.matcher(grammar) if grammar and self.grammars else None,
            make_processors=processors_for,
        )

    # Launching

    def _launch(self, scheduled: list[Scheduled], previous: PendingStep | None) -> PendingStep:
        self._at_work = [request for request, _ in scheduled]
        if self._ranks.size > 1:
            self._ranks.check((self._steps, *digest(scheduled)))
        step = self._runner.execute(scheduled, previous)
        self._steps += 1
        self._overlapped_steps += previous is not None
        for request, num_new in scheduled:
            self._cache.advance(request, num_new)
        for row, request in enumerate(step.samplers):
            request.add_placeholder(row)
        return step

    def _drop_useless_step(self) -> None:
        """Nobody waits for a step whose requests have all ended."""
        if self._in_flight is not None and not self._in_flight.is_of_use:
            self._discarded_tokens += len(self._in_flight.samplers)
            self._in_flight = None

    # Delivering

    def _deliver(self, step: PendingStep) -> None:
        """What a step gave the requests that have not ended or been aborted since it was
        launched.
        """
        self._at_work = [request for request, _ in step.scheduled]
        for result in step.read():
            request, given = result.request, len(result.tokens)
            if request.finished:
                self._discarded_tokens += given
            elif result.reached_end:
                self._at_work = [request]
                output = self._output(result)
                self._generated_tokens += len(output.token_ids)
                self._discarded_tokens += max(0, given - len(output.token_ids))
                self._outputs.append(output)
                if request in self._quarantine:
                    self._quarantine.remove(request)

    def _output(self, result: StepTokens) -> TokenOutput:
        request, tokens, logprobs, _ = result
        if NO_TOKEN in tokens:
            fault = request.grammar and request.grammar.fault
            if fault and self.grammars is not None and request.params.grammar is not None:
                self.grammars.forget(request.params.grammar)
            if fault := fault or request.contradiction:
                return self._fail(request, f"its grammar cannot go on: {fault}", INVALID_GRAMMAR)
            return self._fail(request, "the model's logits are not finite (NaN or infinite)")
        if request.thought is not None and tokens:
            tokens, closing = request.thought.follow(tokens, request.grammar)
            if logprobs is not None:
                # What is no choice of the model's is certain.
                certain = [TokenLogprob(token_id=token, logprob=0.0) for token in closing]
                logprobs = logprobs[: len(tokens)] + certain
            tokens = tokens + closing
        if len(tokens) > 1:
            tokens = tokens[: request.max_tokens - request.num_known]
        reason = stop = None
        for position, token in enumerate(tokens):
            if token in request.stop_ids:
                reason, stop, tokens = FinishReason.STOP, token, tokens[: position + 1]
                break
        if request.grammar is not None and tokens and reason is None:
            tokens, is_finished = self._follow(request, request.grammar, tokens)
            reason = FinishReason.STOP if is_finished else None
        request.resolve(tokens)
        if reason is None and request.num_known >= request.max_tokens:
            reason = FinishReason.LENGTH
        due, request.prompt_logprobs_due = request.prompt_logprobs_due, False
        if reason is not None:
            self._scheduler.remove(request)
        return TokenOutput(
            rid=request.rid,
            token_ids=tokens,
            finish_reason=reason,
            stop_token_id=stop,
            cached_tokens=request.cached_tokens or 0,
            logprobs=logprobs and logprobs[: len(tokens)],
            prompt_logprobs=request.prompt_logprobs if due else None,
        )

    def _follow(
        self, request: Request, grammar: GrammarState, tokens: list[int]
    ) -> tuple[list[int], bool]:
        """Tokens with those that the grammar forces behind them, and whether it ends there."""
        grammar.accept(tokens)
        if request.params.logprobs is None:
            # Taken without a forward each, which would give them log-probabilities.
            room = request.max_tokens - request.num_known - len(tokens)
            forced = grammar.forced()[: max(0, room)]
            if forced and request.stop_ids.isdisjoint(forced):
                grammar.accept(forced)
                if request.thought is not None:
                    request.thought.pass_over(forced)
                tokens = tokens + forced
        return tokens, grammar.is_finished

    def _fail(self, request: Request, error: str, code: str | None = None) -> TokenOutput:
        """End a request that cannot go on."""
        self._scheduler.remove(request)
        # What it has computed may be as broken, and whoever begins alike would find it.
        self._cache.flush()
        return _error(request.rid, error, code)


def _error(rid: str, error: str, code: str | None = None) -> TokenOutput:
    return TokenOutput(
        rid=rid, token_ids=[], finish_reason=FinishReason.ERROR, error=error, code=code
    )
