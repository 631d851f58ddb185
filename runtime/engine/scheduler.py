"""Which requests the next step computes, and how many tokens of each: the queue, the running
requests, and who gives way to whom.
"""

from __future__ import annotations

import time
from bisect import insort
from operator import attrgetter

import numpy as np

from ..cache.kv_cache import KVCache
from ..cache.radix import Tokens
from ..core.request import Request, Scheduled

_ORDER = attrgetter("order")


class StepInFlight(Exception):
    """A running request would have to give way while a step is in flight."""


class Scheduler:
    """Every request of an engine from arrival to its end, those that wait and those that run, each
    in order.
    """

    def __init__(self, cache: KVCache, *, token_budget: int, max_running_requests: int) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.prompt_tokens = self.cached_tokens = self.preemptions = 0
        """Totals: of the requests that have begun, and how often one had to give way."""
        self.started: dict[str, float] = {}
        """When requests first ran, by `time.monotonic`, until somebody takes it."""
        self._cache = cache
        self._token_budget = token_budget
        self._max_running = max_running_requests
        self._in_flight = False

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=_ORDER)

    def remove(self, request: Request) -> None:
        """A request has ended, or was aborted; its pages are free at once.

        A step in flight may still write to them. Whoever gets them next writes in a later step, and
        the device runs steps in the order of their launch, so that nobody reads what the earlier
        one has left there.
        """
        (self.running if request in self.running else self.waiting).remove(request)
        request.finished = True
        self._cache.release(request)

    def plan(self, *, in_flight: bool) -> list[Scheduled]:
        """Running requests first, in order, then waiting ones, until the budget of tokens, pages or
        requests is spent.

        `in_flight`: a step has been launched whose tokens the host does not know yet. Raises
        `StepInFlight` where a running request would have to give way then: what is in flight may
        end one, which frees pages, so the plan is to be made again.
        """
        self._in_flight = in_flight
        self._yield_to_urgent()
        before = self.preemptions
        scheduled, budget = self._plan_running()
        if self.preemptions > before:
            # Pages are so scarce that a request had to go back; starting another would push out the
            # next.
            return scheduled
        return scheduled + self._plan_waiting(budget, list(self.waiting))

    def plan_alone(self, request: Request) -> list[Scheduled]:
        """The next tokens of one request; all others give way to it. Nothing may be in flight."""
        self._in_flight = False
        for other in [running for running in self.running if running is not request]:
            self._preempt(other)
        return (
            self._plan_running()[0]
            if self.running
            else self._plan_waiting(self._token_budget, [request])
        )

    def withdraw(self) -> None:
        """All that run go back to the queue, with the tokens that the host knows: what is in flight
        will not be read.
        """
        for request in list(self.running):
            request.drop_placeholders()
            self._in_flight = False
            self._preempt(request)

    def _plan_running(self) -> tuple[list[Scheduled], int]:
        scheduled, budget, position = list[Scheduled](), self._token_budget, 0
        while position < len(self.running) and budget > 0:
            request = self.running[position]
            position += 1
            if self._in_flight and request.awaits_token:
                continue
            num_new = min(budget, request.num_tokens - request.num_computed)
            num_new = self._cache.whole_pages(request, num_new)
            while not self._cache.reserve(request, num_new):
                victim = self.running[-1]
                self._preempt(victim)
                if victim is request:
                    return scheduled, budget
            scheduled.append(Scheduled(request, num_new))
            budget -= num_new
        return scheduled, budget

    def _plan_waiting(self, budget: int, candidates: list[Request]) -> list[Scheduled]:
        scheduled: list[Scheduled] = []
        coming: dict[tuple[int, bytes] | None, Tokens] = {}
        for request in candidates:
            if budget <= 0 or len(self.running) >= self._max_running:
                break
            self._cache.attach(request)
            beginning = self._next_page(request)
            prefix = coming.get(beginning)
            if prefix is not None and np.array_equal(request.tokens[:-1][: len(prefix)], prefix):
                # Another request of this step computes the same tokens: one step later they are
                # found.
                self._cache.release(request)
                continue
            uncomputed = request.num_tokens - request.num_computed
            num_new = self._cache.whole_pages(request, min(budget, uncomputed))
            # The whole sequence must find pages, with one to spare for each that runs to go on.
            fits = not self.running or self._cache.has_room(request, uncomputed, len(self.running))
            if not fits or not self._cache.reserve(request, num_new):
                self._cache.release(request)
                if not self.running and self._cache.flush():
                    # What it found of its prefix may lie in too many slabs of shared pages.
                    return self._plan_waiting(budget, candidates)
                break
            self.waiting.remove(request)
            insort(self.running, request, key=_ORDER)
            if request.cached_tokens is None:
                request.cached_tokens = request.num_computed
                self.started[request.rid] = time.monotonic()
                self.prompt_tokens += request.num_prompt
                self.cached_tokens += request.cached_tokens
            if beginning is not None and (end := self._cache.found_until(request, num_new)):
                coming.setdefault(beginning, request.tokens[:end])
            scheduled.append(Scheduled(request, num_new))
            budget -= num_new
        return scheduled

    def _next_page(self, request: Request) -> tuple[int, bytes] | None:
        """What identifies the first page of a request that is not in the prefix tree; None where it
        is not whole.
        """
        page = request.tokens[request.num_computed : request.num_computed + self._cache.page_size]
        if (
            len(page) < self._cache.page_size
            or request.prompt_logprobs_due
            or not self._cache.shares_prefixes
        ):
            return None
        return id(request.node), page.tobytes()

    def _yield_to_urgent(self) -> None:
        """Where places or pages are taken, the first in the queue gets those of running requests of
        lower priority.
        """
        while (
            self.waiting
            and self.running
            and (urgent := self.waiting[0]).priority > self.running[-1].priority
        ):
            if len(self.running) < self._max_running and self._cache.has_room(
                urgent, urgent.num_tokens, len(self.running)
            ):
                return
            self._preempt(self.running[-1])

    def _preempt(self, request: Request) -> None:
        """Back to the queue; its tokens are kept and computed again, as far as the prefix tree does
        not hold them.
        """
        if self._in_flight:
            raise StepInFlight
        self.running.remove(request)
        self._cache.release(request)
        insort(self.waiting, request, key=_ORDER)
        self.preemptions += 1
