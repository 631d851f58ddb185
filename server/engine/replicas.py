"""Several engines of the same model behind one interface (`--dp-size`).

A request goes to the replica that has its prefix cached, unless that replica is overloaded. If the
process of a replica ends, its requests resume on another replica.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import Any, Unpack

from ...runtime.config.engine import EngineConfig
from ...runtime.core.adapter_info import AdapterInfo
from ...runtime.core.control_messages import Control, Controlled
from ...runtime.core.engine_info import EngineInfo
from ...runtime.core.images import named
from ...runtime.core.messages import (
    AdapterAnswer,
    EngineStats,
    ProfileAnswer,
    StartProfile,
    StopProfile,
)
from ...runtime.tokenizer.output_processor import RequestState
from ...runtime.tokenizer.tokenizer import Tokenizer
from .prefix_index import BLOCK, block_hashes
from .replica import Replica
from .settings import SupervisorSettings
from .state import EngineState, EngineUnavailable, Progress, QueueFull

logger = logging.getLogger(__name__)

# Share of a prompt that must be cached on a replica for the request to go there. SGLang's router
# names it `cache_threshold`.
_MIN_MATCH = 0.3
# A replica is overloaded if it has more than _MAX_LEAD requests more than the least loaded replica,
# and more than _MAX_RATIO times as many.
_MAX_LEAD, _MAX_RATIO = 8, 1.5
_MAX_KEYS = 10_000  # Keys of clients whose replica is remembered.
_SERVES = (EngineState.READY, EngineState.DRAINING)
_GONE = (EngineState.FAILED, EngineState.STOPPED)
# The state of the group is the first of these states that any replica is in.
_ORDER = (
    EngineState.READY,
    EngineState.DRAINING,
    EngineState.UNRESPONSIVE,
    EngineState.STARTING,
    EngineState.RESTARTING,
    EngineState.STOPPED,
    EngineState.FAILED,
)


class Replicas:
    """A group of `number` engines with the interface of an `EngineClient`.

    `max_queued_requests` and `max_total_tokens` are those of the whole group. The group is ready
    while one replica is. `failed` is set once all replicas have failed, or if one could never start
    because of a user error.
    """

    def __init__(
        self,
        number: int,
        config: EngineConfig,
        tokenizer: Tokenizer,
        *,
        refuses_asleep: bool = False,
        **settings: Unpack[SupervisorSettings],
    ) -> None:
        """`settings` are those of `EngineClient`. `process` is for the first replica."""
        self.tokenizer = tokenizer
        self.failed = asyncio.Event()
        self.replicas = [
            Replica(
                each,
                tokenizer,
                refuses_asleep=refuses_asleep,
                **(settings if each.replica == 0 else _others(settings)),
            )
            for each in split_config(config, number)
        ]
        # The number of the replica by a hash of the tenant and its key, least recently used first.
        self._by_key: dict[int, int] = {}
        self._max_queued = settings.get("max_queued_requests", 512)
        self.adapters = self.replicas[0].adapters
        for each in self.replicas:
            each.ended = self._ended
        for each in self.replicas[1:]:
            each.share_adapters(self.replicas[0])

    # The state of the group

    @property
    def state(self) -> EngineState:
        return min((each.state for each in self.replicas), key=_ORDER.index)

    @property
    def info(self) -> EngineInfo | None:
        """The info of a replica, with the smallest `kv_tokens` and the sum of running requests."""
        known = [each.info for each in self.replicas if each.info is not None]
        if not known:
            return None
        return replace(
            known[0],
            kv_tokens=min(info.kv_tokens for info in known),
            max_running_requests=sum(info.max_running_requests for info in known),
        )

    @property
    def stats(self) -> EngineStats:
        return _sum([each.stats for each in self.replicas])

    @property
    def restarts(self) -> int:
        return sum(each.restarts for each in self.replicas)

    @property
    def hangs(self) -> int:
        return sum(each.hangs for each in self.replicas)

    @property
    def silence(self) -> float:
        """Seconds of silence of the replica that was silent for longest."""
        return max(each.silence for each in self._alive) if self._alive else 0.0

    @property
    def failure(self) -> str | None:
        reasons = {each.failure: None for each in self.replicas if each.failure is not None}
        return "; ".join(reasons) or None

    @property
    def user_error(self) -> bool:
        return any(each.user_error for each in self.replicas)

    @property
    def engine_pid(self) -> int | None:
        """None: each replica has a process of its own."""
        return None

    @property
    def num_unfinished(self) -> int:
        return sum(each.num_unfinished for each in self.replicas)

    @property
    def progress(self) -> Progress | None:
        """That of the first replica that is not at full speed."""
        return next(filter(None, (each.progress for each in self.replicas)), None)

    @property
    def capacity(self) -> int:
        """Maximum number of requests that run and wait at once."""
        infos = [each.info for each in self._alive if each.info is not None]
        return self._max_queued + sum(info.max_running_requests for info in infos)

    @property
    def _alive(self) -> list[Replica]:
        """The replicas that have not failed or stopped."""
        return [each for each in self.replicas if each.state not in _GONE]

    # Start and end

    async def start(self) -> None:
        """Start all replicas and return at once. `wait_ready` waits until they serve."""
        self.failed.clear()
        for each in self.replicas:
            each.prefixes.clear()
            await each.start()

    async def wait_ready(self) -> bool:
        """Return True once every replica is ready or has failed, False if the group has failed."""
        failed = asyncio.create_task(self.failed.wait())
        ready = asyncio.gather(*[each.wait_ready() for each in self.replicas])
        either: list[asyncio.Future[Any]] = [ready, failed]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        for each in either:
            each.cancel()
        return not self.failed.is_set()

    async def drain(self, timeout: float) -> None:
        """Drain all replicas at the same time, as `EngineClient.drain`."""
        await asyncio.gather(*[each.drain(timeout) for each in self.replicas])

    async def stop(self, *, at_once: bool = False) -> None:
        await asyncio.gather(*[each.stop(at_once=at_once) for each in self.replicas])

    def _ended(self, replica: Replica) -> None:
        """Resume the requests of a replica that has ended on other replicas, if possible."""
        replica.prefixes.clear()
        is_lost = replica.state is EngineState.FAILED
        never_served = replica.user_error and replica.info is None
        if is_lost and (never_served or not self._alive):
            self.failed.set()
            return
        ready = [each for each in self.replicas if each.state in _SERVES]
        if not ready and not is_lost:
            return
        moved = replica.hand_over(suspects=is_lost)
        for request in moved:
            self._choose(request, ready or self._alive).resume(request)
        if moved:
            logger.warning(
                "%d requests of replica %d resume on other replicas", len(moved), replica.number
            )
        if is_lost:
            logger.error(
                "replica %d has failed, %d of %d are left",
                replica.number,
                len(self._alive),
                len(self.replicas),
            )

    # Requests

    def require_room(self, count: int) -> None:
        """Raise `QueueFull` or `EngineUnavailable` if `count` more requests cannot be added."""
        if self.failed.is_set() or not self._alive:
            raise EngineUnavailable(self.failure or "the server is stopping")
        for each in self._alive:
            each.require_open()
        if self.num_unfinished + count > self.capacity:
            raise QueueFull(f"{self.num_unfinished} requests are running or waiting already")

    def unfinished(self) -> Iterator[RequestState]:
        """The unfinished requests of each replica, oldest first."""
        return chain.from_iterable(each.unfinished() for each in self.replicas)

    def add_request(self, request: RequestState) -> None:
        """Add a request. Raises `QueueFull` and `EngineUnavailable`."""
        self.require_room(1)
        ready = [each for each in self.replicas if each.state in _SERVES]
        self._choose(request, ready or self._alive).take(request)

    def drop(self, requests: Iterable[RequestState]) -> None:
        """Abort the unfinished ones of these requests, because their client is gone."""
        dropped = list(requests)
        for each in self.replicas:
            each.drop(dropped)

    async def abort(self, rid: str | None) -> int:
        """Abort requests on every replica, as `EngineClient.abort`. Return the number."""
        return sum([await each.abort(rid) for each in self.replicas])

    async def flush_cache(self) -> int:
        """Drop cached prefixes that no request uses, on every replica. Return the tokens freed."""
        for each in self.replicas:
            each.prefixes.clear()
        answers = await asyncio.gather(
            *[each.flush_cache() for each in self._ready()], return_exceptions=True
        )
        # If a replica has ended meanwhile, its cache is empty.
        return sum(answer for answer in answers if isinstance(answer, int))

    async def profile(self, message: StartProfile | StopProfile) -> list[ProfileAnswer]:
        """Start or stop a profile on every ready replica. An answer has `error` if it refuses."""
        answers = [each.profile(message) for each in self._ready()]
        return list(chain.from_iterable(await asyncio.gather(*answers)))

    async def load_adapter(self, name: str, path: str) -> AdapterAnswer:
        """Load an adapter on every replica that serves. Replicas that restart load it then."""
        return await self._ask_all(lambda each: each.load_adapter(name, path))

    async def unload_adapter(self, identity: str) -> AdapterAnswer:
        """Drop an adapter on every replica when its requests have ended there."""
        return await self._ask_all(lambda each: each.unload_adapter(identity))

    async def _ask_all(self, ask: Callable[[Replica], Awaitable[AdapterAnswer]]) -> AdapterAnswer:
        """Return an answer of all ready replicas, an error if there is one."""
        answers = await asyncio.gather(*[ask(each) for each in self._ready()])
        return next((answer for answer in answers if answer.error is not None), answers[0])

    async def list_adapters(self) -> list[AdapterInfo]:
        """Return the adapters of a replica."""
        return await self._ready()[0].list_adapters()

    def _ready(self) -> list[Replica]:
        """Return the replicas that serve. Raise `EngineUnavailable` if there is none."""
        ready = [each for each in self.replicas if each.state is EngineState.READY]
        if not ready:
            raise EngineUnavailable(f"the engine is {self.state}")
        return ready

    @property
    def asleep(self) -> bool:
        return any(each.asleep for each in self.replicas)

    async def control(self, message: Control) -> list[Controlled]:
        """Do the same on every replica. All must be ready. Return their answers."""
        if any(each.state is not EngineState.READY for each in self.replicas):
            raise EngineUnavailable("a replica is not ready, and all must do the same")
        for each in self.replicas:
            each.prefixes.clear()
        answers = await asyncio.gather(*[each.control(message) for each in self.replicas])
        return list(chain.from_iterable(answers))

    def _choose(self, request: RequestState, among: Sequence[Replica]) -> Replica:
        """Choose a replica for a request.

        It is the replica of earlier requests with the same key (`RequestState.affinity`), or
        otherwise the one with the longest cached prefix, if the prefix is at least `_MIN_MATCH` of
        the prompt. If that replica is overloaded, or if there is none, it is the least loaded
        replica; of equally loaded ones, the one with the smallest prefix index.
        """
        prompt = named(request.prompt_ids, request.images) if request.images else request.prompt_ids
        blocks = block_hashes(prompt, request.adapter)
        matched = {each.number: each.prefixes.matched(blocks) for each in among}
        least_loaded = min(among, key=lambda each: (each.num_unfinished, len(each.prefixes)))
        best = min(among, key=lambda each: (-matched[each.number], each.num_unfinished))
        is_cached = matched[best.number] * BLOCK >= max(1, _MIN_MATCH * len(request.prompt_ids))
        key = hash((request.tenant, request.affinity))
        number = self._by_key.pop(key, None) if request.affinity else None
        known = next((each for each in among if each.number == number), None)
        if known is not None:
            best, is_cached = known, True
        is_overloaded = best.num_unfinished > max(
            least_loaded.num_unfinished + _MAX_LEAD, least_loaded.num_unfinished * _MAX_RATIO
        )
        chosen = best if is_cached and not is_overloaded else least_loaded
        if request.affinity:
            self._by_key[key] = (known or chosen).number
            if len(self._by_key) > _MAX_KEYS:
                del self._by_key[next(iter(self._by_key))]
        chosen.prefixes.add(blocks)
        return chosen


def split_config(config: EngineConfig, number: int) -> list[EngineConfig]:
    """Return the config of each replica. The replicas share `max_total_tokens` equally."""
    tokens, seed = config.max_total_tokens, config.random_seed
    return [
        replace(
            config,
            replica=replica,
            replicas=number,
            max_total_tokens=None if tokens is None else tokens // number,
            random_seed=None if seed is None else seed + replica,
        )
        for replica in range(number)
    ]


def _others(settings: SupervisorSettings) -> SupervisorSettings:
    return {**settings, "process": None}


def _sum(all_stats: Sequence[EngineStats]) -> EngineStats:
    totals: dict[str, Any] = {}
    for item in fields(EngineStats):
        values = [getattr(stats, item.name) for stats in all_stats]
        if isinstance(values[0], dict):
            totals[item.name] = dict(sum(map(Counter, values), Counter[str]()))
        else:
            totals[item.name] = sum(values)
    return EngineStats(**totals)
