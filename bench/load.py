"""Sends many requests: so many at once, or at their times of arrival."""

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
    """Run `send` on each item, in order, at most `concurrency` at once (None: no limit); results
    are in the order of `items`.

    `arrivals`: ascending seconds from now before which an item is not sent.
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
    """`count` times in seconds of a Poisson process of `rate` a second, the first at 0; None (all
    at once) where `rate` is infinite.
    """
    if rate == float("inf"):
        return None
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + rng.expovariate(rate))
    return times[:count]
