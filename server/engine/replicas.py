"""Several engines of the same model behind one interface (`--dp-size`): a request goes where its
prefix is cached, unless that one has too much to do; those of an engine that dies go on with
another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import Any, Unpack

from ...runtime.config.engine import EngineConfig
from ...runtime.core.engine_info import EngineInfo
from ...runtime.core.messages import EngineStats, ProfileAnswer, StartProfile, StopProfile
from ...runtime.tokenizer.output_processor import RequestState
from ...runtime.tokenizer.tokenizer import Tokenizer
from .client import EngineClient
from .prefix_index import BLOCK, PrefixIndex, block_hashes
from .state import EngineState, EngineUnavailable, QueueFull
from .supervisor import SupervisorSettings

logger = logging.getLogger(__name__)

_LEAST_MATCH = 0.3
"""Share of a prompt that must be cached somewhere to decide where it goes; SGLang's router's
`cache_threshold`.
"""
_AHEAD, _TIMES = 8, 1.5
"""An engine has too much to do with so many requests, and so many times as many, as another one."""
_INDEX_TOKENS = 2**22
"""Most tokens that the prefixes of an engine are remembered of."""
_SERVES = (EngineState.READY, EngineState.DRAINING)
_GONE = (EngineState.FAILED, EngineState.STOPPED)
_ORDER = (
    EngineState.READY,
    EngineState.DRAINING,
    EngineState.UNRESPONSIVE,
    EngineState.STARTING,
    EngineState.RESTARTING,
    EngineState.STOPPED,
    EngineState.FAILED,
)
"""The first of these that any engine is in is the state of all."""


class Replica(EngineClient):
    """One of several. `ended`: told when its process has ended, and before its requests are."""

    ended: Callable[[Replica], None]

    def __init__(
        self, config: EngineConfig, tokenizer: Tokenizer, **settings: Unpack[SupervisorSettings]
    ) -> None:
        super().__init__(config, tokenizer, **settings)
        self.number = config.replica
        self.prefixes = PrefixIndex(_INDEX_TOKENS // BLOCK)

    def take(self, request: RequestState) -> None:
        """Whatever room there is: who asks has looked for it."""
        self._send(request.to_message())
        self._requests[request.rid] = request
        self._idle.clear()

    def go_on_with(self, request: RequestState) -> None:
        """One that another engine had; one that cannot be sent is over."""
        self._requests[request.rid] = request
        self._idle.clear()
        self._send_again(request.rid, request)

    def hand_over(self, *, suspects: bool) -> list[RequestState]:
        """What is unfinished, for another engine to go on with. Without `suspects` those stay that
        may have ended the process: the next one has them one at a time.
        """
        leaving = [each for each in self._requests.values() if suspects or each.delivered]
        for request in leaving:
            del self._requests[request.rid]
            request.delivered = False
        if not self._requests:
            self._idle.set()
        return leaving

    def _became_ready(self, info: Any) -> None:
        super()._became_ready(info)
        self.prefixes.bound(max(1, min(info.kv_tokens, _INDEX_TOKENS) // BLOCK))

    def _survive_crash(self, code: int) -> None:
        logger.error("of replica %d:", self.number)
        super()._survive_crash(code)
        self._nothing_is_held()
        self.ended(self)

    def _give_up(self, reason: str) -> None:
        self.state = EngineState.FAILED
        self.failure = reason
        try:
            self.ended(self)
        except Exception:
            logger.exception("requests of replica %d could not go elsewhere", self.number)
        super()._give_up(reason)
        self._nothing_is_held()

    def _nothing_is_held(self) -> None:
        self.stats = replace(
            self.stats,
            running_requests=0,
            queued_requests=0,
            kv_tokens_used=0,
            kv_tokens_cached=0,
            kv_tokens_touched=0,
            kv_tokens_total=0 if self.state is EngineState.FAILED else self.stats.kv_tokens_total,
            states_used=0,
            states_total=0 if self.state is EngineState.FAILED else self.stats.states_total,
        )


class Replicas:
    """The interface of an `EngineClient`, with `number` of them behind it.

    `max_queued_requests` and the KV cache's size are of all together. It is ready while one of them
    is; `failed` once all are given up, or one could never start for a reason that the user can
    mend.
    """

    def __init__(
        self,
        number: int,
        config: EngineConfig,
        tokenizer: Tokenizer,
        **settings: Unpack[SupervisorSettings],
    ) -> None:
        """`settings`: as `EngineSupervisor` takes them; a `process` is the first replica's."""
        self.tokenizer = tokenizer
        self.failed = asyncio.Event()
        self.replicas = [
            Replica(each, tokenizer, **(settings if each.replica == 0 else _others(settings)))
            for each in split_config(config, number)
        ]
        self._max_queued = settings.get("max_queued_requests", 512)
        for each in self.replicas:
            each.ended = self._ended

    # What they are together

    @property
    def state(self) -> EngineState:
        return min((each.state for each in self.replicas), key=_ORDER.index)

    @property
    def info(self) -> EngineInfo | None:
        """Of the first that has been ready: what one request can have, and how many run at once."""
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
        """Of the one that was not heard of for longest."""
        return max(each.silence for each in self._left) if self._left else 0.0

    @property
    def failure(self) -> str | None:
        reasons = {each.failure: None for each in self.replicas if each.failure is not None}
        return "; ".join(reasons) or None

    @property
    def user_error(self) -> bool:
        return any(each.user_error for each in self.replicas)

    @property
    def engine_pid(self) -> int | None:
        """Each of the replicas has one."""
        return None

    @property
    def num_unfinished(self) -> int:
        return sum(each.num_unfinished for each in self.replicas)

    @property
    def capacity(self) -> int:
        """Most requests that run and wait at once."""
        infos = [each.info for each in self._left if each.info is not None]
        return self._max_queued + sum(info.max_running_requests for info in infos)

    @property
    def _left(self) -> list[Replica]:
        """Those that serve, or will again."""
        return [each for each in self.replicas if each.state not in _GONE]

    # Their life

    async def start(self) -> None:
        """Returns at once; `wait_ready` waits until they serve."""
        self.failed.clear()
        for each in self.replicas:
            each.prefixes.clear()
            await each.start()

    async def wait_ready(self) -> bool:
        """True once all serve that can, False where none does."""
        failed = asyncio.create_task(self.failed.wait())
        ready = asyncio.gather(*[each.wait_ready() for each in self.replicas])
        either: list[asyncio.Future[Any]] = [ready, failed]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        for each in either:
            each.cancel()
        return not self.failed.is_set()

    async def drain(self, timeout: float) -> None:
        """As an `EngineClient`, all at once."""
        await asyncio.gather(*[each.drain(timeout) for each in self.replicas])

    async def stop(self, *, at_once: bool = False) -> None:
        await asyncio.gather(*[each.stop(at_once=at_once) for each in self.replicas])

    def _ended(self, replica: Replica) -> None:
        """The process of one has ended: its requests go on elsewhere, where that may be."""
        replica.prefixes.clear()
        is_lost = replica.state is EngineState.FAILED
        never_served = replica.user_error and replica.info is None
        if is_lost and (never_served or not self._left):
            self.failed.set()
            return
        ready = [each for each in self.replicas if each.state in _SERVES]
        if not ready and not is_lost:
            return
        moved = replica.hand_over(suspects=is_lost)
        for request in moved:
            self._choose(request.prompt_ids, ready or self._left).go_on_with(request)
        if moved:
            logger.warning("%d requests of replica %d go on elsewhere", len(moved), replica.number)
        if is_lost:
            logger.error(
                "replica %d is given up, %d of %d are left",
                replica.number,
                len(self._left),
                len(self.replicas),
            )

    # Requests

    def require_room(self, count: int) -> None:
        """Raises `QueueFull` and `EngineUnavailable` where `count` more requests are not taken
        now.
        """
        if self.failed.is_set() or not self._left:
            raise EngineUnavailable(self.failure or "the server is stopping")
        for each in self._left:
            each.require_open()
        if self.num_unfinished + count > self.capacity:
            raise QueueFull(f"{self.num_unfinished} requests are running or waiting already")

    def unfinished(self) -> Iterator[RequestState]:
        """Those of each replica, the oldest first."""
        return chain.from_iterable(each.unfinished() for each in self.replicas)

    def add_request(self, request: RequestState) -> None:
        """Raises `QueueFull` and `EngineUnavailable`."""
        self.require_room(1)
        ready = [each for each in self.replicas if each.state in _SERVES]
        self._choose(request.prompt_ids, ready or self._left).take(request)

    def drop(self, requests: Iterable[RequestState]) -> None:
        """Their consumer is gone: nobody waits for what is unfinished of them."""
        dropped = list(requests)
        for each in self.replicas:
            each.drop(dropped)

    async def abort(self, rid: str | None) -> int:
        """As an `EngineClient`, wherever they are."""
        return sum([await each.abort(rid) for each in self.replicas])

    async def flush_cache(self) -> int:
        """Drop cached prefixes that no request uses, everywhere; returns the tokens freed."""
        for each in self.replicas:
            each.prefixes.clear()
        ready = [each for each in self.replicas if each.state is EngineState.READY]
        if not ready:
            raise EngineUnavailable(f"the engine is {self.state}")
        answers = await asyncio.gather(
            *[each.flush_cache() for each in ready], return_exceptions=True
        )
        # The cache of one that has ended meanwhile is empty.
        return sum(answer for answer in answers if isinstance(answer, int))

    async def profile(self, message: StartProfile | StopProfile) -> list[ProfileAnswer]:
        """As an `EngineClient`, each that is ready; `error` where one refuses."""
        ready = [each for each in self.replicas if each.state is EngineState.READY]
        if not ready:
            raise EngineUnavailable(f"the engine is {self.state}")
        answers = await asyncio.gather(*[each.profile(message) for each in ready])
        return list(chain.from_iterable(answers))

    def _choose(self, prompt: list[int], among: Sequence[Replica]) -> Replica:
        """The one that has most of the prompt cached, where that is much of it and it has not far
        more to do than others; else that with the least to do, of equals that which knows the
        fewest prefixes.
        """
        blocks = block_hashes(prompt)
        matched = {each.number: each.prefixes.matched(blocks) for each in among}
        idlest = min(among, key=lambda each: (each.num_unfinished, len(each.prefixes)))
        best = min(among, key=lambda each: (-matched[each.number], each.num_unfinished))
        too_busy = best.num_unfinished > max(
            idlest.num_unfinished + _AHEAD, idlest.num_unfinished * _TIMES
        )
        is_cached = matched[best.number] * BLOCK >= max(1, _LEAST_MATCH * len(prompt))
        chosen = best if is_cached and not too_busy else idlest
        chosen.prefixes.add(blocks)
        return chosen


def split_config(config: EngineConfig, number: int) -> list[EngineConfig]:
    """What each replica is told: the size of the KV cache is of all together."""
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


def _sum(each: Sequence[EngineStats]) -> EngineStats:
    totals: dict[str, Any] = {}
    for item in fields(EngineStats):
        values = [getattr(stats, item.name) for stats in each]
        if isinstance(values[0], dict):
            totals[item.name] = dict(sum(map(Counter, values), Counter[str]()))
        else:
            totals[item.name] = sum(values)
    return EngineStats(**totals)
