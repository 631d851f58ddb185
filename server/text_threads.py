"""Threads for texts that take long, so that the event loop answers others meanwhile."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_CORES_A_THREAD = 4
"""The other cores are the engine's."""
_MOST = 4


class TextThreads:
    """A few threads, whatever comes; what waits for one is dropped when its caller is cancelled."""

    def __init__(self) -> None:
        count = min(_MOST, max(1, (os.cpu_count() or 1) // _CORES_A_THREAD))
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="text")

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`work(*args, **kwargs)`, first come, first served."""
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, partial(work, *args, **kwargs)
        )
