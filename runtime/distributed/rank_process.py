"""A rank other than the first: `python -m piecework.runtime.distributed.rank_process`, its job as
the first line of its standard input.

It does what rank 0 tells it, and ends when rank 0 does.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

from ..config import EngineConfig
from ..engine.build import Engine, build_engine
from ..engine.parent import end_with_parent, read_line
from .channel import Follower
from .processes import END, EXIT_USER_ERROR, group_maker, local_store
from .ranks import RankEnded

logger = logging.getLogger(__name__)


class Calls(Protocol):
    """Where a rank hears what rank 0 does."""

    def next_call(self) -> tuple[str, tuple[Any, ...]]: ...


def follow(engine: Engine, calls: Calls) -> None:
    """Do with this rank's engine what rank 0 does with its own, until that ends."""
    core, _, startup = engine
    doing: dict[str, Callable[..., Any]] = {
        "add": core.add,
        "abort": core.abort,
        "flush_cache": core.flush_cache,
        "step": core.step,
        "advance": startup.follow,
    }
    while True:
        call, arguments = calls.next_call()
        if call == END:
            return
        doing[call](*arguments)


def main() -> int:
    # Rank 0 decides when it ends, whoever stops a group of processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    job = json.loads(read_line())
    config, rank = EngineConfig(**job["config"]), job["rank"]
    logging.basicConfig(
        # What all ranks would say, rank 0 says.
        level=job["log_level"] if job["log_level"] == "DEBUG" else logging.ERROR,
        format=f"%(asctime)s %(levelname)s rank {rank}: %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
    end_with_parent()
    make_group = group_maker(local_store(job["port"], config.tp_size))
    ranks = Follower(rank, config.tp_size, Connection(job["connection"]), make_group)
    try:
        try:
            engine = build_engine(config, progress=False, ranks=ranks)
        except ValueError as error:
            ranks.fail(str(error))
            return EXIT_USER_ERROR
        follow(engine, ranks)
    except RankEnded:
        return 0
    except Exception as error:
        logger.exception("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    # Not through the interpreter's end, where a group may wait for the others.
    code = main()
    sys.stderr.flush()
    os._exit(code)
