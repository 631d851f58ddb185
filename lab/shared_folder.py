"""Random requests to servers that share a folder of prefixes, compared with a server without one.

    piecework serve MODEL --port 31001 --batch-invariant &
    piecework serve MODEL --port 31002 --batch-invariant --max-total-tokens 4096 \
        --kv-disk FOLDER:4G &
    piecework serve MODEL --port 31003 --batch-invariant --max-total-tokens 4096 \
        --kv-disk FOLDER:4G &
    python -m piecework.lab.shared_folder --quiet http://127.0.0.1:31001 \
        --servers http://127.0.0.1:31002 http://127.0.0.1:31003

The exit code is 1 if an answer differs or fails.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from contextlib import AsyncExitStack
from typing import Any

from ..bench.client import Client, RequestFailed
from ..bench.load import run_load
from ..bench.target import Target

_PREFIXES = 60


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.shared_folder", description=__doc__
    )
    parser.add_argument("--quiet", required=True, help="URL of the server without a folder")
    parser.add_argument("--servers", nargs="+", required=True, help="URLs of the others")
    parser.add_argument("--num-requests", type=int, default=5000)
    parser.add_argument("--concurrency", type=int, default=8)
    return asyncio.run(_run(parser.parse_args()))


async def _run(options: argparse.Namespace) -> int:
    cached = stored = 0

    async def compare(number: int) -> str | None:
        nonlocal cached, stored
        body = _body(random.Random(number))
        try:
            wanted = await quiet.post("/v1/completions", body)
            found = await servers[number % len(servers)].post("/v1/completions", body)
        except RequestFailed as error:
            return f"request {number} failed: {error}"
        details = found["usage"]["prompt_tokens_details"]
        cached += details["cached_tokens"]
        stored += details.get("cached_tokens_details", {}).get("storage", 0)
        if found["choices"] != wanted["choices"]:
            return f"request {number} differs: {found['choices']} and {wanted['choices']}"
        return None

    async with AsyncExitStack() as stack:
        quiet, *servers = [
            await stack.enter_async_context(Client(Target(base_url=url)))
            for url in (options.quiet, *options.servers)
        ]
        numbers = list(range(options.num_requests))
        results = await run_load(numbers, compare, concurrency=options.concurrency)
    wrong = [each for each in results if each is not None]
    print("\n".join(wrong[:20]))
    print(
        f"{len(results)} answers compared, {len(wrong)} wrong; {cached} tokens were cached, "
        f"{stored} of them on disk"
    )
    return 1 if wrong else 0


def _body(chance: random.Random) -> dict[str, Any]:
    """Return a request that begins like others do. Its answer is the same each time."""
    start = random.Random(chance.randrange(_PREFIXES))
    prefix = [start.randrange(3, 250) for _ in range(start.randrange(100, 400))]
    return {
        "prompt": prefix + [chance.randrange(3, 250) for _ in range(chance.randrange(1, 40))],
        "max_tokens": chance.randrange(1, 8),
        "temperature": 0,
        "ignore_eos": True,
    }


if __name__ == "__main__":
    sys.exit(main())
