"""Decides which requests the next step computes, how many tokens of each, and which requests are
preempted.
"""

from __future__ import annotations

import time
from bisect import insort
from itertools import islice
from operator import attrgetter
from typing import Protocol

import numpy as np

from ..cache.kv_cache import KVCache
from ..cache.radix import Tokens
from ..core.request import Request, Scheduled
from .fair_shares import FairShares

_ORDER = attrgetter("order")
_Page = tuple[
    int, bytes, bytes
]  # A node of the prefix tree, a namespace, and the tokens of a page.
_PATIENCE = 32  # Steps that a request waits for a slot before later ones wait for it.
_LOOKED_AT = 16  # Prompts among which a step is divided, or more if these do not fill it.


class StepInFlight(Exception):
    """A running request would have to be preempted while a step is in flight."""


class Adapters(Protocol):
    """The slots of adapters on the device (`lora.store.AdapterStore`)."""

    def may_run(self, request: Request) -> bool:
        """Whether the request needs no adapter, or its adapter has a slot or can get one now."""
        ...

    def hold(self, request: Request) -> None:
        """Give the request's adapter a slot until `let_go`. `may_run` must be true."""
        ...

    def let_go(self, request: Request) -> None:
        """The request does not run any more. If it is finished, it does not come back."""
        ...


class Images(Protocol):
    """The encoded images (`multimodal.encodings.Encodings`)."""

    def ready(self, request: Request, num_new: int) -> int:
        """Return how many of the next `num_new` tokens come before an image that is not encoded.

        May return more, so that no step ends within an image that must be computed as a whole.
        """
        ...

    def forget(self, request: Request) -> None:
        """Drop what is only kept because of a request that has ended."""
        ...


def has_begun(request: Request) -> bool:
    """Whether a request has run, even if it was preempted since."""
    return request.cached_tokens is not None


