"""Requests in random order to a server of several models: what is answered, how long those wait
whose model is not loaded, and how much memory all models take.

    python -m piecework.lab.fleet --config models.yaml --num-requests 300
    python -m piecework.lab.fleet --config models.yaml --wake 5 -- --idle-unload 0.5

The second command compares how long models take to start and to wake.

The server is started on a free port of loopback, with further flags behind `--`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import psutil

_START_SECONDS = 120.0
_ANSWER_SECONDS = 600.0
_LOOK_SECONDS = 0.2
_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "The weather is", "max_tokens": 8, "temperature": 0},
    "/v1/embeddings": {"input": "The weather is fine."},
    "/v1/images/generations": {"prompt": "a fox", "size": "64x64", "num_inference_steps": 1},
}
"""What a model is asked, by the first of these paths that it takes."""


@dataclass
class Load:
    """Requests that were sent: latencies in seconds, of those whose model was ready and of those
    that waited for it, by model.
    """

    ready: dict[str, list[float]] = field(default_factory=dict)
    waited: dict[str, list[float]] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    most_memory: int = 0
    """Bytes of the engines' processes, as the machine counts them."""
    most_loaded: int = 0


async def ask_all(url: str, server: psutil.Process, count: int, at_once: int, seed: int) -> Load:
    """`count` requests to models of a server, drawn by `seed`, `at_once` under way."""
    load, turn = Load(), asyncio.Semaphore(at_once)
    timeout = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
    async with aiohttp.ClientSession(url, timeout=timeout) as session:
        names = [each["id"] for each in (await _get(session, "/v1/models"))["data"]]
        paths = {name: await _path_of(session, name) for name in names}
        draw = random.Random(seed)
        watch = asyncio.create_task(_watch(session, server, load))

        async def ask(name: str) -> None:
            async with turn:
                began = time.perf_counter()
                body = {"model": name, **_BODIES[paths[name]]}
                async with session.post(paths[name], json=body) as answer:
                    text = await answer.text()
                if answer.status != 200:
                    load.failures[f"{answer.status} {text[:200]}"] += 1
                    return
                kind = load.waited if "X-Queue-Place" in answer.headers else load.ready
                kind.setdefault(name, []).append(time.perf_counter() - began)

        try:
            await asyncio.gather(*[ask(draw.choice(names)) for _ in range(count)])
        finally:
            watch.cancel()
    return load


async def _get(session: aiohttp.ClientSession, path: str) -> Any:
    async with session.get(path) as answer:
        return await answer.json()


async def _path_of(session: aiohttp.ClientSession, name: str) -> str:
    """The first path that a model takes: others are refused before it is loaded."""
    for path, body in _BODIES.items():
        async with session.post(path, json={"model": name, **body}) as answer:
            if answer.status != 404:
                return path
    raise ValueError(f"the model {name} takes none of {', '.join(_BODIES)}")


async def _watch(session: aiohttp.ClientSession, server: psutil.Process, load: Load) -> None:
    """The most memory that all processes behind the server had together."""
    while True:
        memory = 0
        for process in server.children(recursive=True):
            try:
                memory += process.memory_info().rss
            except psutil.Error:
                continue
        load.most_memory = max(load.most_memory, memory)
        models = (await _get(session, "/v1/models"))["data"]
        loaded = sum(each["status"]["memory"] > 0 for each in models)
        load.most_loaded = max(load.most_loaded, loaded)
        await asyncio.sleep(_LOOK_SECONDS)


