"""A fleet whose engines say what a test scripts: everything else is real."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
from http_fixtures import client_of
from scripted_engine import INFO, ScriptedEngine
from toy_tokenizer import toy_tokenizer

from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.core.control_messages import Control, Controlled, Sleep, WakeUp
from piecework.server import fleet_service as fleet_service_module
from piecework.server.app import create_app
from piecework.server.config.fleet import FleetConfig, FleetLimits, MemberConfig
from piecework.server.config.server import ServerConfig
from piecework.server.engine.state import EngineState
from piecework.server.fleet import fleet as fleet_module
from piecework.server.fleet import member as member_module
from piecework.server.fleet.fleet import Fleet
from piecework.server.fleet.member import MemberState
from piecework.server.fleet_service import fleet_service
from piecework.server.serving.service import Service

GIB = 2**30
BODY = {"prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0}


class LoadableEngine(ScriptedEngine):
    """Starts in no time, or once `may_start` is set; fails to where `fault` says why."""

    def __init__(self, name: str) -> None:
        super().__init__(toy_tokenizer())
        self.name = name
        self.state = EngineState.STOPPED
        self.failed = asyncio.Event()
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.failure: str | None = None
        self.fault: str | None = None
        self.starts = self.stops = 0
        self.engine_pid: int | None = None

    async def start(self) -> None:
        self.state, self.failure = EngineState.STARTING, None
        self.failed.clear()
        self.starts += 1

    async def wait_ready(self) -> bool:
        await self.may_start.wait()
        self.failure = self.fault
        self.state = EngineState.READY if self.fault is None else EngineState.FAILED
        return self.fault is None

    async def control(self, message: Control) -> list[Controlled]:
        answers = await super().control(message)
        if self.control_error is None and isinstance(message, Sleep | WakeUp):
            self.asleep = isinstance(message, Sleep)
        return answers

    async def stop(self, *, at_once: bool = False) -> None:
        self.asleep = False
        assert not self.running, "an engine with requests under way was ended"
        self.state = EngineState.STOPPED
        self.stops += 1

    async def drain(self, timeout: float) -> None:
        self.state = EngineState.DRAINING

    def break_down(self, reason: str) -> None:
        """It was given up, as a supervisor does."""
        self.state, self.failure = EngineState.FAILED, reason
        self.failed.set()


class ScriptedFleet:
    """`engines` by name; `at_once`: how many models were loaded together at most."""

    def __init__(self, folder: Path, monkeypatch: Any) -> None:
        self._folder, self._monkeypatch = folder, monkeypatch
        self.engines: dict[str, LoadableEngine] = {}
        self.prepare: Callable[[LoadableEngine], None] = lambda engine: None
        monkeypatch.setattr(member_module, "spawn", _idle_process)
        monkeypatch.setattr(fleet_service_module, "service_of", self._service_of)
        monkeypatch.setattr(member_module, "resident_memory", lambda pids: GIB)
        monkeypatch.setattr(fleet_module, "resident_memory", lambda pids: GIB)

    def config(self, *names: str, **settings: Any) -> FleetConfig:
        """`settings`: of limits, of the server, and by a model's name those of its entry."""
        own = {name: settings.pop(name, {}) for name in names}
        limits = {
            name: settings.pop(name)
            for name in ("fleet_memory", "max_loaded_models", "idle_unload")
            if name in settings
        }
        members = tuple(
            MemberConfig(
                name=name,
                server=ServerConfig(
                    engine=EngineConfig(
                        model_path=str(self._folder), lora_modules=own[name].pop("adapters", "")
                    ),
                    served_model_name=name,
                ),
                **own[name],
            )
            for name in names
        )
        shared = {"batch_dir": str(self._folder / "batches"), "responses_store": "memory"}
        return FleetConfig(
            members=members,
            served_model_name="fleet",
            limits=FleetLimits(**limits),
            **{**shared, **settings},
        )

    def service(self, *names: str, **settings: Any) -> Service:
        """Each model takes a GiB."""
        service = fleet_service(self.config(*names, **settings))
        fleet: Fleet = service.engine  # type: ignore[assignment]
        self.fleet = fleet
        for member in fleet.members.values():
            member.size = GIB
        return service

    def _service_of(self, config: ServerConfig, process: Any) -> Callable[[], Service]:
        process.kill()
        process.communicate()

        def make() -> Service:
            name = config.served_model_name
            engine = self.engines[name] = LoadableEngine(name)
            engine.info = INFO
            self.prepare(engine)
            return Service(engine, create_app(engine, config), lambda *_: "")  # type: ignore[arg-type]

        return make


def _idle_process(command: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["true"], stdin=subprocess.PIPE)


@contextlib.asynccontextmanager
async def served(
    scripted: ScriptedFleet, *names: str, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    service = scripted.service(*names, **settings)
    await service.engine.start()
    await service.engine.wait_ready()
    try:
        async with client_of(service.app) as client:
            yield client
    finally:
        await service.engine.stop()


async def ask(client: httpx.AsyncClient, model: str | None, **more: Any) -> httpx.Response:
    named = {} if model is None else {"model": model}
    return await client.post("/v1/completions", json={**BODY, **named, **more})


async def contend(
    scripted: ScriptedFleet, client: httpx.AsyncClient
) -> tuple[LoadableEngine, asyncio.Task[httpx.Response], asyncio.Task[httpx.Response]]:
    """Room for one model: `a` is held busy by a request, and is to give way to one for `b`. Returns
    the engine of `a`, and both.
    """
    await ask(client, "a")
    engine = scripted.engines["a"]
    engine.script.held = True
    first = asyncio.create_task(ask(client, "a"))
    await until(lambda: bool(engine.running))
    other = asyncio.create_task(ask(client, "b"))
    await until(lambda: not scripted.fleet.members["a"].admits)
    return engine, first, other


async def until_state(scripted: ScriptedFleet, model: str, state: MemberState) -> None:
    """Wait for what the fleet reports. An engine sleeps or stops before its member says so."""
    await until(lambda: scripted.fleet.members[model].state is state)


async def states(client: httpx.AsyncClient) -> dict[str, str]:
    listed = (await client.get("/v1/models")).json()["data"]
    return {each["id"]: each["status"]["value"] for each in listed}


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("this did not happen in time")
