"""A rank other than the first: `python -m piecework.runtime.engine.rank_process`, its job as
the first line of its standard input.

It does what rank 0 tells it, and ends when rank 0 does. One of another machine than rank 0's joins
it first, and says on its standard output what the user can mend.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

from ...kernels.collectives import CollectiveError
from ..config.engine import EngineConfig
from ..config.nodes import split_address
from ..distributed.join import hello, join, keep_to_interface
from ..distributed.node import EXIT_NEVER_JOINED
from ..distributed.processes import END, EXIT_USER_ERROR, follower
from ..distributed.ranks import EngineEnded, RankEnded
from ..distributed.sealed import Sealed, hung_up, read_key
from ..process.logs import set_up_logging
from ..process.parent import end_with_parent, read_line
from .build import Engine, build_engine

logger = logging.getLogger(__name__)

_OWN = ("model_path", "tokenizer_path", "num_threads", "cpu_bind", "node_rank", "dist_key_file")
"""Settings that each node has for itself; all others are rank 0's."""


class Calls(Protocol):
    """Where a rank hears what rank 0 does."""

    def next_call(self, within: float | None = None) -> tuple[str, tuple[Any, ...]]: ...


def follow(engine: Engine, calls: Calls, within: float | None = None) -> None:
    """Do with this rank's engine what rank 0 does with its own, until that ends. `within`: seconds
    in which a rank 0 that has requests goes on; None: it may stop between two steps.
    """
    core, runner, startup = engine
    doing: dict[str, Callable[..., Any]] = {
        "add": core.add,
        "abort": core.abort,
        "flush_cache": core.flush_cache,
        "step": core.step,
        "advance": startup.follow,
        "give_back_memory": runner.give_back_memory,
    }
    while True:
        call, arguments = calls.next_call(within if core.has_work else None)
        if call == END:
            return
        doing[call](*arguments)


def main() -> int:
    # Rank 0 decides when it ends, whoever stops a group of processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    job = json.loads(read_line())
    rank = job["rank"]
    # What all ranks would say, rank 0 says.
    set_up_logging(job["log_level"] if job["log_level"] == "DEBUG" else "ERROR", rank=rank)
    end_with_parent()
    try:
        return _follow(job)
    except EngineEnded as error:
        if error.reason is not None:
            return _say(job, error.reason)
        return 0
    except RankEnded as error:
        logger.info("%s", error)
    except CollectiveError as error:
        logger.error("%s", error)
        if 0 in error.missing and job["is_server"] and "connection" in job:
            # It may be stopped, and could not end for any other reason.
            os.kill(os.getppid(), signal.SIGKILL)
    except Exception as error:
        logger.exception("%s", error)
    return 1


def _follow(job: dict[str, Any]) -> int:
    """Until the engine ends, which some error says."""
    leader = None
    try:
        if "connection" not in job:
            leader, job = _join(job)
    except TimeoutError as error:
        _say(job, str(error))
        return EXIT_NEVER_JOINED
    except ValueError as error:
        return _say(job, str(error))
    ranks = follower(job, leader)
    try:
        engine = build_engine(EngineConfig(**job["config"]), progress=False, ranks=ranks)
    except ValueError as error:
        ranks.fail(str(error))
        return _say(job, str(error))
    # Who uses an engine in a process of theirs may stop it between two steps.
    follow(engine, ranks, job["seconds"] if job["is_server"] else None)
    return 0


def _join(job: dict[str, Any]) -> tuple[Sealed, dict[str, Any]]:
    """The connection to rank 0, and the job with what it told."""
    config = EngineConfig(**job["config"])
    assert config.dist_init_addr is not None
    host, _ = split_address(config.dist_init_addr)
    leader, told = join(
        config.dist_init_addr,
        read_key(config.dist_key_file),
        hello(config, job["rank"]),
        config.dist_timeout,
    )
    keep_to_interface(leader.address)

    def watch() -> None:
        hung_up(leader, None)
        # What it said last is to be heard.
        threading.Event().wait(_LAST_WORDS)
        os._exit(1)

    threading.Thread(target=watch, name="rank 0", daemon=True).start()
    settings = told["config"] | {name: job["config"][name] for name in _OWN}
    return leader, {**job, **told, "config": settings, "host": host}


_LAST_WORDS = 3.0
"""Seconds that a rank has, once rank 0 is gone, to find out why."""


def _say(job: dict[str, Any], reason: str) -> int:
    """What the user can mend, to who has started this rank on another machine than rank 0's, which
    hears it otherwise.
    """
    if "connection" not in job:
        print(json.dumps(reason), flush=True)
    return EXIT_USER_ERROR


if __name__ == "__main__":
    # Not through the interpreter's end, where a group may wait for the others.
    code = main()
    sys.stderr.flush()
    os._exit(code)