class Scheduler:
    """All requests of an engine that have not ended.

    Attributes:
        waiting, running: The requests, in order of priority and arrival.
        prompt_tokens, cached_tokens: Totals of the requests that have started.
        preemptions: Total number of preemptions.
        holds: Whether only requests that have begun may run.
        mixed_tokens: Most tokens of a step that computes prompts while answers wait for it. Prompts
            get at least one quantum (`FairShares`). None: no such limit.
        started: When requests first ran, by `time.monotonic`. The core empties it.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        token_budget: int,
        max_running_requests: int,
        adapters: Adapters | None = None,
        images: Images | None = None,
    ) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.prompt_tokens = self.cached_tokens = self.preemptions = 0
        self.started: dict[str, float] = {}
        self._cache, self._adapters, self._images = cache, adapters, images
        self._token_budget = token_budget
        self._max_running = max_running_requests
        self._shares = FairShares(token_budget)
        self._in_flight = self.holds = False
        self.mixed_tokens: int | None = None
        # The first request whose adapter finds no slot, and for how many steps it has been it.
        self._without_slot: Request | None = None
        self._steps_without = 0

    def add(self, request: Request) -> None:
        clock = self._cache.pins_clock
        clock.now = max(clock.now, request.arrival_time)
        insort(self.waiting, request, key=_ORDER)

    def remove(self, request: Request) -> None:
        """Remove a request that has ended or was aborted, and free its pages.

        A step in flight may still write to these pages. Their next owner writes to them in a later
        step. The device runs steps in the order of their launch, so no request reads what the
        earlier step wrote.
        """
        (self.running if request in self.running else self.waiting).remove(request)
        request.finished = True
        self._release(request)
        if self._images is not None and request.images:
            self._images.forget(request)

    def plan(self, *, in_flight: bool) -> list[Scheduled]:
        """Plan the next step: running requests in order, then waiting ones, until the budget of
        tokens, pages or requests is spent. Prompts share the tokens that decodes leave.

        `in_flight` says that a step has been launched whose tokens the host does not know yet. If a
        running request would have to be preempted then, raise `StepInFlight`. The caller plans
        again after the step, which may end a request and free its pages.
        """
        self._in_flight = in_flight
        self._preempt_for_urgent()
        before, shares = self.preemptions, self._divide()
        scheduled, budget = self._plan_running(shares)
        if self.preemptions > before:
            # Pages are so scarce that a request was preempted. Starting a waiting one would preempt
            # the next.
            return scheduled
        waiting = list(filter(has_begun, self.waiting)) if self.holds else list(self.waiting)
        return scheduled + self._plan_waiting(budget, waiting, shares)

    def plan_alone(self, request: Request) -> list[Scheduled]:
        """Plan the next tokens of one request, and preempt all others. No step may be in flight."""
        self._in_flight = False
        for other in [running for running in self.running if running is not request]:
            self._preempt(other)
        all_of_it = {request: self._token_budget}
        return (
            self._plan_running(all_of_it)[0]
            if self.running
            else self._plan_waiting(self._token_budget, [request], all_of_it)
        )

    def withdraw(self) -> None:
        """Preempt all running requests. They keep the tokens that the host knows: the step in
        flight will not be read.
        """
        for request in list(self.running):
            request.drop_placeholders()
            self._in_flight = False
            self._preempt(request)

    def _divide(self) -> dict[Request, int]:
        """Return how many tokens of each prompt the next step may compute.

        The prompts are those of running requests and of the first waiting ones that may start.
        """
        left, coming = dict[Request, int](), dict[_Page | None, int]()
        held = dict[Request, int]()
        for request in self.running:
            count = request.num_tokens - request.num_computed
            # A request that was preempted computes its output like a prompt.
            if not (ready := self._ready(request, count)):
                held[request] = 0  # Its next image is being encoded.
            elif request.num_computed < request.num_prompt or count > self._shares.quantum:
                left[request] = ready
                coming[self._next_page(request)] = request.priority
        answers = len(self.running) - len(left) - len(held)
        budget = self._token_budget - answers
        if answers and self.mixed_tokens is not None:
            budget = min(budget, max(self.mixed_tokens - answers, self._shares.quantum))
        total = sum(left.values())
        may_start = filter(self._may_run, self.waiting)
        for request in islice(may_start, max(0, self._max_running - len(self.running))):
            if len(left) >= _LOOKED_AT and total >= budget:
                break
            self._cache.attach(request)
            page = self._next_page(request)
            if page is not None and coming.get(page, request.priority - 1) >= request.priority:
                held[request] = 0  # A running request computes what this one can use.
            elif ready := self._ready(request, request.num_tokens - request.num_computed):
                left[request] = ready
                total += ready
            else:
                held[request] = 0
            self._cache.release(request)
        prompts = sorted(left, key=_ORDER)
        urgent = sum(request.priority == prompts[0].priority for request in prompts)
        shares = self._shares.divide(budget, [left[request] for request in prompts], urgent)
        return held | dict(zip(prompts, shares, strict=True))

    def _plan_running(self, shares: dict[Request, int]) -> tuple[list[Scheduled], int]:
        """Plan running requests. Return them and the tokens that are left."""
        scheduled, budget, position = list[Scheduled](), self._token_budget, 0
        while position < len(self.running) and budget > 0:
            request = self.running[position]
            position += 1
            if self._in_flight and request.awaits_token:
                continue
            num_new = min(budget, request.num_tokens - request.num_computed)
            share = shares.get(request)
            if share is not None and not (num_new := min(num_new, share)):
                continue
            num_new = self._ready(request, self._cache.limit(request, num_new))
            if not num_new:
                continue
            while not self._cache.reserve(request, num_new):
                victim = self.running[-1]
                self._preempt(victim)
                if victim is request:
                    return scheduled, budget
            if request.proposals:
                num_new += self._take_proposals(request, num_new, budget - num_new)
            scheduled.append(Scheduled(request, num_new))
            budget -= num_new
        return scheduled, budget

    def _take_proposals(self, request: Request, num_new: int, budget: int) -> int:
        """Reserve pages for the proposals that the step verifies, and return their number.

        No request is preempted for them.
        """
        reaches_end = request.num_computed + num_new == request.num_tokens
        count = min(len(request.proposals), budget) if reaches_end else 0
        if count:
            count = self._cache.reserve_guesses(request, num_new, count)
        request.proposals = request.proposals[:count]
        return count

    def _plan_waiting(
        self, budget: int, candidates: list[Request], shares: dict[Request, int]
    ) -> list[Scheduled]:
        scheduled: list[Scheduled] = []
        coming: dict[_Page | None, Tokens] = {}
        without_slot: Request | None = None
        for request in candidates:
            if not self._may_run(request):
                without_slot = without_slot or request
                continue
            if request.adapter and self._is_patient_enough(without_slot):
                continue  # A slot becomes free when the requests that use it have ended.
            if budget <= 0 or len(self.running) >= self._max_running or request not in shares:
                break
            self._cache.attach(request)
            beginning = self._next_page(request)
            prefix = coming.get(beginning)
            if prefix is not None and np.array_equal(request.names[:-1][: len(prefix)], prefix):
                # Another request of this step computes the same prefix. In the next step, this
                # request finds it in the cache.
                self._cache.release(request)
                continue
            uncomputed = request.num_tokens - request.num_computed
            share = min(budget, uncomputed, shares[request])
            # The whole sequence must fit, with one spare page for each running request.
            fits = not self.running or self._cache.has_room(request, uncomputed, len(self.running))
            if fits and not (share and self._ready(request, share)):
                self._cache.release(request)
                continue
            num_new = self._ready(request, self._cache.limit(request, share))
            if not fits or not self._cache.reserve(request, num_new):
                self._cache.release(request)
                if not self.running and self._cache.flush():
                    # Its cached prefix may occupy too many slabs of shared pages.
                    return self._plan_waiting(budget, candidates, shares)
                break
            if self._adapters is not None:
                self._adapters.hold(request)
            self.waiting.remove(request)
            insort(self.running, request, key=_ORDER)
            if request.cached_tokens is None:
                request.cached_tokens = request.num_computed
                self.started[request.rid] = time.monotonic()
                self.prompt_tokens += request.num_prompt
                self.cached_tokens += request.cached_tokens
            if beginning is not None and (end := self._cache.next_prefix(request, num_new)):
                coming.setdefault(beginning, request.names[:end])
            scheduled.append(Scheduled(request, num_new))
            budget -= num_new
        is_same = without_slot is not None and without_slot is self._without_slot
        self._steps_without = self._steps_without + 1 if is_same else 0
        self._without_slot = without_slot
        return scheduled

    def _is_patient_enough(self, request: Request | None) -> bool:
        """Whether a request has waited so long for a slot that no later one with an adapter may
        start.
        """
        return (
            request is not None
            and request is self._without_slot
            and (self._steps_without >= _PATIENCE)
        )

    def _next_page(self, request: Request) -> _Page | None:
        """Return a key of the first page of a request that is not in the prefix tree.

        Return None if that page is not full, or if the request does not share prefixes.
        """
        begin = request.shared_pages * self._cache.page_size
        page = request.names[begin : begin + self._cache.page_size]
        if (
            len(page) < self._cache.page_size
            or request.prompt_logprobs_due
            or not self._cache.shares_prefixes
        ):
            return None
        return id(request.node), request.namespace, page.tobytes()

    def _ready(self, request: Request, num_new: int) -> int:
        """Return how many of the next `num_new` tokens can be computed now."""
        if self._images is None or request.num_computed >= request.images_end:
            return num_new
        return self._images.ready(request, num_new)

    def _may_run(self, request: Request) -> bool:
        return self._adapters is None or self._adapters.may_run(request)

    def _release(self, request: Request) -> None:
        """Free the pages of a request that does not run any more, and its adapter's slot."""
        self._cache.release(request)
        if self._adapters is not None:
            self._adapters.let_go(request)

    def _preempt_for_urgent(self) -> None:
        """Preempt requests of lower priority while the first waiting request does not fit."""
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
        """Move a running request back to the queue and free its pages.

        Its tokens are kept. Those that are not in the prefix tree are computed again.
        """
        if self._in_flight:
            raise StepInFlight
        self.running.remove(request)
        self._release(request)
        request.proposals = []
        insort(self.waiting, request, key=_ORDER)
        self.preemptions += 1
