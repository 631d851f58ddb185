"""Two servers behind a router, against one server alone: how much of the prompts is found in prefix
caches, and what fails while a server is killed and started again.

    pip install sglang-router vllm-router
    python -m piecework.lab.routers --router sglang --model-path smollm2-135m

All listen on loopback. Prompts of each group begin alike, and come in random order.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

ROUTERS = {
    "sglang": ("sglang_router.launch_router",),
    "vllm": ("vllm_router.launch_router",),
}
_START_SECONDS = 120.0
_MOST_SECONDS = 900.0
_WORDS = [
    "the",
    "a",
    "of",
    "and",
    "to",
    "in",
    "is",
    "was",
    "for",
    "on",
    "with",
    "as",
    "by",
    "at",
    "from",
    "it",
    "that",
    "this",
    "be",
    "are",
]


class Load(NamedTuple):
    """`prefix` and `suffix` in words, `tokens` of each answer."""

    requests: int = 500
    groups: int = 20
    prefix: int = 400
    suffix: int = 30
    tokens: int = 8
    at_once: int = 8


class Outcome(NamedTuple):
    """`failed`: what is wrong, of those asked. `hit_rate`: the share of prompt tokens found cached.

    `by_server`: their prompt tokens.
    """

    asked: int
    failed: list[str]
    hit_rate: float
    seconds: float
    by_server: list[int]


def prompts_of(load: Load, seed: int) -> list[str]:
    draw = random.Random(seed)

    def text(words: int) -> str:
        return " ".join(draw.choice(_WORDS) for _ in range(words))

    prefixes = [text(load.prefix) for _ in range(load.groups)]
    return [f"{draw.choice(prefixes)} {text(load.suffix)}" for _ in range(load.requests)]


class Process:
    """A server or a router with an output file of its own, ended with the block."""

    def __init__(self, name: str, command: Sequence[str], folder: Path) -> None:
        self.name, self._command, self._log = name, command, folder / f"{name}.log"
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    async def wait(self, http: aiohttp.ClientSession, url: str) -> None:
        """Until it is healthy. Raises `ValueError` where that does not come."""
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end and self._process.poll() is None:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with http.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.2)
        raise ValueError(f"{self.name} is not healthy:\n{self._log.read_text()[-2000:]}")


class Fleet:
    """Servers, and a router in front of them where one is named."""

    def __init__(
        self, model: str, flags: Sequence[str], count: int, router: str | None, folder: Path
    ) -> None:
        ports = free_ports(count + 2)
        self.urls = [f"http://127.0.0.1:{port}" for port in ports[:count]]
        self.processes = [
            Process(f"server{number}", _serve(model, port, flags), folder)
            for number, port in enumerate(ports[:count])
        ]
        self.url = self.urls[0] if router is None else f"http://127.0.0.1:{ports[-2]}"
        self._router, self._folder, self._ports = router, folder, ports
        self.router: Process | None = None

    async def ready(self, http: aiohttp.ClientSession) -> None:
        for process, url in zip(self.processes, self.urls, strict=True):
            await process.wait(http, url)
        if self._router is not None:
            command = _route(self._router, self.urls, self._ports[-2], self._ports[-1])
            self.router = Process("router", command, self._folder)
            await self.router.wait(http, self.url)

    def end(self) -> None:
        for process in (*self.processes, *([self.router] if self.router else ())):
            process.kill()


def _serve(model: str, port: int, flags: Sequence[str]) -> list[str]:
    command = [sys.executable, "-m", "piecework", "serve", "--model-path", model]
    return [*command, "--port", str(port), "--served-model-name", "m", *flags]


def _route(router: str, urls: Sequence[str], port: int, metrics: int) -> list[str]:
    command = [sys.executable, "-m", *ROUTERS[router], "--worker-urls", *urls]
    command += ["--policy", "cache_aware", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(metrics), "--prometheus-host", "127.0.0.1"]
    return [*command, "--health-check-interval-secs", "2", "--worker-startup-check-interval", "1"]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [each.getsockname()[1] for each in sockets]


async def totals(http: aiohttp.ClientSession, url: str) -> tuple[int, int]:
    """Prompt tokens of a server, and those of them that were cached."""
    async with http.get(f"{url}/server_info") as answer:
        states: list[dict[str, Any]] = (await answer.json())["internal_states"]
    prompt = sum(state["prompt_tokens_total"] for state in states)
    return prompt, sum(state["cached_tokens_total"] for state in states)


async def ask(http: aiohttp.ClientSession, url: str, prompt: str, tokens: int) -> str | None:
    """What is wrong with the answer."""
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    try:
        async with http.post(f"{url}/v1/completions", json=body) as answer:
            text = await answer.text()
            if answer.status != 200:
                return f"{answer.status} {text[:200]}"
            return None if json.loads(text)["choices"][0]["finish_reason"] else "no end"
    except (aiohttp.ClientError, OSError, ValueError, KeyError) as error:
        return repr(error)


async def run(
    http: aiohttp.ClientSession, fleet: Fleet, load: Load, *, kill_at: int | None = None
) -> Outcome:
    """`kill_at`: after so many requests the last server is killed, and started again at once; then
    requests go on until it has its share of them again.
    """
    prompts = prompts_of(load, seed=1 if kill_at is None else 2)
    failed: list[str] = []
    asked, began = 0, time.monotonic()
    is_back = asyncio.Event()
    if kill_at is None:
        is_back.set()

    async def revive() -> None:
        url = fleet.urls[-1]
        fleet.processes[-1].kill()
        fleet.processes[-1].start()
        await fleet.processes[-1].wait(http, url)
        while (await totals(http, url))[0] < 1:
            await asyncio.sleep(0.5)
        is_back.set()

    async def work() -> None:
        nonlocal asked
        while asked < load.requests or not is_back.is_set():
            number, asked = asked, asked + 1
            if number == kill_at:
                reviving.append(asyncio.create_task(revive()))
            if number >= len(prompts):
                # Where others are cached, a router may send none to a server that was away.
                prompts.extend(prompts_of(load, seed=number))
            prompt = prompts[number]
            if wrong := await ask(http, fleet.url, prompt, load.tokens):
                failed.append(f"request {number}: {wrong}")
            if time.monotonic() > began + _MOST_SECONDS:
                raise ValueError(f"no end in {_MOST_SECONDS:g} s: a server gets no requests")

    reviving: list[asyncio.Task[None]] = []
    await asyncio.gather(*[work() for _ in range(load.at_once)])
    await asyncio.gather(*reviving)
    seconds = time.monotonic() - began
    each = [await totals(http, url) for url in fleet.urls]
    found = sum(cached for _, cached in each) / max(1, sum(prompt for prompt, _ in each))
    return Outcome(asked, failed, found, seconds, [prompt for prompt, _ in each])


@contextlib.asynccontextmanager
async def fleet_of(
    model: str, flags: Sequence[str], count: int, router: str | None
) -> AsyncIterator[tuple[aiohttp.ClientSession, Fleet]]:
    with tempfile.TemporaryDirectory() as folder:
        timeout = aiohttp.ClientTimeout(total=120)
        fleet = Fleet(model, flags, count, router, Path(folder))
        async with aiohttp.ClientSession(timeout=timeout) as http:
            try:
                await fleet.ready(http)
                yield http, fleet
            finally:
                fleet.end()


async def measure(model: str, flags: Sequence[str], router: str, load: Load) -> int:
    """Print the figures; returns 1 where a goal is missed."""
    async with fleet_of(model, flags, 1, None) as (http, fleet):
        alone = await run(http, fleet, load)
    print(f"one server: hit rate {alone.hit_rate:.3f}, {alone.seconds:.1f} s", flush=True)
    async with fleet_of(model, flags, 2, router) as (http, fleet):
        routed = await run(http, fleet, load)
        share = routed.hit_rate / (alone.hit_rate or 1)
        print(
            f"two behind {router}-router: hit rate {routed.hit_rate:.3f}, {share:.3f} of one's, "
            f"{routed.seconds:.1f} s, prompt tokens of each {routed.by_server}, "
            f"{len(routed.failed)} failed",
            flush=True,
        )
        killed = await run(http, fleet, load, kill_at=load.requests // 3)
        print(
            f"one of them killed and started again: {len(killed.failed)} of {killed.asked} "
            f"failed, {killed.seconds:.1f} s, prompt tokens of each {killed.by_server}"
        )
    for wrong in [*routed.failed, *killed.failed][:10]:
        print(f"  {wrong}")
    return int(share < 0.9 or bool(routed.failed or killed.failed))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m piecework.lab.routers")
    parser.add_argument("--model-path", default="smollm2-135m")
    parser.add_argument("--router", choices=ROUTERS, required=True)
    parser.add_argument("--requests", type=int, default=Load().requests)
    parser.add_argument("--groups", type=int, default=Load().groups)
    parser.add_argument("flags", nargs="*", help="flags of each server, behind --")
    arguments = parser.parse_args()
    load = Load(requests=arguments.requests, groups=arguments.groups)
    os.environ.setdefault("PIECEWORK_BATCH_DIR", "none")
    return asyncio.run(measure(arguments.model_path, arguments.flags, arguments.router, load))


if __name__ == "__main__":
    sys.exit(main())
