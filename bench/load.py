"""Sends many requests, with a limit of concurrency or at given times."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


async def run_load(
    items: Sequence[T],
    send: Callable[[T], Awaitable[R]],
    *,
    concurrency: int | None = None,
    arrivals: Sequence[float] | None = None,
) -> list[R]:
    """Run `send` on each item, and return the results in the order of `items`.

    At most `concurrency` run at once; None means no limit. `arrivals` are ascending seconds from
    now, before which an item is not sent.
    """
    begin = time.perf_counter()
    todo = iter(range(len(items)))
    results: dict[int, R] = {}

    async def work() -> None:
        for index in todo:
            if arrivals is not None:
                await asyncio.sleep(begin + arrivals[index] - time.perf_counter())
            results[index] = await send(items[index])

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency or len(items), len(items))):
            group.create_task(work())
    return [results[index] for index in range(len(items))]


def poisson_arrivals(count: int, rate: float, rng: random.Random) -> list[float] | None:
    """Return `count` times of a Poisson process of `rate` per second, in seconds. The first is 0.

    Return None, which means all at once, if `rate` is infinite.
    """
    if rate == float("inf"):
        return None
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + rng.expovariate(rate))
    return times[:count]
