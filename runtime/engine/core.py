"""The engine's loop: receive requests, plan a batch, launch it, deliver its tokens.

A step is a list of (request, number of new tokens) under a token budget. A prefill chunk has many
new tokens, a decode has one. Chunked prefill, prefix hits, decodes and mixed batches are therefore
one code path.

If the device runs beside the host, steps overlap: the next step is planned and launched while the
previous one runs, and only then the host waits for the previous tokens. A decode may thus start
from a token that the host has not seen. If that token turns out to end its request, the tokens that
the next step sampled for the request are discarded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from ..cache.kv_cache import KVCache
from ..core.batch import digest
from ..core.generation import FinishReason, GenerateRequest, TokenOutput
from ..core.messages import EngineStats, StepOutput
from ..core.request import Request, Scheduled
from ..distributed.ranks import ALONE, Ranks
from ..executor.runner import Runner
from ..executor.step import PendingStep, StepTokens
from ..sampling.grammar import INVALID_GRAMMAR
from ..sampling.grammar_cache import Grammars
from ..sampling.plug_ins import PlugIns
from ..sampling.sampler import NO_TOKEN
from ..speculative.speculation import Speculation, num_alike
from .admission import admit
from .extension import take
from .prompt_pace import PromptPace
from .scheduler import Scheduler, StepInFlight, has_begun

logger = logging.getLogger(__name__)


class EngineCore:
    """Every request of an engine, from arrival to its last token.

    If a step raises, its requests are computed one at a time until each has got a token. A request
    whose step raises again, alone, is answered with an error. Errors of a broken device are not
    caught. With several ranks, every error ends all ranks, because their states may differ.

    Attributes:
        computed_tokens: Total number of tokens of all steps.
        overlap: Whether steps overlap. The runner must then give a request at most one token a
            step.
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
        speculation: Speculation | None = None,
        plug_ins: PlugIns | None = None,
        pace: PromptPace | None = None,
    ) -> None:
        self._runner, self._ranks, self._images = runner, ranks, runner.images
        self.cache = cache
        limits = {"token_budget": token_budget, "max_running_requests": max_running_requests}
        self._scheduler = Scheduler(cache, **limits, adapters=runner.adapters, images=runner.images)
        self._context_length, self._draw_seed = context_length, draw_seed
        self._overlap = overlap
        self.grammars, self._speculation = grammars, speculation
        self._plug_ins, self._pace = plug_ins, pace
        self._in_flight: PendingStep | None = None
        self._outputs: list[TokenOutput] = []  # Returned by the current `step`.
        self._computing: list[Request] = []  # Blamed if the current step raises.
        self._quarantine: list[Request] = []  # Computed one at a time, because their step raised.
        self._last_fault = ""
        self._generated_tokens = self._discarded_tokens = self._steps = self._overlapped_steps = 0
        self.computed_tokens = 0

    @property
    def has_work(self) -> bool:
        # A step in flight always belongs to a running request; otherwise it is dropped.
        return bool(self._scheduler.running or self._scheduler.waiting or self._outputs)

    @property
    def load(self) -> tuple[int, int]:
        """Numbers of running and of waiting requests."""
        return len(self._scheduler.running), len(self._scheduler.waiting)

    def add(self, message: GenerateRequest) -> None:
        """Queue a request. If it can never run, the next step returns an error for it."""
        self._ranks.call("add", message)
        try:
            limit = min(self._context_length, self.cache.total_tokens)
            self._scheduler.add(
                admit(message, self._runner, limit, self.grammars, self._draw_seed, self._plug_ins)
            )
        except ValueError as error:
            self._outputs.append(_error(message.rid, str(error), getattr(error, "code", None)))
        except Exception as error:
            logger.exception("request %s cannot be taken", message.rid)
            reason = f"it cannot be taken ({type(error).__name__})"
            self._outputs.append(_error(message.rid, reason))

    def abort(self, rids: Iterable[str]) -> None:
        """End these requests at once. They deliver no more tokens."""
        gone = set(rids)
        self._ranks.call("abort", sorted(gone))
        known = self._scheduler.running + self._scheduler.waiting
        for request in [each for each in known if each.rid in gone]:
            self._scheduler.remove(request)
        self._drop_finished()
        self._drop_useless_step()

    def flush_cache(self) -> int:
        """Drop cached prefixes that no request uses. Return the number of tokens dropped."""
        self._ranks.call("flush_cache")
        return self.cache.flush()

    def suspend(self) -> None:
        """Preempt all running requests. They continue with the next step."""
        if self._in_flight is not None:
            read, self._in_flight = self._in_flight, None
            self._deliver(read)
        self._scheduler.withdraw()
        self._drop_finished()

    def hold(self) -> bool:
        """Begin no further request until `release`. Return whether no begun one is left."""
        self._scheduler.holds = True
        return not (self._scheduler.running or any(map(has_begun, self._scheduler.waiting)))

    def release(self) -> None:
        """Begin requests again after `hold`."""
        self._scheduler.holds = False

    def step(
        self,
        proposals: dict[str, list[int]] | None = None,
        allowance: float = 0.0,
        mixed_tokens: int | None = None,
    ) -> StepOutput:
        """Launch one batch and return the tokens of the previous one.

        Without overlap, return the tokens of the batch itself. Other ranks get rank 0's `proposals`
        by request, or None if the step before is still in flight, its `allowance` for encoding
        images (`Encodings.pace`), and its limit of steps with prompts (`PromptPace`).
        """
        try:
            if self._ranks.rank == 0:
                proposals = self._propose()
                if self._images is not None and self._images.pending:
                    allowance = self._images.pace.allowance(self._steps)
                mixed_tokens = None if self._pace is None else self._pace.limit()
                self._ranks.call("step", proposals, allowance, mixed_tokens)
            self._scheduler.mixed_tokens = mixed_tokens
            self._advance(proposals, allowance)
        except Exception as error:
            self._isolate(error)
        self._drop_finished()
        outputs, self._outputs = self._outputs, []
        started, self._scheduler.started = self._scheduler.started, {}
        return StepOutput(outputs=outputs, started=started)

    def _propose(self) -> dict[str, list[int]] | None:
        """Return tokens that may follow those of running requests.

        A proposal continues tokens that the host knows, so the step in flight is read first. While
        no proposal is worth that, steps overlap.
        """
        if self._speculation is None or self._quarantine:
            return None
        running = self._scheduler.running
        if self._in_flight is not None:
            if not self._speculation.is_of_use(running):
                return None
            read, self._in_flight = self._in_flight, None
            self._deliver(read)
        return self._speculation.propose(running)

    def _advance(self, proposals: dict[str, list[int]] | None, allowance: float) -> None:
        if proposals is not None:
            if self._in_flight is not None:
                # A rank other than 0 reads the step that rank 0 read before it proposed.
                read, self._in_flight = self._in_flight, None
                self._deliver(read)
            for request in self._scheduler.running:
                request.propose(proposals.get(request.rid, []))
        if self._images is not None and self._images.pending:
            # If an image cannot be encoded, those that need it are blamed.
            self._computing = self._images.encoding_for
            self._images.advance(allowance)
            self._computing = []
        previous, self._in_flight = self._in_flight, None
        if self._quarantine:
            # Nothing is in flight: the step was withdrawn when the quarantine began, and since then
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

    def _drop_finished(self) -> None:
        """Drop references to finished requests; an idle engine must not keep their prompts."""
        self._computing = []
        if self._images is not None:
            self._images.encoding_for.clear()
        if self._speculation is not None:
            self._speculation.drop_finished()
        self._quarantine = [request for request in self._quarantine if not request.finished]

    def _isolate(self, error: Exception) -> None:
        """Handle a step that raised: end its only request, or quarantine its several requests."""
        suspects = [request for request in self._computing if not request.finished]
        if not suspects or self._ranks.size > 1:
            raise error
        self._runner.synchronize()
        self._in_flight = None
        self._scheduler.withdraw()
        last_fault, self._last_fault = self._last_fault, repr(error)
        logger.error(
            "a step of %d requests failed: %r",
            len(suspects),
            error,
            exc_info=error if self._last_fault != last_fault else None,
        )
        if len(suspects) == 1:
            kind = type(error).__name__
            fault = f"its computation failed ({kind}); the server's log has the details"
            self._outputs.append(self._fail(suspects[0], fault))
        else:
            self._quarantine = suspects

    def stats(self) -> EngineStats:
        graphs, scheduler = self._runner.graph_counts(), self._scheduler
        return EngineStats(
            piecewise_steps_total=graphs.piecewise_steps,
            graph_replays_total=graphs.replays,
            padded_tokens_total=graphs.padded_tokens,
            graph_fallbacks_total=dict(graphs.fallbacks),
            prefill_steps_total=graphs.prefill_steps,
            prefill_step_tokens_total=graphs.prefill_tokens,
            prefill_replays_total=graphs.prefill_replays,
            prefill_replayed_tokens_total=graphs.prefill_replayed_tokens,
            running_requests=len(scheduler.running),
            queued_requests=len(scheduler.waiting),
            kv_tokens_used=self.cache.used_tokens,
            kv_tokens_cached=self.cache.cached_tokens,
            kv_tokens_touched=self.cache.touched_tokens,
            kv_tokens_total=self.cache.total_tokens,
            states_used=self.cache.used_slots,
            states_total=self.cache.total_slots,
            prompt_tokens_total=scheduler.prompt_tokens,
            cached_tokens_total=scheduler.cached_tokens,
            generation_tokens_total=self._generated_tokens,
            discarded_tokens_total=self._discarded_tokens,
            preemptions_total=scheduler.preemptions,
            steps_total=self._steps,
            overlapped_steps_total=self._overlapped_steps,
            **({} if self._speculation is None else self._speculation.totals()),
            **({} if self._images is None else self._images.totals()),
        )

    def check(self) -> None:
        """Assert that every page has one owner, that waiting requests hold no page, and that every
        placeholder belongs to the step in flight.
        """
        assert not any(each.pages or each.num_placeholders for each in self._scheduler.waiting)
        assert self._in_flight is None or self._in_flight.is_of_use
        samplers = [] if self._in_flight is None else self._in_flight.samplers
        for request in self._scheduler.running:
            assert request.num_placeholders == sum(request is sampler for sampler in samplers)
            assert request.num_computed <= request.num_known, (
                "a token is computed that the host does not know"
            )
        self.cache.check(self._scheduler.running)
        if self._runner.adapters is not None:
            self._runner.adapters.check(self._scheduler.running)
        if self._speculation is not None:
            self._speculation.check()

    # Launching

    def _launch(self, scheduled: list[Scheduled], previous: PendingStep | None) -> PendingStep:
        self._computing = [request for request, _ in scheduled]
        if self._ranks.size > 1:
            self._ranks.check((self._steps, *digest(scheduled)))
        step = self._runner.execute(scheduled, previous)
        self._steps += 1
        self.computed_tokens += sum(num_new for _, num_new in scheduled)
        self._overlapped_steps += previous is not None
        for request, num_new in scheduled:
            # Proposals that the step accepts count as computed when it is read.
            self.cache.advance(request, num_new - len(request.proposals))
        for row, sampler in enumerate(step.samplers):
            if isinstance(sampler, Request):
                sampler.add_placeholder(row)
        return step

    def _drop_useless_step(self) -> None:
        """Drop the step in flight if all of its requests have ended."""
        if self._in_flight is not None and not self._in_flight.is_of_use:
            self._discarded_tokens += len(self._in_flight.samplers)
            self._in_flight = None

    # Delivering

    def _deliver(self, step: PendingStep) -> None:
        """Read a step and append the tokens of its requests that have not ended meanwhile."""
        self._computing = [request for request, _ in step.scheduled]
        results = step.read()
        if self._pace is not None:
            self._pace.read(step)
        if self._speculation is not None:
            self._speculation.costs.read(step)
        for result in results:
            request, num_tokens = result.request, len(result.tokens)
            if request.finished:
                self._discarded_tokens += num_tokens
            elif result.reached_end:
                self._computing = [request]
                output = self._output(result)
                self._generated_tokens += len(output.token_ids)
                self._discarded_tokens += max(0, num_tokens - len(output.token_ids))
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
        tokens, logprobs, reason = take(request, tokens, logprobs)
        is_stopped = reason is FinishReason.STOP and tokens[-1] in request.stop_ids
        proposals, request.proposals = request.proposals, []
        request.resolve(tokens)
        accepted = num_alike(tokens, proposals)
        # The last token is always computed, because its logits are wanted.
        if proposals:
            self.cache.settle(request, min(accepted, len(tokens) - 1), len(proposals))
        if reason is None and request.num_known >= request.max_tokens:
            reason = FinishReason.LENGTH
        due, request.prompt_logprobs_due = request.prompt_logprobs_due, False
        if self._speculation is not None and tokens:
            self._speculation.learn(request, tokens, proposals)
            if reason is not None:
                self._speculation.end(request)
        predicted, request.predicted = request.predicted, (0, 0)
        if reason is not None:
            self._scheduler.remove(request)
        return TokenOutput(
            rid=request.rid,
            token_ids=tokens,
            finish_reason=reason,
            stop_token_id=tokens[-1] if is_stopped else None,
            cached_tokens=request.cached_tokens or 0,
            loaded=request.loaded,
            predicted=predicted,
            logprobs=logprobs,
            prompt_logprobs=request.prompt_logprobs if due else None,
        )

    def _fail(self, request: Request, error: str, code: str | None = None) -> TokenOutput:
        """End a request with an error."""
        self._scheduler.remove(request)
        # Its keys and values may be broken too, and requests with the same prefix would use them.
        self.cache.flush()
        return _error(request.rid, error, code)


def _error(rid: str, error: str, code: str | None = None) -> TokenOutput:
    return TokenOutput(
        rid=rid, token_ids=[], finish_reason=FinishReason.ERROR, error=error, code=code
    )
