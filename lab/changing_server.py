"""Sleeps and new weights under traffic: whether each answer is whole and of one model.

    piecework serve FOLDER/a --port 31001 --batch-invariant --enable-sleep-mode \
        --weights-root FOLDER &
    python -m piecework.lab.changing_server --server http://127.0.0.1:31001 --server-pid $! \
        --weights a b --sleeps 50 --updates 20

Each model's answers are first asked for in quiet. Under traffic each answer must equal that of one
of the models. The exit code is 1 if one does not, or if a request fails.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import sys
from typing import Any

import psutil

from ..bench.client import Client, RequestFailed
from ..bench.target import Target

_PROMPTS = [[3 + (7 * i + 11 * j) % 250 for j in range(8 + 5 * i)] for i in range(12)]
_SECONDS = 0.3  # Mean time between two changes.


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.changing_server", description=__doc__
    )
    parser.add_argument("--server", required=True, help="URL of the server")
    parser.add_argument("--server-pid", type=int, required=True, help="its process id")
    parser.add_argument("--weights", nargs=2, required=True, help="models below --weights-root")
    parser.add_argument("--sleeps", type=int, default=50)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--concurrency", type=int, default=8)
    return asyncio.run(_run(parser.parse_args()))


async def _run(options: argparse.Namespace) -> int:
    async with Client(Target(base_url=options.server)) as client:
        expected = dict[str, list[str]]()
        for name in options.weights:
            await client.post("/update_weights_from_disk", {"model_path": name})
            expected[name] = [await _ask(client, prompt) for prompt in _PROMPTS]
        if expected[options.weights[0]] == expected[options.weights[1]]:
            print("the models give the same answers")
            return 1
        traffic = _Traffic(client, list(expected.values()))
        workers = [asyncio.create_task(traffic.run(n)) for n in range(options.concurrency)]
        awake, asleep = await _sleep_and_wake(client, options)
        await _update(client, options)
        traffic.ends = True
        await asyncio.gather(*workers)
    print("\n".join(traffic.wrong[:20]))
    print(
        f"{options.sleeps} sleeps, {options.updates} updates, {traffic.answers} answers, "
        f"{len(traffic.wrong)} wrong or lost"
    )
    print(
        f"memory of the server: {awake[0] / 2**20:.0f} MiB awake at first, "
        f"{awake[-1] / 2**20:.0f} at last, {statistics.median(asleep) / 2**20:.0f} asleep"
    )
    return 1 if traffic.wrong else 0


class _Traffic:
    """Asks until it `ends`, and compares each answer with those of all models."""

    def __init__(self, client: Client, expected: list[list[str]]) -> None:
        self._client, self._expected = client, expected
        self.ends, self.answers, self.wrong = False, 0, list[str]()

    async def run(self, seed: int) -> None:
        chance = random.Random(seed)
        while not self.ends:
            number = chance.randrange(len(_PROMPTS))
            try:
                text = await _ask(self._client, _PROMPTS[number])
            except RequestFailed as error:
                self.wrong.append(f"prompt {number} failed: {error}")
                continue
            self.answers += 1
            if text not in [answers[number] for answers in self._expected]:
                self.wrong.append(f"prompt {number} is of no model: {text!r}")


async def _ask(client: Client, prompt: list[int]) -> str:
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    answer: Any = await client.post("/v1/completions", body)
    text: str = answer["choices"][0]["text"]
    return text


async def _sleep_and_wake(
    client: Client, options: argparse.Namespace
) -> tuple[list[int], list[int]]:
    """Return the bytes of the server's processes before each sleep and at the end, and asleep."""
    chance, awake, asleep = random.Random(0), list[int](), list[int]()
    for _ in range(options.sleeps):
        await asyncio.sleep(chance.expovariate(1 / _SECONDS))
        awake.append(_memory(options.server_pid))
        await client.post(f"/sleep?level={chance.choice((1, 1, 2))}", {})
        asleep.append(_memory(options.server_pid))
        await client.post("/wake_up", {})
    await asyncio.sleep(4 * _SECONDS)
    return [*awake, _memory(options.server_pid)], asleep


async def _update(client: Client, options: argparse.Namespace) -> None:
    chance = random.Random(1)
    for name in itertools.islice(itertools.cycle(options.weights), options.updates):
        await asyncio.sleep(chance.expovariate(1 / _SECONDS))
        await client.post("/update_weights_from_disk", {"model_path": name})


def _memory(pid: int) -> int:
    """Bytes of a process and of all below it that no other process has."""
    server = psutil.Process(pid)
    family = [server, *server.children(recursive=True)]
    return sum(process.memory_full_info().uss for process in family)


if __name__ == "__main__":
    sys.exit(main())