def tell(load: Load, seconds: float, figures: str) -> dict[str, Any]:
    """What was found, as JSON says it; memory in GiB. `figures`: `/metrics` at the end."""
    loads = {
        name: {
            "loads": int(float(count)),
            "seconds a load": round(float(total) / max(1.0, float(count)), 2),
        }
        for name, total, count in (
            (name, _figure(figures, "sum", name), _figure(figures, "count", name))
            for name in sorted({*load.ready, *load.waited})
        )
    }
    return {
        "answered": sum(map(len, (*load.ready.values(), *load.waited.values()))),
        "failed": dict(load.failures),
        "seconds": round(seconds, 1),
        "switches": sum(each["loads"] for each in loads.values()),
        "models": loads,
        "median seconds, ready": _medians(load.ready),
        "median seconds, waited": _medians(load.waited),
        "most memory of engines, GiB": round(load.most_memory / 2**30, 2),
        "most models loaded": load.most_loaded,
    }


def _figure(figures: str, part: str, name: str) -> str:
    pattern = rf'^piecework:model_load_seconds_{part}{{model_name="{re.escape(name)}"}} (\S+)$'
    found = re.search(pattern, figures, re.M)
    return found[1] if found is not None else "0"


def _medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {name: round(sorted(each)[len(each) // 2], 3) for name, each in sorted(seconds.items())}


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start a server, ask it, and end it. Raises `ValueError` where it does not start."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "piecework", "serve", "--config", arguments.config]
    command += ["--port", str(port), "--log-level", "warning", *arguments.flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        await _until_ready(url, process)
        if arguments.wake:
            return {"failed": {}, "models": await compare(url, arguments.wake)}
        began = time.perf_counter()
        load = await ask_all(
            url,
            psutil.Process(process.pid),
            arguments.num_requests,
            arguments.concurrency,
            arguments.seed,
        )
        seconds = time.perf_counter() - began
        async with aiohttp.ClientSession(url) as session, session.get("/metrics") as answer:
            return tell(load, seconds, await answer.text())
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


async def compare(url: str, rounds: int) -> dict[str, Any]:
    """Let each model start and wake in turns. Return the median seconds of both, and memory.

    The server must unload idle models soon.
    """
    found: dict[str, Any] = {}
    async with aiohttp.ClientSession(url) as session:
        names = [each["id"] for each in (await _get(session, "/v1/models"))["data"]]
        for name in names:
            seconds: dict[str, list[float]] = {"start": [], "wake": []}
            memory: dict[str, int] = {}
            for _ in range(rounds):
                await _post(session, "/v1/models/unload", name)
                for kind, times in seconds.items():
                    began = time.perf_counter()
                    answer = await _post(session, "/v1/models/load", name)
                    times.append(time.perf_counter() - began)
                    memory[f"MiB after {kind}"] = answer["status"]["memory"] // 2**20
                    status = await _until_asleep(session, name)
                    memory["MiB asleep"] = status["memory"] // 2**20
            found[name] = {**_medians(seconds), **memory}
    return found


async def _post(session: aiohttp.ClientSession, path: str, name: str) -> Any:
    async with session.post(path, json={"model": name}) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def _until_asleep(session: aiohttp.ClientSession, name: str) -> Any:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        status = (await _get(session, f"/v1/models/{name}"))["status"]
        if status["value"] == "sleeping":
            return status
        await asyncio.sleep(0.05)
    raise ValueError(f"the model {name} does not sleep; add -- --idle-unload 0.5")


async def _until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _START_SECONDS
    async with aiohttp.ClientSession(url) as session:
        while time.monotonic() < end and process.poll() is None:
            try:
                async with session.get("/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
    raise ValueError("the server did not get ready; what it printed says why")


def main(argv: Sequence[str] | None = None) -> int:
    """Print what was found; 1 where a request failed."""
    parser = argparse.ArgumentParser(prog="python -m piecework.lab.fleet", description=__doc__)
    parser.add_argument("--config", required=True, help="file of `piecework serve --config`")
    parser.add_argument("--num-requests", type=int, default=300)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--wake", type=int, default=0, help="rounds of starts and wakes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("flags", nargs="*", help="of the server, behind --")
    found = asyncio.run(measure(parser.parse_args(argv)))
    print(json.dumps(found, indent=1))
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
