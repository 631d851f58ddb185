"""What a long prompt costs answers that are being streamed, and what they cost the prompt.

    python -m piecework.lab.prompts_beside_answers --server= --server="--mixed-step-seconds 0"

It starts a server with each set of flags. In each round, every server in turn computes a prompt of
random tokens alone, and then one beside each number of `--answers`. Each line has the medians over
the rounds: the time to the prompt's first token, its ratio to that of the first server with the
same number of answers, and the gaps between two tokens of an answer, before the prompt arrived
and while it was computed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import shlex
import sys
import time
from contextlib import ExitStack
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from ..bench.client import Client
from ..bench.server_process import first_token, running_server
from ..bench.target import Target

_BEFORE = 1.0  # Seconds in which answers run before the prompt arrives.


class Turn(NamedTuple):
    """One prompt: its seconds, and gaps between tokens of answers before it and beside it."""

    seconds: float
    before: list[float]
    beside: list[float]


async def _run(given: argparse.Namespace) -> None:
    random.seed(given.seed)
    with ExitStack() as stack:
        targets = []
        for flags in given.server:
            command = (
                f"{shlex.quote(sys.executable)} -m piecework serve {shlex.quote(given.model)} "
                f"--log-level warning --max-total-tokens 32768 {flags} --port {{port}}"
            )
            process, port = stack.enter_context(running_server(flags, command))
            target = Target(base_url=f"http://127.0.0.1:{port}")
            targets.append(await first_token(flags, target, process))
        turns: dict[tuple[int, int], list[Turn]] = {}
        for round_number in range(given.rounds + 1):
            for answers in given.answers:
                for number, target in enumerate(targets):
                    turn = await _turn(target, answers, given)
                    if round_number:  # The first round warms up.
                        turns.setdefault((answers, number), []).append(turn)
            if round_number:
                _tell(turns, given)


async def _turn(target: Target, answers: int, given: argparse.Namespace) -> Turn:
    async with Client(target) as client:
        times: list[list[float]] = [[] for _ in range(answers)]
        readers = [asyncio.create_task(_read(client, each)) for each in times]
        while not all(len(each) > 2 for each in times):
            await asyncio.sleep(0.01)
        start = time.perf_counter()
        await asyncio.sleep(_BEFORE if answers else 0)
        began = time.perf_counter()
        await client.post("/v1/completions", _body(given.tokens, 1))
        ended = time.perf_counter()
        await asyncio.sleep(0.1 if answers else 0)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    return Turn(ended - began, _gaps(times, start, began), _gaps(times, began, ended))


def _gaps(times: list[list[float]], begin: float, end: float) -> list[float]:
    """Return the gaps that overlap the time from `begin` to `end`."""
    return [
        after - before
        for each in times
        for before, after in itertools.pairwise(each)
        if after > begin and before < end
    ]


async def _read(client: Client, times: list[float]) -> None:
    async for event in client.events("/v1/completions", _body(16, 2000) | {"stream": True}):
        times.append(event.time)


def _body(length: int, most: int) -> dict[str, Any]:
    prompt = [random.randrange(1000, 30_000) for _ in range(length)]
    return {"prompt": prompt, "max_tokens": most, "temperature": 0, "ignore_eos": True}


def _tell(turns: dict[tuple[int, int], list[Turn]], given: argparse.Namespace) -> None:
    print(f"\nafter {len(next(iter(turns.values())))} rounds, prompts of {given.tokens} tokens\n")
    print("| answers | flags | prompt | of the first server's | gap before | p50 | p99 | longest |")
    print("|---|---|---|---|---|---|---|---|")
    for (answers, number), each in sorted(turns.items()):
        ratio = median(
            turn.seconds / first.seconds
            for turn, first in zip(each, turns[answers, 0], strict=True)
        )
        cells = [f"{median(turn.seconds for turn in each):.2f} s", f"{ratio:.2f}"]
        if answers:
            milliseconds = [
                1000 * median(float(np.median(turn.before)) for turn in each),
                *(
                    1000 * median(float(np.quantile(turn.beside, share)) for turn in each)
                    for share in (0.5, 0.99, 1.0)
                ),
            ]
            cells += [f"{value:.0f} ms" for value in milliseconds]
        else:
            cells += [""] * 4
        flags = given.server[number] or "default"
        print(f"| {answers} | `{flags}` | {' | '.join(cells)} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.prompts_beside_answers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--server", action="append", help="flags of a server")
    parser.add_argument("--answers", nargs="+", type=int, default=[0, 1, 4])
    parser.add_argument("--tokens", type=int, default=2000, help="of a prompt")
    parser.add_argument("--rounds", type=int, default=5, help="after one that warms up")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.server = given.server or [""]
    asyncio.run(_run(given))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
