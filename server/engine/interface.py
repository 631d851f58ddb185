"""The interface of engines for endpoints and metrics, with one process or several."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from ...runtime.core.adapter_info import AdapterInfo
from ...runtime.core.control_messages import Control, Controlled
from ...runtime.core.engine_info import EngineInfo
from ...runtime.core.messages import (
    AdapterAnswer,
    EngineStats,
    ProfileAnswer,
    StartProfile,
    StopProfile,
)
from ...runtime.tokenizer.output_processor import RequestState
from ...runtime.tokenizer.tokenizer import Tokenizer
from .state import EngineState, EngineUnavailable, Progress


class Engine(Protocol):
    """An engine of any kind, for the server's start and end, health, metrics and batches."""

    adapters: dict[str, AdapterInfo]  # The adapters (LoRA) that requests may name.
    failed: asyncio.Event  # Set when the engine is not restarted. `failure` has the reason.

    @property
    def state(self) -> EngineState: ...

    @property
    def info(self) -> Any: ...

    @property
    def stats(self) -> Any: ...

    @property
    def restarts(self) -> int: ...

    @property
    def hangs(self) -> int: ...

    @property
    def silence(self) -> float: ...

    @property
    def failure(self) -> str | None: ...

    @property
    def user_error(self) -> bool: ...

    @property
    def engine_pid(self) -> int | None: ...

    @property
    def num_unfinished(self) -> int: ...

    @property
    def capacity(self) -> int: ...

    @property
    def progress(self) -> Progress | None:
        """What the engine does before it serves at full speed, or None if it does."""
        ...

    @property
    def replicas(self) -> Sequence[Engine]:
        """The engines of a group, or empty for a single engine."""
        ...

    def unfinished(self) -> Iterator[Any]:
        """The unfinished requests of the engine."""
        ...

    def require_room(self, count: int) -> None: ...

    async def start(self) -> None: ...

    async def wait_ready(self) -> bool: ...

    async def drain(self, timeout: float) -> None: ...

    async def stop(self, *, at_once: bool = False) -> None: ...


class TextEngine(Engine, Protocol):
    """The engine of a language model: an `EngineClient`, or `Replicas`."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def info(self) -> EngineInfo | None: ...

    @property
    def stats(self) -> EngineStats: ...

    def add_request(self, request: RequestState) -> None: ...

    def drop(self, requests: Iterable[RequestState]) -> None: ...

    async def abort(self, rid: str | None) -> int: ...

    async def flush_cache(self) -> int: ...

    async def load_adapter(self, name: str, path: str) -> AdapterAnswer: ...

    async def unload_adapter(self, identity: str) -> AdapterAnswer: ...

    async def list_adapters(self) -> list[AdapterInfo]: ...
    @property
    def asleep(self) -> bool: ...

    async def control(self, message: Control) -> list[Controlled]: ...

    async def profile(self, message: StartProfile | StopProfile) -> list[ProfileAnswer]: ...


def unavailable(engine: Engine) -> EngineUnavailable:
    """Return the error for a request that an engine cannot serve in its state."""
    progress = engine.progress
    doing = "" if progress is None else f" ({progress.phase})"
    return EngineUnavailable(f"the engine is {engine.state}{doing}", progress)
