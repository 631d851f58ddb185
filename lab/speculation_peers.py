"""Tokens per second of two servers that continue copies of a text, in turn.

    piecework serve FILE.gguf --port 31001 --num-threads 2 &
    llama-server -m FILE.gguf --port 31002 -t 2 --spec-type ngram-simple &
    python -m piecework.lab.speculation_peers http://127.0.0.1:31001 http://127.0.0.1:31002

Each prompt is a file of Python and then its first lines again. Even a small model continues the
copy, so lookup guesses most tokens. A request for one token comes first, so that the prompt is
cached and the decodes alone are measured.

On a machine that others use too, `--pids` counts the processor time of the servers instead of the
time by the clock. Start both with one thread then, because threads that wait take such time too.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from pathlib import Path

import psutil

from ..bench.client import Client
from ..bench.target import Target

_PATH = "/v1/completions"
_LINES, _COPIED = 60, 20  # Lines of the file in a prompt, and those that are repeated.


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.speculation_peers", description=__doc__
    )
    parser.add_argument("servers", nargs=2, help="URLs of the servers")
    parser.add_argument("--rounds", type=int, default=10, help="prompts, each sent to both in turn")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--pids", nargs=2, type=int, help="process ids of the servers")
    asyncio.run(_run(parser.parse_args()))


async def _run(options: argparse.Namespace) -> None:
    rates: list[list[float]] = [[], []]
    async with (
        Client(Target(base_url=options.servers[0])) as one,
        Client(Target(base_url=options.servers[1])) as other,
    ):
        for number in range(options.rounds):
            prompts = [
                _prompt(number * options.concurrency + each) for each in range(options.concurrency)
            ]
            pids = options.pids or (None, None)
            for client, own, pid in zip((one, other), rates, pids, strict=True):
                own.append(await _rate(client, prompts, options.tokens, pid))
    ratios = [first / second for first, second in zip(*rates, strict=True)]
    for url, own in zip(options.servers, rates, strict=True):
        print(f"{url}: {statistics.median(own):.1f} tokens/s")
    print(f"ratio: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


async def _rate(client: Client, prompts: list[str], tokens: int, pid: int | None) -> float:
    """Return the tokens per second of requests that are sent together."""

    def now() -> float:
        if pid is None:
            return time.perf_counter()
        server = psutil.Process(pid)
        times = [each.cpu_times() for each in (server, *server.children(recursive=True))]
        return float(sum(each.user + each.system for each in times))

    async def send(prompt: str, count: int) -> int:
        body = {
            "model": "default",
            "prompt": prompt,
            "max_tokens": count,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        return int((await client.post(_PATH, body))["usage"]["completion_tokens"])

    for prompt in prompts:
        await send(prompt, 1)
    began = now()
    made = await asyncio.gather(*(send(prompt, tokens) for prompt in prompts))
    return sum(made) / (now() - began)


def _prompt(number: int) -> str:
    """Return another text for each number."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    begin = number * 7 % max(1, len(lines) - _LINES)
    part = [f"# Version {number}.", *lines[begin : begin + _LINES]]
    return "\n".join([*part, "", "# A copy of the same file:", *part[:_COPIED], ""])


if __name__ == "__main__":
    main()
