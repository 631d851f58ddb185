"""Whether a server takes longer for steps with prompts than an engine in this process.

    python -m piecework.lab.served_steps --others 0 1

In each round, an engine in this process and a server, or servers of several trees, take turns. Each
computes a prompt of random tokens beside streamed answers, in steps of `--step-tokens`. `--others`
is how many other processes compute meanwhile. Each line has medians over the rounds, for one step:
its time, the ratio to that in this process, the processor time of the engine, the time that the
engine's threads waited for a core (`/proc/PID/task/*/schedstat`), and the processor time of the web
process and of the client.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from ..bench.client import Client
from ..bench.server_process import first_token, running_server
from ..bench.target import Target
from ..runtime.process.parent import ENVIRONMENT

if TYPE_CHECKING:
    from ..runtime.engine.core import EngineCore

_BEFORE = 8  # Tokens of each answer before the prompt arrives.
_MOST = 4000  # Tokens of an answer, which is aborted before.
_SETTINGS = {"max_total_tokens": 32768, "speculative_algorithm": "none", "mixed_step_seconds": 0}


class Turn(NamedTuple):
    """Seconds of one prompt: by the clock, of processors, and of threads that wait for a core."""

    seconds: float
    engine: float
    waited: float
    web: float = 0.0
    client: float = 0.0


def _spent(pid: int) -> tuple[float, float]:
    """Return the seconds that the threads of a process have computed, and waited for a core."""
    counts = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(each[0]) for each in counts) / 1e9, sum(int(each[1]) for each in counts) / 1e9


def _engine(given: argparse.Namespace) -> EngineCore:
    # Imported here, because libgomp reads its variables when torch is loaded.
    os.environ.update({**ENVIRONMENT, **os.environ})
    from ..runtime.llm import LLM

    settings: dict[str, Any] = {**_SETTINGS, "chunked_prefill_size": given.step_tokens}
    return LLM(given.model, piecewise_cuda_graph=True, **settings).core


def _turn_here(core: EngineCore, given: argparse.Namespace) -> Turn:
    from ..runtime.core.generation import GenerateRequest
    from ..runtime.core.sampling_params import SamplingParams

    def add(name: str, length: int, most: int) -> None:
        params = SamplingParams(temperature=0, max_new_tokens=most, ignore_eos=True)
        ids, now = _random_tokens(length), time.monotonic()
        core.add(GenerateRequest(rid=name, input_ids=ids, params=params, arrival_time=now))

    names = [f"answer {number}" for number in range(given.answers)]
    for name in names:
        add(name, 16, _MOST)
    for _ in range(_BEFORE):
        core.step()
    add("prompt", given.tokens, 1)
    before, began = _spent(os.getpid()), time.perf_counter()
    while not any(output.rid == "prompt" for output in core.step().outputs):
        pass
    seconds, after = time.perf_counter() - began, _spent(os.getpid())
    core.abort(names)
    while core.has_work:
        core.step()
    return Turn(seconds, after[0] - before[0], after[1] - before[1])


async def _turn_served(target: Target, web: int, engine: int, given: argparse.Namespace) -> Turn:
    async with Client(target) as client:
        counts = [0] * given.answers
        readers = [
            asyncio.create_task(_read(client, counts, number)) for number in range(given.answers)
        ]
        while min(counts, default=_BEFORE) < _BEFORE:
            await asyncio.sleep(0.01)
        before, own = [*_spent(engine), _spent(web)[0]], time.process_time()
        began = time.perf_counter()
        await client.post("/v1/completions", _body(given.tokens, 1))
        seconds = time.perf_counter() - began
        after = [*_spent(engine), _spent(web)[0], time.process_time()]
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    return Turn(seconds, *(late - early for late, early in zip(after, [*before, own], strict=True)))


async def _read(client: Client, counts: list[int], number: int) -> None:
    async for _ in client.events("/v1/completions", _body(16, _MOST) | {"stream": True}):
        counts[number] += 1


def _body(length: int, most: int) -> dict[str, Any]:
    prompt = _random_tokens(length)
    return {"prompt": prompt, "max_tokens": most, "temperature": 0, "ignore_eos": True}


def _random_tokens(count: int) -> list[int]:
    return [random.randrange(1000, 30_000) for _ in range(count)]


@contextmanager
def _server(folder: str, given: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Turn]]]:
    """Start a server, of another tree if `folder` is not empty. Yield its name and its turn."""
    flags = {**_SETTINGS, "chunked_prefill_size": given.step_tokens, "startup": "full"}
    words = [f"--{name.replace('_', '-')} {value}" for name, value in flags.items()]
    tree = f"env PYTHONPATH={shlex.quote(folder)} " if folder else ""
    command = (
        f"{tree}{shlex.quote(sys.executable)} -m piecework serve {shlex.quote(given.model)} "
        f"--log-level warning {' '.join(words)} --port {{port}}"
    )
    name = f"server of {folder}" if folder else "server"
    with running_server(name, command) as (process, port):
        target = Target(base_url=f"http://127.0.0.1:{port}")
        target = asyncio.run(first_token(name, target, process))
        (engine,) = (
            child.pid
            for child in psutil.Process(process.pid).children()
            if "piecework.runtime.engine.process" in child.cmdline()
        )
        yield name, lambda: asyncio.run(_turn_served(target, process.pid, engine, given))


def _tell(others: int, turns: dict[str, list[Turn]], steps: float) -> None:
    (_, first), *_ = turns.items()
    for name, each in turns.items():
        ratio = median(turn.seconds / own.seconds for turn, own in zip(each, first, strict=True))
        cells = [f"{1000 * median(values) / steps:.1f} ms" for values in zip(*each, strict=True)]
        cells.insert(1, f"{ratio:.2f}")
        print(f"| {others} | {name} | {' | '.join(cells)} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.served_steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--answers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1000, help="of a prompt")
    parser.add_argument("--step-tokens", type=int, default=128, help="of a step")
    parser.add_argument("--others", type=int, nargs="+", default=[0], help="busy processes")
    parser.add_argument("--beside", nargs="*", default=[], help="folders of other trees' packages")
    parser.add_argument("--rounds", type=int, default=8, help="after one that warms up")
    given = parser.parse_args()
    with ExitStack() as stack:
        servers = [stack.enter_context(_server(folder, given)) for folder in ["", *given.beside]]
        core = _engine(given)
        sides: dict[str, Callable[[], Turn]] = {
            "this process": partial(_turn_here, core, given),
            **dict(servers),
        }
        print("| others | engine | step | ratio | engine | waited for a core | web | client |")
        print("|---|---|---|---|---|---|---|---|")
        for others in given.others:
            turns: dict[str, list[Turn]] = {name: [] for name in sides}
            busy = [
                subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(others)
            ]
            try:
                for number in range(given.rounds + 1):
                    for name, turn in list(sides.items())[:: 1 if number % 2 else -1]:
                        turns[name].append(turn())
            finally:
                for each in busy:
                    each.kill()
            measured = {name: each[1:] for name, each in turns.items()}  # The first round warms up.
            rows = given.step_tokens - given.answers
            _tell(others, measured, -(-given.tokens // rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
