"""Loads models when requests ask for them, and unloads others to make room.

A model that has requests finishes them before it is unloaded.
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
from ..config.fleet import FleetConfig
from ..core.errors import Unavailable
from ..engine.interface import Engine
from ..engine.state import EngineState, EngineUnavailable, QueueFull
from ..serving.service import Service
from .estimate import estimate, with_share
from .member import Closing, MakesService, Member, MemberState

logger = logging.getLogger(__name__)

_GIB = 2**30
_CHECK_SECONDS = 1.0  # Seconds between two checks of idle models and of memory.
# Seconds for which busy models still take requests while another model waits for their room. Each
# switch costs seconds, and requests that wait meanwhile are then served together.
_SWITCH_SECONDS = 5.0
_FULL_SECONDS = 5  # `Retry-After` if too many requests wait; a model takes seconds to load.
_DEFAULT_RUNNING = 16  # Lines of batches that run at once if no model is loaded.


@dataclass(frozen=True, slots=True)
class FleetInfo:
    """The engine info that the runner of batches reads."""

    max_running_requests: int


@dataclass(eq=False, slots=True)
class _Waiter:
    member: Member
    let_in: asyncio.Future[None]
    since: float


class Fleet:
    """The models of one server and the requests that wait for them, with the interface of an
    engine.

    `service_of` makes the service of a model. `adopt` is called with each new service.
    `memory_limit` is in bytes.
    """

    restarts = hangs = 0
    silence, progress = 0.0, None
    engine_pid: int | None = None
    replicas: Sequence[Engine] = ()

    def __init__(
        self, config: FleetConfig, adopt: Callable[[Service], None], service_of: MakesService
    ) -> None:
        self.config = config
        self.state = EngineState.STARTING
        self.started = int(time.time())
        self.failed = asyncio.Event()
        self.adapters: dict[str, Any] = {}  # Those of members are at their engines.
        self.failure: str | None = None
        self.user_error = False
        free = free_memory()
        wanted = (
            None if config.limits.fleet_memory is None else int(config.limits.fleet_memory * _GIB)
        )
        self.memory_limit = wanted or free
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

    # The interface of an engine

    async def start(self) -> None:
        """Start and return at once. `wait_ready` waits for the models that are preloaded."""
        self._run(self._arrange_forever())
        self._run(self._check_forever())

    async def wait_ready(self) -> bool:
        """Return True once each preloaded model is ready or has failed."""
        first = [member for member in self.members.values() if member.config.preload]
        results = await asyncio.gather(*map(self.load, first), return_exceptions=True)
        for member, result in zip(first, results, strict=True):
            if isinstance(result, BaseException):
                logger.error("model %s is not loaded: %s", member.name, result)
        if self.state is EngineState.STARTING:
            self.state = EngineState.READY
        return True

    async def drain(self, timeout: float) -> None:
        """Refuse new requests, wait for the others, and abort them after `timeout` seconds."""
        self.state = EngineState.DRAINING
        self._refuse(list(self._waiting), EngineUnavailable("the server is stopping"))
        # This includes models that are about to be unloaded, because they have requests.
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
        """The unfinished requests of each model, oldest first."""
        return chain.from_iterable(each.unfinished() for each in self._engines)

    def require_room(self, count: int) -> None:
        """Do nothing: the engine of each model checks its own room."""

    @property
    def stats(self) -> EngineStats:
        """Empty statistics: each model has its own."""
        return EngineStats()

    @property
    def capacity(self) -> int:
        return self.config.max_queued_requests + self.info.max_running_requests

    @property
    def info(self) -> FleetInfo:
        ready = [each.service for each in self.members.values() if each.admits and each.service]
        return FleetInfo(
            sum(service.engine.info.max_running_requests for service in ready) or _DEFAULT_RUNNING
        )

    # Requests

    @contextlib.asynccontextmanager
    async def use(self, member: Member) -> AsyncIterator[int]:
        """Wait until the model is loaded, and keep it loaded inside the block.

        Yields the place in the queue at which the caller waited, or 0 if the model was ready.
        Raises `QueueFull`, `EngineUnavailable`, and `Unavailable` if the model cannot be loaded.
        """
        place = await self._enter(member)
        try:
            yield place
        finally:
            self._leave(member)

    async def load(self, member: Member) -> None:
        """Load a model, also one that has just failed. Raises the same errors as `use`."""
        if member.state is MemberState.FAILED:
            member.state = MemberState.UNLOADED
        async with self.use(member):
            pass

    async def unload(self, member: Member) -> None:
        """Unload a model once its requests have ended. Requests that arrive meanwhile wait."""
        if member.state is MemberState.FAILED:
            member.state = MemberState.UNLOADED
        ends = member.ends
        while member.holds_memory and member.ends == ends:
            if member.state is not MemberState.UNLOADING:
                member.closing = Closing.ASKED
            self._changed.set()
            await asyncio.sleep(_CHECK_SECONDS / 20)

    def waiting_for(self, member: Member) -> int:
        return sum(waiter.member is member for waiter in self._waiting)

    def status(self, member: Member) -> MemberState:
        """Return the state of a model for clients: also `QUEUED`."""
        is_queued = member.may_load and self.waiting_for(member) > 0
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

    # Loading and unloading

    async def _arrange_forever(self) -> None:
        while self.state is not EngineState.STOPPED:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_SECONDS):
                    await self._changed.wait()
            self._changed.clear()
            try:
                self._arrange()
            except Exception:
                # Without this, no model would ever be loaded again.
                logger.exception("models could not be loaded or unloaded")

    async def _check_forever(self) -> None:
        """Check memory in a task of its own: `_arrange` must not wait for a thread or /proc."""
        while self.state is not EngineState.STOPPED:
            await asyncio.sleep(_CHECK_SECONDS)
            try:
                await self._check_memory()
            except Exception:
                logger.exception("the memory of the models could not be read")

    async def _check_memory(self) -> None:
        """Measure the models' memory, and close models that are idle for long or too large."""
        loaded = [each for each in self.members.values() if each.holds_memory]
        pids = [each.engine_pids for each in loaded]
        found = await asyncio.to_thread(lambda: [*map(resident_memory, pids)])
        for member, resident in zip(loaded, found, strict=True):
            member.update_memory(resident)
        for member in self._movable(only_idle=True):
            if (reason := member.due(self.config.idle_seconds(member.config))) is not None:
                member.closing = reason
        taken = sum(each.resident for each in loaded if each.closing is None)
        if taken > self.memory_limit:
            # The next load of the model knows its real size.
            for member in self._movable(only_idle=True)[:1]:
                member.closing = Closing.MEMORY

    def _arrange(self) -> None:
        """Start all loads and unloads that are possible now, and let waiting requests enter."""
        for member in self.members.values():
            self._let_in(member)
        to_unload: Sequence[Member] = ()
        while (head := self._next_to_load()) is not None:
            others = [
                each for each in self.members.values() if each.holds_memory and each is not head
            ]
            if not self._fits(head, others):
                to_unload = self._room_for(head, others)
                break
            head.state, head.closing = MemberState.LOADING, None
            self._run(head.load())
        for member in self.members.values():
            if not member.may_unload:
                continue
            if member in to_unload:
                member.closing = member.closing or Closing.ROOM
            elif member.closing is Closing.ROOM:
                member.closing = None
                self._let_in(member)
            if member.closing is not None and member.is_idle:
                member.state = MemberState.UNLOADING
                self._run(member.unload())

    def _let_in(self, member: Member) -> None:
        """Let the waiting requests of a ready model enter, or refuse those of a failed one."""
        if member.state is MemberState.FAILED:
            self._refuse(self._waiters_of(member), _has_failed(member))
        elif member.admits:
            for waiter in self._waiters_of(member):
                member.under_way += 1
                waiter.let_in.set_result(None)

    def _next_to_load(self) -> Member | None:
        """Return the unloaded model whose request has waited longest, or None."""
        wanted = (
            waiter.member
            for waiter in self._waiting
            if waiter.member.may_load and not waiter.let_in.done()
        )
        return next(wanted, None)

    def _fits(self, member: Member, others: Sequence[Member]) -> bool:
        most = self.config.limits.max_loaded_models
        loaded = sum(each.state is not MemberState.SLEEPING for each in others)
        return (most is None or loaded < most) and (
            member.size + sum(each.takes for each in others) <= self.memory_limit
        )

    def _room_for(self, member: Member, others: Sequence[Member]) -> Sequence[Member]:
        """Return the models to unload now to make room, least recently used first.

        If no set of models would make room, the requests that wait for `member` are refused.
        """
        left = [each for each in others if each.state is not MemberState.UNLOADING]
        gone: list[Member] = []
        candidates = (each for each in self._movable(only_idle=False) if each is not member)
        while not self._fits(member, left):
            if (candidate := next(candidates, None)) is None:
                if not any(each.state is MemberState.LOADING for each in left):
                    self._refuse(self._waiters_of(member), self._no_room(member, left))
                    self._changed.set()
                return ()
            left.remove(candidate)
            gone.append(candidate)
        for candidate in list(gone):
            if self._fits(member, [*left, candidate]):
                left.append(candidate)
                gone.remove(candidate)
        since = self._waiters_of(member)[0].since
        if any(not each.is_idle for each in gone) and time.monotonic() < since + _SWITCH_SECONDS:
            return ()
        return gone

    def _movable(self, *, only_idle: bool) -> list[Member]:
        """The models that may be unloaded: idle ones first, then least recently used."""
        found = [
            each
            for each in self.members.values()
            if each.may_unload and not each.config.pinned and (each.is_idle or not only_idle)
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
            f"The model {member.name} needs {member.size / _GIB:.2f} GiB and does not fit: all "
            f"models may take {self.memory_limit / _GIB:.2f} GiB together, of which pinned models "
            f"take {held or 'nothing'}. Raise --fleet-memory.",
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
        f"The model {member.name} could not be loaded: {member.failure}. The next try is in "
        f"{seconds} s, or at once by POST /v1/models/load.",
        code="model_failed",
        headers={"Retry-After": str(seconds)},
    )
