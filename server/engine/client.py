"""The client of a language model's engine: sends requests, and delivers their outputs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, Unpack

from ...runtime.config.engine import EngineConfig
from ...runtime.core.adapter_info import AdapterInfo
from ...runtime.core.control_messages import Control, Controlled, Sleep, UpdateWeights, WakeUp
from ...runtime.core.engine_info import EngineInfo
from ...runtime.core.messages import (
    AdapterAnswer,
    AdapterList,
    CacheFlushed,
    EngineChanged,
    EngineReady,
    EngineStats,
    FlushCache,
    ListAdapters,
    LoadAdapter,
    ProfileAnswer,
    StartProfile,
    StepOutput,
    StopProfile,
    ToEngine,
    UnloadAdapter,
)
from ...runtime.tokenizer.output_processor import RequestState, process_outputs
from ...runtime.tokenizer.tokenizer import Tokenizer
from .settings import SupervisorSettings
from .spawn import LANGUAGE_MODEL
from .state import EngineState, EngineUnavailable, Progress
from .supervisor import LEAST_RETRY, EngineSupervisor

T = TypeVar("T")


class EngineClient(EngineSupervisor[RequestState]):
    """A supervised engine process of a language model.

    `deliver` of a request is called with each output. The last output has a finish reason.

    Attributes:
        asleep: Whether the engine has freed its memory, and computes nothing until it is woken.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        *,
        command: Sequence[str] = LANGUAGE_MODEL,
        refuses_asleep: bool = False,
        **settings: Unpack[SupervisorSettings],
    ) -> None:
        """Create a client. `settings` are the keyword arguments of `EngineSupervisor`.

        `refuses_asleep` says that requests are refused while the engine sleeps, instead of waiting.
        """
        super().__init__(command, config, **settings)
        self.info: EngineInfo | None = None
        self.stats = EngineStats()
        self.tokenizer = tokenizer
        self._flushes: deque[asyncio.Future[int]] = deque()
        self._profiles: deque[asyncio.Future[ProfileAnswer]] = deque()
        self._adapter_answers: deque[asyncio.Future[AdapterAnswer]] = deque()
        self._adapter_lists: deque[asyncio.Future[list[AdapterInfo]]] = deque()
        # Adapters that were loaded while the engine ran, until their last request has ended. The
        # next process loads them again. `_unloaded` are those that no new request may use.
        self._adapters: dict[str, AdapterInfo] = {}
        self._unloaded: set[str] = set()
        # The replicas that have the same adapters.
        self._sharing: list[EngineClient] = [self]
        # The identity of each adapter of `--lora-modules` by its name, as the last process read it.
        self._modules: dict[str, str] = {}
        self._unasked = 0  # Answers to messages that `_resume` sent.
        self._controls: deque[asyncio.Future[Controlled]] = deque()
        self.asleep = False
        self._refuses_asleep = refuses_asleep

    def require_open(self) -> None:
        super().require_open()
        if self.asleep and self._refuses_asleep:
            raise EngineUnavailable("the engine sleeps", Progress("sleeping", LEAST_RETRY))

    async def control(self, message: Control) -> list[Controlled]:
        """Stop the engine, continue, or change its weights. Return the answer of each engine.

        Raise `EngineUnavailable` while another process compiles kernels. That process would take
        over with the old weights, and would compute.
        """
        if self._successor is not None and self._successor.doing is not None:
            raise EngineUnavailable(
                "another process compiles kernels, and takes over soon", self.progress
            )
        answer = await self._ask(message, self._controls)
        if answer.error is None:
            if isinstance(message, Sleep | WakeUp):
                self.asleep = isinstance(message, Sleep)
            elif isinstance(message, UpdateWeights):
                # A process that replaces this one after a crash loads the same weights.
                self._config = replace(self._config, model_path=message.model_path)
        return [answer]

    async def flush_cache(self) -> int:
        """Drop cached prefixes that no request uses. Return the number of tokens freed."""
        return await self._ask(FlushCache(), self._flushes)

    async def profile(self, message: StartProfile | StopProfile) -> list[ProfileAnswer]:
        """Start or stop a profile. Return the answer of each engine."""
        return [await self._ask(message, self._profiles)]

    async def load_adapter(self, name: str, path: str) -> AdapterAnswer:
        """Load an adapter (LoRA). Requests go on meanwhile."""
        answer = await self._ask(LoadAdapter(name=name, path=path), self._adapter_answers)
        if answer.adapter is not None:
            self.adapters[name] = answer.adapter
            self._adapters[answer.adapter.identity] = answer.adapter
            self._unloaded.discard(answer.adapter.identity)
        return answer

    async def unload_adapter(self, identity: str) -> AdapterAnswer:
        """Drop an adapter when its requests have ended. No name may mean it any more."""
        self._unloaded.add(identity)
        answer = await self._ask(UnloadAdapter(identity=identity), self._adapter_answers)
        self._forget_unloaded()
        return answer

    def share_adapters(self, other: EngineClient) -> None:
        """Have the adapters of another replica, which are loaded here too after a restart."""
        self._sharing = other._sharing
        self._sharing.append(self)
        self.adapters, self._modules = other.adapters, other._modules
        self._adapters, self._unloaded = other._adapters, other._unloaded

    def _name_modules(self, found: Iterable[AdapterInfo]) -> None:
        """Name the adapters of `--lora-modules`, except names that were unloaded or replaced."""
        for adapter in found:
            known = self.adapters.get(adapter.name)
            if (known and known.identity) == self._modules.get(adapter.name):
                self.adapters[adapter.name] = adapter
            self._modules[adapter.name] = adapter.identity

    async def list_adapters(self) -> list[AdapterInfo]:
        """Return the adapters that the engine has."""
        return await self._ask(ListAdapters(), self._adapter_lists)

    def _forget_unloaded(self) -> None:
        """Forget unloaded adapters that no unfinished request of any replica uses."""
        used = {request.adapter for each in self._sharing for request in each._requests.values()}
        for identity in self._unloaded - used:
            self._adapters.pop(identity, None)
        self._unloaded &= used

    def _resume(self, crashed: bool) -> None:
        """Load the same adapters again, then send the unfinished requests."""
        self._forget_unloaded()
        again = [
            LoadAdapter(name=info.name, path=info.path, identity=identity)
            for identity, info in self._adapters.items()
        ]
        unloads = [UnloadAdapter(identity=identity) for identity in sorted(self._unloaded)]
        self._unasked = len(again) + len(unloads)
        for message in again:
            self._send(message)
        super()._resume(crashed)
        for unload in unloads:
            self._send(unload)

    async def _ask(self, message: ToEngine, waiting: deque[asyncio.Future[T]]) -> T:
        """Send a message and return its answer. The engine answers in the order of the messages."""
        if self.state is not EngineState.READY:
            raise EngineUnavailable(f"the engine is {self.state}")
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        waiting.append(answer)
        self._send(message)
        return await answer

    def _handle(self, message: Any) -> None:
        match message:
            case StepOutput(outputs=outputs, stats=stats, started=started):
                self.stats = stats or self.stats
                for rid, moment in started.items():
                    # If a request was resumed after a crash, its first start counts.
                    if (request := self._requests.get(rid)) and request.started is None:
                        request.started = moment
                self._after_step(outputs, *process_outputs(self._requests, outputs))
            case EngineReady(info=info):
                self._name_modules(info.adapters or ())
                self._became_ready(info)
                if info.awaits_kernels:
                    self._start_successor()
            case EngineChanged(info=info):
                self.info = info
            case CacheFlushed(freed_tokens=freed):
                _resolve_first(self._flushes, freed)
            case Controlled():
                _resolve_first(self._controls, message)
            case ProfileAnswer():
                _resolve_first(self._profiles, message)
            case AdapterAnswer() if self._unasked:
                self._unasked -= 1
            case AdapterAnswer():
                _resolve_first(self._adapter_answers, message)
            case AdapterList(adapters=adapters):
                _resolve_first(self._adapter_lists, adapters)
            case _:
                super()._handle(message)

    def _interrupted(self, reason: str) -> None:
        self.asleep = False  # A new process is awake.
        of_adapters = self._adapter_answers, self._adapter_lists
        for waiting in (self._flushes, self._profiles, self._controls, *of_adapters):
            while waiting:
                answer: asyncio.Future[Any] = waiting.popleft()
                if not answer.done():
                    answer.set_exception(EngineUnavailable(reason))


def _resolve_first(waiting: deque[asyncio.Future[T]], answer: T) -> None:
    """Set the result of the oldest future, unless its caller is gone.

    `waiting` may be empty: an engine that is being stopped still answers earlier messages.
    """
    if waiting and not (first := waiting.popleft()).done():
        first.set_result(answer)
