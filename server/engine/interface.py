"""What endpoints and metrics use of an engine, whether one process or several stand behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from ...runtime.core.engine_info import EngineInfo
from ...runtime.core.messages import EngineStats, ProfileAnswer, StartProfile, StopProfile
from ...runtime.tokenizer.output_processor import RequestState
from ...runtime.tokenizer.tokenizer import Tokenizer
from .state import EngineState


class Engine(Protocol):
    """An engine of any kind, as the server's start and end, health, metrics and batches see it."""

    failed: asyncio.Event
    """Set when it is given up; `failure` then says why."""

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
    def replicas(self) -> Sequence[Engine]:
        """The engines behind it where there are several."""
        ...

    def unfinished(self) -> Iterator[Any]:
        """The requests that it has and has not finished."""
        ...

    def require_room(self, count: int) -> None: ...

    async def start(self) -> None: ...

    async def wait_ready(self) -> bool: ...

    async def drain(self, timeout: float) -> None: ...

    async def stop(self, *, at_once: bool = False) -> None: ...


class TextEngine(Engine, Protocol):
    """The engine of a language model: `EngineClient`, or several as `Replicas`."""

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

    async def profile(self, message: StartProfile | StopProfile) -> list[ProfileAnswer]: ...
