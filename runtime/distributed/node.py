"""A machine whose ranks belong to the engine of another machine: `piecework serve --node-rank 1`.

It starts its ranks, which join rank 0. If the engine restarts, it restarts its ranks. It serves no
HTTP.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict

from ..config.engine import EngineConfig
from ..config.nodes import ranks_of
from ..process.job import EXIT_USER_ERROR, RANK, Job, command
from ..process.logs import set_up_logging
from .sealed import read_key

logger = logging.getLogger(__name__)

_COMMAND = command(RANK, "piecework.runtime.engine.text")
_POLL_SECONDS = 0.1
_END_SECONDS = 10.0  # How long the other ranks may take to end after the first.
_RESTART_SECONDS = 1.0  # Least time from one start to the next.
_STOPPING = (signal.SIGINT, signal.SIGTERM)
# Exit codes of ranks and of this process, except the last one: a rank could not reach rank 0.
EXIT_ENDED, EXIT_ENGINE_GONE, EXIT_NEVER_JOINED = 0, 1, 3


def run_node(config: EngineConfig, *, log_level: str, environment: Mapping[str, str]) -> int:
    """Run this node's ranks until rank 0's server ends or a signal arrives. Return the exit code.

    The code is 0 after a signal or a regular end of the server, and 1 if the server did not
    restart. It is 2 if the ranks cannot join for a reason that the user can correct, which is
    printed.
    """
    set_up_logging(log_level)
    read_key(config.dist_key_file)
    stopping: list[int] = []
    for number in _STOPPING:
        signal.signal(number, lambda number, _: stopping.append(number))
    joined = False
    while not stopping:
        began = time.monotonic()
        with _ranks(config, log_level, environment) as ranks:
            logger.info(
                "node %d: rank%s %s join at %s",
                config.node_rank,
                "s" * (len(ranks) > 1),
                ", ".join(map(str, ranks)),
                config.dist_init_addr,
            )
            code = _first_end(ranks, stopping)
            if code is None:
                break
            reasons: dict[str, None] = {}  # The reasons that the ranks printed, each line once.
            for process in ranks.values():
                assert process.stdout is not None
                process.kill()
                for line in process.stdout.read().splitlines():
                    with contextlib.suppress(ValueError):
                        reasons[" ".join(str(json.loads(line)).split())] = None
        if code == EXIT_ENDED:
            logger.info("node 0's server has ended")
            return EXIT_ENDED
        if code in (EXIT_USER_ERROR, EXIT_NEVER_JOINED):
            reason = "; ".join(reasons) or "see above"
            print(f"piecework serve: error: {reason}", file=sys.stderr, flush=True)
            # If the ranks had joined before, the user of this node made no mistake.
            late = code == EXIT_NEVER_JOINED and joined
            return EXIT_ENGINE_GONE if late else EXIT_USER_ERROR
        joined = True
        logger.error("the engine has ended unexpectedly; joining it again")
        time.sleep(max(0.0, began + _RESTART_SECONDS - time.monotonic()))
    return EXIT_ENDED


@contextmanager
def _ranks(
    config: EngineConfig, log_level: str, environment: Mapping[str, str]
) -> Iterator[dict[int, subprocess.Popen[bytes]]]:
    """Start this node's ranks. They end with the block."""
    processes: dict[int, subprocess.Popen[bytes]] = {}
    # The ranks inherit these signals blocked, and ignore them as soon as they can.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    try:
        for rank in ranks_of(config.node_rank, tp_size=config.tp_size, nnodes=config.nnodes):
            process = subprocess.Popen(
                _COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**environment, **os.environ},
            )
            processes[rank] = process
            Job(settings=asdict(config), log_level=log_level.upper(), rank=rank).send(process)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield processes
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for process in processes.values():
            process.kill()
            process.communicate()


def _first_end(ranks: Mapping[int, subprocess.Popen[bytes]], stopping: list[int]) -> int | None:
    """Wait until the ranks end, at most `_END_SECONDS` after the first. Return the most specific
    exit code of all, or None if a signal arrives before.
    """
    ends: float | None = None
    while not stopping:
        codes = {rank: process.poll() for rank, process in ranks.items()}
        ended = {rank: code for rank, code in codes.items() if code is not None}
        if ended and ends is None:
            ends = time.monotonic() + _END_SECONDS
            for rank, code in ended.items():
                if code < 0:
                    logger.error("rank %d was ended by %s", rank, signal.Signals(-code).name)
                    return EXIT_ENGINE_GONE
        if len(ended) == len(ranks) or (ends is not None and time.monotonic() >= ends):
            for code in (EXIT_USER_ERROR, EXIT_NEVER_JOINED, EXIT_ENDED):
                if code in ended.values():
                    return code
            return EXIT_ENGINE_GONE
        time.sleep(_POLL_SECONDS)
    return None
