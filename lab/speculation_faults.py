"""Random requests to a server with speculation whose engine is killed, and to one without.

    piecework serve MODEL --port 31001 --dtype float32 --speculative-algorithm none &
    piecework serve MODEL --port 31002 --dtype float32 --speculative-draft-model-path DRAFT &
    python -m piecework.lab.speculation_faults --quiet http://127.0.0.1:31001 \
        --server http://127.0.0.1:31002 --server-pid $! --kill-engine 5

Each request is sent to the quiet server first. A part of the requests then goes out with the quiet
answer, changed in places, as `prediction`. The answers must be equal. The exit code is 1 if one
differs or fails.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from typing import Any

from ..bench.client import Client, RequestFailed
from ..bench.load import run_load
from ..bench.target import Target
from ..bench.workloads import WORDS
from .soak.faults import Faults
from .soak.state import read_state

_PATH = "/v1/completions"
_PATTERNS = ("(yes|no|maybe)( and (yes|no))*", "[a-f]{4,30}", r"\d+(, \d+){3,12}")
_TOLERANCE = 1e-3  # Of log-probabilities, which depend on the other requests of a step.


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.speculation_faults", description=__doc__
    )
    parser.add_argument("--quiet", required=True, help="URL of the server without speculation")
    parser.add_argument("--server", required=True, help="URL of the server with speculation")
    parser.add_argument("--server-pid", type=int, required=True, help="process id of --server")
    parser.add_argument("--num-requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--kill-engine", type=int, default=0, help="how often, default: never")
    parser.add_argument("--seed", type=int, default=0)
    return asyncio.run(_run(parser.parse_args()))


async def _run(options: argparse.Namespace) -> int:
    faults = Faults(
        server_pid=options.server_pid,
        kills=options.kill_engine,
        hangs=0,
        interval=32.0,
        seed=options.seed,
    )
    numbers = range(options.num_requests)
    async with (
        Client(Target(base_url=options.quiet)) as quiet,
        Client(Target(base_url=options.server)) as server,
    ):

        async def compare(number: int) -> str | None:
            body = _body(random.Random(f"{options.seed} {number}"))
            wanted = await quiet.post(_PATH, body)
            changed = _prediction(random.Random(number), wanted["choices"][0]["text"])
            try:
                found = await server.post(_PATH, body | changed)
            except RequestFailed as error:
                return f"request {number} failed: {error}"
            if _differ(found["choices"], wanted["choices"]):
                return f"request {number} differs: {body | changed}\n{found}\n{wanted}"
            return None

        async def ready() -> bool:
            try:
                return await read_state(server) is not None
            except RequestFailed:
                return False

        killing = asyncio.create_task(faults.commit(ready, print))
        wrong: list[str] = []
        compared = 0
        # The load repeats until all faults are done.
        while not compared or not killing.done():
            again = [compared + number for number in numbers]
            results = await run_load(again, compare, concurrency=options.concurrency)
            wrong += [each for each in results if each is not None]
            compared += len(again)
        await killing
    print("\n".join(wrong[:20]))
    print(f"{compared} answers compared, {options.kill_engine} kills, {len(wrong)} wrong")
    return 1 if wrong else 0


def _body(rng: random.Random) -> dict[str, Any]:
    """Return a request. Its answer is the same each time: greedy, or with a seed."""
    repeated = rng.choices(WORDS, k=rng.randint(1, 8)) * rng.choice((1, 1, 2, 6))
    body: dict[str, Any] = {
        "model": "default",
        "prompt": " ".join(repeated),
        "max_tokens": rng.randint(1, 60),
        "temperature": rng.choice((0.0, 0.0, 0.7, 1.2)),
        "seed": rng.randrange(2**31),
        "ignore_eos": rng.random() < 0.5,
        "n": rng.choice((1, 1, 1, 1, 3)),
    }
    for name, values in (
        ("top_p", (0.9, 0.5)),
        ("top_k", (3, 40)),
        ("min_p", (0.05,)),
        ("repetition_penalty", (1.2,)),
        ("frequency_penalty", (0.5,)),
        ("presence_penalty", (0.5,)),
        ("logit_bias", ({"17": 4, "40": -50},)),
        ("min_tokens", (8,)),
        ("stop", (["e", " the"], ["zzz"])),
        ("logprobs", (0, 3)),
        ("regex", _PATTERNS),
    ):
        if rng.random() < 0.15:
            body[name] = rng.choice(values)
    body["min_tokens"] = min(body.get("min_tokens", 0), body["max_tokens"])
    return body


def _prediction(rng: random.Random, text: str) -> dict[str, Any]:
    """Return a prediction in a third of all cases: the answer with some letters changed."""
    if rng.random() < 0.67:
        return {}
    letters = [letter if rng.random() < 0.97 else rng.choice("xyz ") for letter in text]
    return {"prediction": {"type": "content", "content": "".join(letters)}}


def _differ(found: list[Any], wanted: list[Any]) -> bool:
    for one, other in zip(found, wanted, strict=True):
        own, their = one.pop("logprobs", None), other.pop("logprobs", None)
        if one != other or (own is None) != (their is None):
            return True
        if own is not None and (
            own["tokens"] != their["tokens"]
            or any(
                abs(a - b) > _TOLERANCE
                for a, b in zip(own["token_logprobs"], their["token_logprobs"], strict=True)
            )
        ):
            return True
    return False


if __name__ == "__main__":
    sys.exit(main())
