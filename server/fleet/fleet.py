"""Which models are loaded: each when it is asked for, as long as there is room, and none that has
requests is ended for another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ...runtime.core.messages import EngineStats
from ...runtime.process.memory import free_memory, resident_memory
from ..core.errors import Unavailable
from ..engine.interface import Engine
from ..engine.state import EngineState, EngineUnavailable, QueueFull
from ..serving.service import Service
from .config import FleetConfig
from .estimate import estimate, with_share
from .member import Closing, MakesService, Member, MemberState

logger = logging.getLogger(__name__)

_GIB = 2**30
_LOOK = 1.0
"""Seconds between two looks at what is idle, and at how much memory is taken."""
_PATIENCE = 5.0
"""Seconds for which models that are busy go on to take requests while another waits for their
room: each switch costs seconds, and what waits meanwhile is answered together.
"""
_FULL_SECONDS = 5
"""What `Retry-After` says where too many wait: a model takes seconds to load."""
_RUNNING = 16
"""Lines of batches that are under way at once, where no model says how many it runs."""


@dataclass(frozen=True, slots=True)
class FleetInfo:
    """What the runner of batches asks of an engine."""

    max_running_requests: int


@dataclass(eq=False, slots=True)
class _Waiter:
    member: Member
    let_in: asyncio.Future[None]
    since: float


class Fleet:
    """The models of one server and the requests that wait for them, started, drained and stopped
    like an engine. `service_of` makes a model's service, which `adopt` is then called with.
    """

    restarts = hangs = 0
    silence = 0.0
    engine_pid: int | None = None
    replicas: Sequence[Engine] = ()

    def __init__(
        self, config: FleetConfig, adopt: Callable[[Service], None], service_of: MakesService
    ) -> None:
        self.config = config
        self.state = EngineState.STARTING
        self.started = int(time.time())
        self.failed = asyncio.Event()
        self.failure: str | None = None
        self.user_error = False
        free = free_memory()
        wanted = (
            None if config.limits.fleet_memory is None else int(config.limits.fleet_memory * _GIB)
        )
        self.memory_limit = wanted or free
        """Bytes."""
        self._changed = asyncio.Event()
        self.members = {
            each.name: Member(
                with_share(each, self.memory_limit, free),
                estimate(each, self.memory_limit),
                adopt,
                service_of,
                self._changed.set,
            )
            for each in config.members
        }
        self._waiting: dict[_Waiter, None] = {}
        preloaded = sum(each.preload for each in config.members)
        self._most_waiting = max(1, preloaded, config.max_queued_requests)
        self._tasks: set[asyncio.Task[None]] = set()

    # What a server asks of an engine

    async def start(self) -> None:
        """Returns at once, `wait_ready` waits for the models that are to be loaded first."""
        self._run(self._arrange_for_ever())
        self._run(self._look_for_ever())

    async def wait_ready(self) -> bool:
        """True, once each model that is loaded at the start is ready, or has failed."""
        first = [member for member in self.members.values() if member.config.preload]
        results = await asyncio.gather(*map(self.load, first), return_exceptions=True)
        for member, result in zip(first, results, strict=True):
            if isinstance(result, BaseException):
                logger.error("model %s is not loaded: %s", member.name, result)
        if self.state is EngineState.STARTING:
            self.state = EngineState.READY
        return True

    async def drain(self, timeout: float) -> None:
        """Take no new request; wait for those under way, and after `timeout` seconds abort what is
        left.
        """
        self.state = EngineState.DRAINING
        self._refuse(list(self._waiting), EngineUnavailable("the server is stopping"))
        # Also of those that were giving way: they have requests.
        ready = [each for each in self.members.values() if each.state is MemberState.READY]
        loaded = [each.service for each in ready if each.service is not None]
        await asyncio.gather(*[each.engine.drain(timeout) for each in loaded])

    async def stop(self, *, at_once: bool = False) -> None:
        """End every engine process."""
        self.state = EngineState.STOPPED
        self._refuse(list(self._waiting), EngineUnavailable("the server is stopping"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        in_order = (EngineState.READY, EngineState.DRAINING)
        await asyncio.gather(
            *[each.stop(at_once=at_once or each.state not in in_order) for each in self._engines],
            return_exceptions=True,
        )

    @property
    def _engines(self) -> list[Engine]:
        return [each.service.engine for each in self.members.values() if each.service is not None]

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + sum(each.num_unfinished for each in self._engines)

    def unfinished(self) -> Iterator[Any]:
        """Of each model, the oldest first."""
        return chain.from_iterable(each.unfinished() for each in self._engines)

    def require_room(self, count: int) -> None:
        """Each model asks its own engine; here nothing is computed."""

    @property
    def stats(self) -> EngineStats:
        """Each model has its own."""
        return EngineStats()

    @property
    def capacity(self) -> int:
        return self.config.max_queued_requests + self.info.max_running_requests

    @property
    def info(self) -> FleetInfo:
        ready = [each.service for each in self.members.values() if each.admits and each.service]
        return FleetInfo(sum(one.engine.info.max_running_requests for one in ready) or _RUNNING)

    # What requests ask

    @contextlib.asynccontextmanager
    async def use(self, member: Member) -> AsyncIterator[int]:
        """The model, loaded for as long as the block lasts; gives the place in the queue that was
        waited at, 0: it was ready. Raises `QueueFull`, `EngineUnavailable`, and `Unavailable` where
        it cannot be loaded.
        """
        place = await self._enter(member)
        try:
            yield place
        finally:
            self._leave(member)

    async def load(self, member: Member) -> None:
        """Have it loaded, also one that has just failed. Raises as `use`."""
        if member.state is MemberState.FAILED:
            member.state = MemberState.UNLOADED
        async with self.use(member):
            pass

    async def unload(self, member: Member) -> None:
        """Have it end what it does, and then unloaded; who asks for it meanwhile waits."""
        if member.state is MemberState.FAILED:
            member.state = MemberState.UNLOADED
        ends = member.ends
        while member.holds_memory and member.ends == ends:
            if member.state is not MemberState.UNLOADING:
                member.closing = Closing.ASKED
            self._changed.set()
            await asyncio.sleep(_LOOK / 20)

    def waiting_for(self, member: Member) -> int:
        return sum(waiter.member is member for waiter in self._waiting)

    def status(self, member: Member) -> MemberState:
        """Where it stands, to be told."""
        is_queued = member.state is MemberState.UNLOADED and self.waiting_for(member) > 0
        return MemberState.QUEUED if is_queued else member.state

    async def _enter(self, member: Member) -> int:
        if self.state in (EngineState.DRAINING, EngineState.STOPPED):
            raise EngineUnavailable("the server is stopping")
        if member.admits:
            member.under_way += 1
            return 0
        if member.state is MemberState.FAILED:
            if time.monotonic() < member.retry_at:
                raise _has_failed(member)
            member.state = MemberState.UNLOADED
        place = len(self._waiting) + 1
        if place > self._most_waiting:
            full = QueueFull(
                f"{place - 1} requests wait for their models to be loaded (--max-queued-requests)"
            )
            full.retry_after = _FULL_SECONDS
            raise full
        waiter = _Waiter(member, asyncio.get_running_loop().create_future(), time.monotonic())
        self._waiting[waiter] = None
        self._changed.set()
        try:
            await waiter.let_in
        except asyncio.CancelledError:
            let_in = waiter.let_in
            if let_in.done() and not let_in.cancelled() and let_in.exception() is None:
                self._leave(member)
            raise
        finally:
            self._waiting.pop(waiter, None)
        return place

    def _leave(self, member: Member) -> None:
        member.under_way -= 1
        member.last_used = time.monotonic()
        if member.under_way == 0:
            self._changed.set()

    # What is loaded

    async def _arrange_for_ever(self) -> None:
        while self.state is not EngineState.STOPPED:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK):
                    await self._changed.wait()
            self._changed.clear()
            try:
                self._arrange()
            except Exception:
                # Nothing would ever be loaded any more.
                logger.exception("the models could not be arranged")

    async def _look_for_ever(self) -> None:
        """Beside what is arranged, which must not wait for a thread or a slow /proc."""
        while self.state is not EngineState.STOPPED:
            await asyncio.sleep(_LOOK)
            try:
                await self._look()
            except Exception:
                logger.exception("the memory of the models could not be looked at")

    async def _look(self) -> None:
        """What the models take of the memory, and which of them are idle for long."""
        loaded = [each for each in self.members.values() if each.holds_memory]
        pids = [each.engine_pids for each in loaded]
        found = await asyncio.to_thread(lambda: [*map(resident_memory, pids)])
        for member, resident in zip(loaded, found, strict=True):
            member.look(resident)
        for member in self._movable(only_idle=True):
            own = member.config.idle_unload
            seconds = self.config.limits.idle_unload if own is None else own
            if seconds and time.monotonic() >= member.last_used + seconds:
                member.closing = Closing.IDLE
        taken = sum(each.resident for each in loaded if each.closing is None)
        if taken > self.memory_limit:
            # The next load of each knows what it took.
            for member in self._movable(only_idle=True)[:1]:
                member.closing = Closing.MEMORY

    def _arrange(self) -> None:
        """Begin what can begin now: requests that waited, loads, unloads."""
        for member in self.members.values():
            self._let_in(member)
        giving_way: Sequence[Member] = ()
        while (head := self._next_to_load()) is not None:
            others = [each for each in self.members.values() if each.holds_memory]
            if not self._fits(head, others):
                giving_way = self._room_for(head, others)
                break
            head.state = MemberState.LOADING
            self._run(head.load())
        for member in self.members.values():
            if member.state is not MemberState.READY:
                continue
            if member in giving_way:
                member.closing = member.closing or Closing.ROOM
            elif member.closing is Closing.ROOM:
                member.closing = None
                self._let_in(member)
            if member.closing is not None and member.is_idle:
                member.state = MemberState.UNLOADING
                self._run(member.unload())

    def _let_in(self, member: Member) -> None:
        """Whoever waits for a model that is ready, or has failed, waits no longer."""
        if member.state is MemberState.FAILED:
            self._refuse(self._waiters_of(member), _has_failed(member))
        elif member.admits:
            for waiter in self._waiters_of(member):
                member.under_way += 1
                waiter.let_in.set_result(None)

    def _next_to_load(self) -> Member | None:
        """The model that whoever waits longest of those that nobody loads yet wants."""
        wanted = (
            waiter.member
            for waiter in self._waiting
            if waiter.member.state is MemberState.UNLOADED and not waiter.let_in.done()
        )
        return next(wanted, None)

    def _fits(self, member: Member, others: Sequence[Member]) -> bool:
        most = self.config.limits.max_loaded_models
        return (most is None or len(others) < most) and (
            member.size + sum(each.size for each in others) <= self.memory_limit
        )

    def _room_for(self, member: Member, others: Sequence[Member]) -> Sequence[Member]:
        """The models that must give way to it now, the longest unused first. Refuses who waits for
        it where none of them may.
        """
        left = [each for each in others if each.state is not MemberState.UNLOADING]
        gone: list[Member] = []
        candidates = iter(self._movable(only_idle=False))
        while not self._fits(member, left):
            if (one := next(candidates, None)) is None:
                if not any(each.state is MemberState.LOADING for each in left):
                    self._refuse(self._waiters_of(member), self._no_room(member, left))
                    self._changed.set()
                return ()
            left.remove(one)
            gone.append(one)
        for one in list(gone):
            if self._fits(member, [*left, one]):
                left.append(one)
                gone.remove(one)
        since = self._waiters_of(member)[0].since
        if any(not each.is_idle for each in gone) and time.monotonic() < since + _PATIENCE:
            return ()
        return gone

    def _movable(self, *, only_idle: bool) -> list[Member]:
        """Models that may be unloaded: idle ones first, of these the longest unused."""
        found = [
            each
            for each in self.members.values()
            if each.state is MemberState.READY
            and not each.config.pinned
            and (each.is_idle or not only_idle)
        ]
        return sorted(found, key=lambda each: (not each.is_idle, each.last_used))

    def _waiters_of(self, member: Member) -> list[_Waiter]:
        return [each for each in self._waiting if each.member is member and not each.let_in.done()]

    def _refuse(self, waiters: Sequence[_Waiter], error: Exception) -> None:
        for waiter in waiters:
            if not waiter.let_in.done():
                waiter.let_in.set_exception(error)

    def _no_room(self, member: Member, holders: Sequence[Member]) -> Unavailable:
        held = ", ".join(f"{each.name} {each.size / _GIB:.2f} GiB" for each in holders)
        return Unavailable(
            f"The model {member.name} needs {member.size / _GIB:.2f} GiB and has no room: "
            f"{self.memory_limit / _GIB:.2f} GiB are for all models (--fleet-memory), of which "
            f"{held or 'none'} {'is' if len(holders) < 2 else 'are'} held and pinned.",
            code="model_does_not_fit",
            headers={"Retry-After": "60"},
        )

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _has_failed(member: Member) -> Unavailable:
    seconds = max(1, round(member.retry_at - time.monotonic()))
    return Unavailable(
        f"The model {member.name} could not be loaded: {member.failure}. It is tried again in "
        f"{seconds} s, or by POST /v1/models/load.",
        code="model_failed",
        headers={"Retry-After": str(seconds)},
    )
