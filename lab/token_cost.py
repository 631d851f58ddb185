"""What a token costs beside its arithmetic: processor time between two native steps of the engine,
and processor time of the web process for each token that it serves.

    python -m piecework.lab.token_cost --model-path smollm2-135m --clients 1 8

The first is of an engine in this process, the thread's own time from one native call to the next,
the least of the rounds' medians. The second is of a server on a free port of loopback, by the
kernel's count of each thread (`/proc/PID/task/*/schedstat`), the least of the rounds; further flags
of that server stand behind `--`. With `--stand-in MS` its engine computes nothing (`stand_in.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..bench.server_process import PORT, first_token, running_server
from ..bench.serving import ServingSettings, measure
from ..bench.target import Target
from ..bench.workloads import Workload
from ..runtime.config.engine import EngineConfig
from ..runtime.engine.build import Engine, build_engine
from .ranks import Load, run_load
from .stand_in import PACE

_PROMPT, _ANSWER = 128, 128


def between_steps(
    engine: Engine, clients: int, seed: int, temperature: float = 0.0, top_p: float = 1.0
) -> tuple[float, float]:
    """Milliseconds of this thread's time in a native step, and between two."""
    kernels: Any = engine.runner.graphs.kernels
    moments: list[tuple[float, float]] = []
    step = kernels._step

    def timed(*arguments: Any) -> Any:
        began = time.thread_time()
        result = step(*arguments)
        moments.append((began, time.thread_time()))
        return result

    kernels._step = timed
    try:
        load = Load(clients, _PROMPT, _ANSWER)
        run_load(engine, load, seed, temperature=temperature, top_p=top_p)
    finally:
        kernels._step = step
    inside = [end - begin for begin, end in moments]
    outside = [after[0] - before[1] for before, after in pairwise(moments)]
    return statistics.median(inside) * 1e3, statistics.median(outside) * 1e3


async def served(
    target: Target, pid: int, clients: int, seed: int, answer: int = _ANSWER
) -> dict[str, float]:
    """Milliseconds of the web process for each token, by the names of its threads."""
    asked = ServingSettings(
        num_prompts=2 * clients, max_concurrency=clients, num_warmups=1, ignore_eos=True, seed=seed
    )
    workload = Workload(random_input_len=_PROMPT, random_output_len=answer)
    before = _processor_time(pid)
    result = await measure(target, asked, workload)
    tokens = result.output_tokens + answer
    spent = _processor_time(pid)
    spent.subtract(before)
    return {name: spent[name] / 1e6 / tokens for name in spent}


def _processor_time(pid: int) -> Counter[str]:
    """Nanoseconds of each name of a thread."""
    spent = Counter[str]()
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = (task / "comm").read_text().strip()
        spent[name] += int((task / "schedstat").read_text().split()[0])
    return spent


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-path", default="smollm2-135m")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--temperature", type=float, default=0.0, help="of the engine's requests")
    parser.add_argument("--top-p", type=float, default=1.0, help="the same")
    parser.add_argument("--parts", nargs="+", default=["engine", "web"], choices=["engine", "web"])
    parser.add_argument("--stand-in", metavar="MS", help="milliseconds of a step without a model")
    parser.add_argument(
        "--answer", type=int, default=_ANSWER, help="tokens of the web part's answers"
    )
    parser.add_argument("flags", nargs="*", help="of the server, behind --")
    given = parser.parse_args(argv)
    threads = [] if given.num_threads is None else ["--num-threads", str(given.num_threads)]
    if "engine" in given.parts:
        config = EngineConfig(
            model_path=given.model_path, max_total_tokens=8192, num_threads=given.num_threads
        )
        engine = build_engine(config, progress=False)
        if engine.runner.graphs.kernels is None:
            lacking = "its decodes are no native steps here, between which could be measured"
            if "web" not in given.parts:
                engine.startup.stop()
                parser.error(lacking)
            print(lacking, file=sys.stderr)
        for clients in given.clients if engine.runner.graphs.kernels is not None else []:
            found = [
                between_steps(engine, clients, seed, given.temperature, given.top_p)
                for seed in range(given.rounds)
            ]
            inside, outside = (min(each) for each in zip(*found, strict=True))
            print(f"{clients} at a time: a step {inside:.2f} ms, {outside:.3f} ms to the next one")
        engine.startup.stop()
    if "web" in given.parts:
        server = "piecework" if given.stand_in is None else "piecework.lab.stand_in"
        os.environ |= {} if given.stand_in is None else {PACE: given.stand_in}
        command = [sys.executable, "-m", server, "serve", "--model-path", given.model_path]
        command += ["--port", PORT, "--log-level", "warning", *threads, *given.flags]
        with running_server("piecework", shlex.join(command)) as (process, port):
            target = Target(base_url=f"http://127.0.0.1:{port}")
            target = asyncio.run(first_token("piecework", target, process))
            for clients in given.clients:
                rounds = [
                    asyncio.run(served(target, process.pid, clients, seed, given.answer))
                    for seed in range(given.rounds)
                ]
                least = min(rounds, key=lambda each: sum(each.values()))
                parts = ", ".join(f"{name} {ms:.3f}" for name, ms in least.items() if ms > 1e-3)
                print(f"{clients} at a time: {sum(least.values()):.3f} ms a token ({parts})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
