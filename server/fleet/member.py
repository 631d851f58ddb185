"""One model of a fleet: where it stands, its service, and the memory that it takes."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from ...runtime.process.memory import resident_memory
from ..engine.spawn import spawn
from ..observability.metrics import Latency
from ..serving.service import Service
from .config import MemberConfig

logger = logging.getLogger(__name__)

MakesService = Callable[[Any, subprocess.Popen[bytes]], Callable[[], Service]]
# Takes the settings of a model's server and a process of its engine that waits for its job. Returns
# a function that makes the service in the event loop. Raises `ValueError`.

RETRY_SECONDS = 30.0
"""For so long the requests of a model that could not be loaded are refused, before one tries."""
_LOAD = (0.25, 0.5, 1, 2, 3, 4, 6, 8, 10, 15, 20, 30, 45, 60, 120, 300, 600)
"""Histogram bounds in seconds."""


class MemberState(StrEnum):
    """Where a model stands, as `/v1/models` tells it."""

    UNLOADED = "unloaded"
    QUEUED = "queued"
    """It is to be loaded, as soon as there is room."""
    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"
    FAILED = "failed"


class Closing(StrEnum):
    """Why a model takes no new request, and is unloaded once it has none."""

    ROOM = "room"
    MEMORY = "memory"
    ASKED = "asked"
    IDLE = "idle"


class Member:
    """A model and, from its first load on, its service, which outlives the engine's processes: what
    it has counted, and what it keeps for clients, stays.

    `estimate`: bytes that it is taken to need before it was ever loaded. `adopt`: called with the
    service when it is made; `changed`: whenever requests that wait may go on, or must not.
    """

    def __init__(
        self,
        config: MemberConfig,
        estimate: int,
        adopt: Callable[[Service], None],
        service_of: MakesService,
        changed: Callable[[], None],
    ) -> None:
        self.config, self.name = config, config.name
        self.state = MemberState.UNLOADED
        self.service: Service | None = None
        self.failure: str | None = None
        self.retry_at = 0.0
        """On the clock of `time.monotonic`."""
        self.closing: Closing | None = None
        self.under_way = 0
        """Requests that were let in and have not ended."""
        self.last_used = 0.0
        self.resident = 0
        """Bytes that its processes have in memory, when it was last looked at."""
        self.size = estimate
        """Bytes that it takes, or will take, at most. While it is loaded for the first time the
        estimate holds where it is larger: it may yet grow.
        """
        self._needed = 0
        """What its last life is known to have needed."""
        self.load_seconds = Latency(
            "model_load_seconds", "From the beginning of a model's load to its end.", _LOAD
        )
        self.unloads: dict[Closing, int] = dict.fromkeys(Closing, 0)
        self.failures = 0
        self._adopt, self._changed, self._service_of = adopt, changed, service_of
        self._watch: asyncio.Task[None] | None = None

    @property
    def admits(self) -> bool:
        """A request may go to its service now."""
        return self.state is MemberState.READY and self.closing is None

    @property
    def is_idle(self) -> bool:
        """It has no request, nor anything that goes on without one."""
        return self.under_way == 0 and (
            self.service is None or self.service.engine.num_unfinished == 0
        )

    @property
    def holds_memory(self) -> bool:
        return self.state in (MemberState.LOADING, MemberState.READY, MemberState.UNLOADING)

    @property
    def ends(self) -> int:
        """How often it was unloaded, or failed."""
        return self.failures + sum(self.unloads.values())

    @property
    def engine_pids(self) -> list[int]:
        if self.service is None:
            return []
        engine = self.service.engine
        return [each.engine_pid for each in engine.replicas or [engine] if each.engine_pid]

    async def load(self) -> None:
        """Until it is ready, or has failed."""
        began = time.monotonic()
        self.state, self.failure = MemberState.LOADING, None
        logger.info("loading model %s", self.name)
        try:
            if self.service is None:
                self.service = await self._make()
            engine = self.service.engine
            await engine.start()
            if not await engine.wait_ready():
                raise ValueError(engine.failure)
            self._measure(await asyncio.to_thread(resident_memory, self.engine_pids))
        except (ValueError, OSError) as error:
            await self._fail(str(error))
        except Exception as error:
            logger.exception("model %s cannot be loaded", self.name)
            await self._fail(f"{type(error).__name__}; the server's log has the details")
        else:
            self.state, self.last_used = MemberState.READY, time.monotonic()
            self.load_seconds.observe(self.last_used - began)
            self._watch = asyncio.create_task(self._until_it_fails())
        self._changed()

    async def unload(self) -> None:
        """Until its memory is free."""
        self.state = MemberState.UNLOADING
        reason = self.closing or Closing.ASKED
        logger.info("unloading model %s (%s)", self.name, reason)
        await self._stop()
        self.unloads[reason] += 1
        self.size = self._needed
        self.state, self.closing = MemberState.UNLOADED, None
        self._changed()

    def look(self, resident: int) -> None:
        """Its processes have so many bytes in memory now."""
        self.resident = resident if self.holds_memory else 0
        if self.state is MemberState.READY:
            self._needed = max(self._needed, resident)
            self.size = max(self.size, self._needed)

    def _measure(self, resident: int) -> None:
        """It is ready: what is set aside for keys and values gets into memory as it is used."""
        assert self.service is not None
        info = self.service.engine.info
        self.resident = resident
        copies = max(1, len(self.service.engine.replicas))
        held = copies * info.weight_bytes
        self._needed = max(resident, held) + copies * getattr(info, "kv_bytes", 0)
        self.size = max(self.size, self._needed)

    async def _make(self) -> Service:
        """The process imports what an engine needs while its tokenizer is read."""
        process = spawn(self.config.server.engine_command)
        try:
            service = (await asyncio.to_thread(self._service_of, self.config.server, process))()
            self._adopt(service)
            return service
        except BaseException:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
            raise

    async def _until_it_fails(self) -> None:
        assert self.service is not None
        engine = self.service.engine
        await engine.failed.wait()
        if self.state is MemberState.READY:
            self._watch = None
            await self._fail(engine.failure or "its engine is gone")
            self._changed()

    async def _fail(self, reason: str) -> None:
        self.failure = " ".join(reason.split())
        logger.error("model %s failed: %s", self.name, self.failure)
        is_loading = self.state is MemberState.LOADING
        # Several engines take a while to end: meanwhile nobody is let in, and nobody else ends it.
        self.state = MemberState.UNLOADING
        await self._stop(at_once=is_loading)
        self.state, self.closing = MemberState.FAILED, None
        self.failures += 1
        self.retry_at = time.monotonic() + RETRY_SECONDS

    async def _stop(self, *, at_once: bool = False) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self.service is not None:
            try:
                await self.service.engine.stop(at_once=at_once)
            except Exception:
                # It would be ending for ever, and who waits for its room would wait with it.
                logger.exception("the engine of model %s did not end in order", self.name)
        self.resident = 0
