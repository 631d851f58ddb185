"""Long prompts beside a running answer: one server for both, or one that computes the prompts and
another that generates, which finds them in a common folder.

    taskset -c 0,1 piecework serve MODEL --port 31001 &
    python -m piecework.lab.disaggregated --decode http://127.0.0.1:31001

    taskset -c 0 piecework serve MODEL --port 31002 --kv-disk FOLDER &
    taskset -c 1 piecework serve MODEL --port 31003 --kv-disk FOLDER &
    python -m piecework.lab.disaggregated --prefill http://127.0.0.1:31002 \
        --decode http://127.0.0.1:31003
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import time
from contextlib import AsyncExitStack
from typing import Any

from ..bench.client import Client
from ..bench.target import Target

_SAVING_SECONDS = 1.2  # The idle server saves the prompt; the other one looks once a second.


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.disaggregated", description=__doc__
    )
    parser.add_argument("--decode", required=True, help="URL of the server that generates")
    parser.add_argument("--prefill", help="URL of the server that computes prompts first")
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2000, help="of each long prompt")
    asyncio.run(_run(parser.parse_args()))


async def _run(options: argparse.Namespace) -> None:
    async with AsyncExitStack() as stack:

        async def client(url: str) -> Client:
            return await stack.enter_async_context(Client(Target(base_url=url)))

        decode = await client(options.decode)
        prefill = None if options.prefill is None else await client(options.prefill)
        for each in (decode, prefill):
            if each is not None:
                await each.post("/v1/completions", _body(_prompt(500), 8))
        times = list[float]()
        reader = asyncio.create_task(_read(decode, times))
        await asyncio.sleep(2)
        began, seconds, stored = time.perf_counter(), list[float](), 0
        for _ in range(options.prompts):
            prompt, since = _prompt(options.tokens), time.perf_counter()
            if prefill is not None:
                await prefill.post("/v1/completions", _body(prompt, 1))
                await asyncio.sleep(_SAVING_SECONDS)
            answer = await decode.post("/v1/completions", _body(prompt, 1))
            seconds.append(time.perf_counter() - since)
            details = answer["usage"]["prompt_tokens_details"] or {}
            stored += details.get("cached_tokens_details", {}).get("storage", 0)
        ended = time.perf_counter()
        reader.cancel()
    gaps = [b - a for a, b in itertools.pairwise(times) if began <= b <= ended]
    print(
        f"first token of a prompt of {options.tokens} tokens: {statistics.median(seconds):.2f} s "
        f"({stored // options.prompts} tokens from disk); the running answer: "
        f"{len(gaps) / (ended - began):.1f} tokens a second, longest gap {max(gaps):.2f} s"
    )


async def _read(client: Client, times: list[float]) -> None:
    """Record when each token of an endless answer arrives."""
    while True:
        body = _body(_prompt(16), 1500) | {"stream": True}
        async for event in client.events("/v1/completions", body):
            times.append(event.time)


def _prompt(length: int) -> list[int]:
    return [random.randrange(1000, 30_000) for _ in range(length)]


def _body(prompt: list[int], most: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": most, "temperature": 0, "ignore_eos": True}


if __name__ == "__main__":
    main()
