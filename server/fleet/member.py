"""One model of a fleet: its state, its service and its memory."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any, cast

from ...runtime.config.engine import EngineConfig
from ...runtime.core.control_messages import Sleep, WakeUp
from ...runtime.process.memory import resident_memory
from ..config.fleet import MemberConfig
from ..engine.interface import TextEngine
from ..engine.spawn import spawn
from ..engine.state import EngineUnavailable
from ..observability.metrics import Latency
from ..serving.service import Service

logger = logging.getLogger(__name__)

MakesService = Callable[[Any, subprocess.Popen[bytes]], Callable[[], Service]]
# Takes the settings of a model's server and a process of its engine that waits for its job. Returns
# a function that makes the service in the event loop. Raises `ValueError`.

# Seconds for which requests are refused after a failed load. The next request tries again.
RETRY_SECONDS = 30.0
_LEAST_SLEEP = 1.0  # Seconds of `keep_alive` from which on an idle model sleeps.
# Seconds in which a model falls asleep or wakes, or those of its start if they are more: both take
# less time than a start.
_CHANGE_SECONDS = 60.0
# Histogram bounds in seconds.
_LOAD = (0.25, 0.5, 1, 2, 3, 4, 6, 8, 10, 15, 20, 30, 45, 60, 120, 300, 600)


class MemberState(StrEnum):
    """The state of a model, as in `/v1/models`."""

    UNLOADED = "unloaded"
    QUEUED = "queued"  # It is loaded as soon as there is room.
    LOADING = "loading"
    READY = "ready"
    SLEEPING = "sleeping"  # Its process has no weights, and gets them back faster than at a start.
    UNLOADING = "unloading"
    FAILED = "failed"


class Closing(StrEnum):
    """Why a model refuses new requests and is unloaded once it has none."""

    ROOM = "room"
    MEMORY = "memory"
    ASKED = "asked"
    IDLE = "idle"


class Member:
    """A model and its service.

    The service is made at the first load and stays when the model is unloaded, so its counters and
    the files it keeps for clients stay.

    Attributes:
        retry_at: Time of `time.monotonic` from which a failed model may be loaded again.
        closing: Why the model is about to be unloaded, or None.
        under_way: Requests that entered and have not left.
        resident: Bytes of its processes in memory at the last check.
        size: Maximum bytes that it takes or will take. During the first load this is at least
            `estimate`, because the model may still grow.
    """

    def __init__(
        self,
        config: MemberConfig,
        estimate: int,
        adopt: Callable[[Service], None],
        service_of: MakesService,
        changed: Callable[[], None],
    ) -> None:
        """Create an unloaded model of `estimate` bytes.

        `adopt` is called with the new service. `changed` is called when requests that wait may
        continue or must be refused.
        """
        self.config, self.name = config, config.name
        self.state = MemberState.UNLOADED
        self.service: Service | None = None
        self.failure: str | None = None
        self.retry_at = 0.0
        self.closing: Closing | None = None
        self.under_way = 0
        self.last_used = 0.0
        self.keep_alive: float | None = None
        self.resident = 0
        self.size = estimate
        self._needed = 0  # Bytes that the model was measured to need since its first load.
        self.load_seconds = Latency(
            "model_load_seconds", "From the beginning of a model's load to its end.", _LOAD
        )
        self.unloads: dict[Closing, int] = dict.fromkeys(Closing, 0)
        self.failures = 0
        self._sleeps = False
        self._start_seconds = 0.0  # Time that the last start took.
        self._adopt, self._changed, self._service_of = adopt, changed, service_of
        self._watch: asyncio.Task[None] | None = None

    def idle_limit(self, configured: float) -> float:
        """Return the seconds without a request after which the model is unloaded; 0: never.

        `keep_alive` of the last request of Ollama's API replaces the configured time.
        """
        return configured if self.keep_alive is None else self.keep_alive

    def due(self, configured: float) -> Closing | None:
        """Return why the idle model is to be unloaded now, or None. See `idle_limit`."""
        if self.state is MemberState.SLEEPING:
            # A process that has replaced a crashed one is awake.
            return None if self._text_engine.asleep else Closing.MEMORY
        seconds = self.idle_limit(configured)
        if not seconds or time.monotonic() < self.last_used + seconds:
            return None
        # A client that keeps a model for no time wants its memory back.
        return Closing.IDLE if seconds >= _LEAST_SLEEP or self.keep_alive is None else Closing.ASKED

    @property
    def may_load(self) -> bool:
        return self.state in (MemberState.UNLOADED, MemberState.SLEEPING)

    @property
    def may_unload(self) -> bool:
        return self.state in (MemberState.READY, MemberState.SLEEPING)

    @property
    def takes(self) -> int:
        """Bytes that count against the limit of all models."""
        return self.resident if self.state is MemberState.SLEEPING else self.size

    @property
    def admits(self) -> bool:
        """Whether a request may enter now."""
        return self.state is MemberState.READY and self.closing is None

    @property
    def adapters(self) -> dict[str, str]:
        """The paths of its adapters (LoRA) by name: those loaded, or else those configured."""
        if self.service is not None and self.service.engine.info is not None:
            return {name: each.path for name, each in self.service.engine.adapters.items()}
        engine = self.config.server.engine
        return engine.lora_modules_by_name() if isinstance(engine, EngineConfig) else {}

    @property
    def _text_engine(self) -> TextEngine:
        assert self.service is not None
        return cast(TextEngine, self.service.engine)

    @property
    def is_idle(self) -> bool:
        """Whether the model has no request and its engine computes nothing."""
        return self.under_way == 0 and (
            self.service is None or self.service.engine.num_unfinished == 0
        )

    @property
    def holds_memory(self) -> bool:
        return self.may_unload or self.state in (MemberState.LOADING, MemberState.UNLOADING)

    @property
    def ends(self) -> int:
        """How often the model was unloaded or failed."""
        return self.failures + sum(self.unloads.values())

    @property
    def engine_pids(self) -> list[int]:
        if self.service is None:
            return []
        engine = self.service.engine
        return [each.engine_pid for each in engine.replicas or [engine] if each.engine_pid]

    async def load(self) -> None:
        """Load the model, or wake it. Return when it is ready or has failed."""
        began = time.monotonic()
        self.state, self.failure = MemberState.LOADING, None
        logger.info("loading model %s", self.name)
        try:
            if self.service is None:
                self.service = await self._make()
            elif (media := self.service.media) is not None and media.failure is not None:
                media.start()
            engine = self.service.engine
            if not await self._wake():
                await engine.start()
                if not await engine.wait_ready():
                    raise ValueError(engine.failure)
                self._start_seconds = time.monotonic() - began
            self.resident = await asyncio.to_thread(resident_memory, self.engine_pids)
            engines = max(1, len(engine.replicas))
            weights = engines * engine.info.weight_bytes
            # The KV cache becomes resident only when it is used.
            kv_bytes = engines * getattr(engine.info, "kv_bytes", 0)
            self._needed = max(self.resident, weights) + kv_bytes
            self.size = max(self.size, self._needed)
        except (ValueError, OSError) as error:
            await self._fail(str(error))
        except Exception as error:
            logger.exception("model %s cannot be loaded", self.name)
            await self._fail(f"{type(error).__name__}; the server's log has the details")
        else:
            self.state, self.last_used = MemberState.READY, time.monotonic()
            self.load_seconds.observe(self.last_used - began)
            self._watch = self._watch or asyncio.create_task(self._until_it_fails())
        self._changed()

    async def unload(self) -> None:
        """Unload the model. Return when its memory is free.

        An idle model sleeps, if it can. Otherwise its process ends.
        """
        self.state = MemberState.UNLOADING
        reason = self.closing or Closing.ASKED
        logger.info("unloading model %s (%s)", self.name, reason)
        try:
            sleeps = reason is Closing.IDLE and await self._sleep()
        except Exception:
            # Without this, the member would stay in state UNLOADING, and its requests would hang.
            logger.exception("model %s cannot be put to sleep", self.name)
            sleeps = False
        if not sleeps:
            await self._stop()
        self.unloads[reason] += 1
        self.size = self._needed
        self.state = MemberState.SLEEPING if self._sleeps else MemberState.UNLOADED
        self.closing = None
        self._changed()

    async def _sleep(self) -> bool:
        """Let the engine sleep. Return False if it cannot."""
        if not isinstance(self.config.server.engine, EngineConfig):
            return False
        async with asyncio.timeout(self._change_seconds):
            self._sleeps = await self._control(Sleep(level=1))
        if self._sleeps:
            self.resident = await asyncio.to_thread(resident_memory, self.engine_pids)
        return self._sleeps

    async def _wake(self) -> bool:
        """Wake a sleeping engine. If it does not sleep, or cannot be woken, end it and return
        False. Raise `ValueError` if it gives no answer.
        """
        if not self._sleeps:
            return False
        self._sleeps = False
        try:
            async with asyncio.timeout(self._change_seconds):
                if self._text_engine.asleep and await self._control(WakeUp()):
                    return True
        except TimeoutError:
            raise ValueError(
                f"it did not wake within {self._change_seconds:.0f} s, so its process was ended; "
                "the next try starts another one"
            ) from None
        await self._stop(at_once=True)
        return False

    @property
    def _change_seconds(self) -> float:
        return max(_CHANGE_SECONDS, self._start_seconds)

    async def _control(self, message: Sleep | WakeUp) -> bool:
        """Return whether all engines of the model have done it."""
        try:
            answers = await self._text_engine.control(message)
        except EngineUnavailable as error:
            errors = [str(error)]
        except Exception:
            logger.exception("the engine of model %s gave no answer", self.name)
            return False
        else:
            errors = [answer.error for answer in answers if answer.error is not None]
        for reason in errors:
            logger.info("model %s is not kept asleep: %s", self.name, reason)
        return not errors

    def update_memory(self, resident: int) -> None:
        """Set the bytes that the model's processes have in memory now."""
        self.resident = resident if self.holds_memory else 0
        if self.state is MemberState.READY:
            self._needed = max(self._needed, resident)
            self.size = max(self.size, self._needed)

    async def _make(self) -> Service:
        """Make the service. The engine process imports its modules meanwhile."""
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
        service = self.service
        await service.until_failed()
        if self.may_unload:
            self._watch = None
            await self._fail(str(service.failure))
            self._changed()

    async def _fail(self, reason: str) -> None:
        self.failure = " ".join(reason.split())
        logger.error("model %s failed: %s", self.name, self.failure)
        is_loading = self.state is MemberState.LOADING
        # While the engines end, no request may enter and nothing else may end the model.
        self.state = MemberState.UNLOADING
        await self._stop(at_once=is_loading)
        self.state, self.closing = MemberState.FAILED, None
        self.failures += 1
        self.retry_at = time.monotonic() + RETRY_SECONDS

    async def _stop(self, *, at_once: bool = False) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        self._sleeps = False
        if self.service is not None:
            try:
                await self.service.engine.stop(at_once=at_once)
                await self.service.close()
            except Exception:
                # Without this, the member would stay in state UNLOADING, and requests that wait
                # for its memory would hang.
                logger.exception("the engine of model %s could not be stopped", self.name)
        self.resident = 0
