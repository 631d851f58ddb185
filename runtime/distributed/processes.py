"""Starts the other ranks of an engine as processes, which end when this one does."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ...kernels.collectives import TENSOR_PARALLEL, has_group, set_group
from ...kernels.detect import detect
from ...kernels.platform import Platform
from ..config import EngineConfig
from .channel import Leader, MakeGroup
from .ranks import ALONE, Ranks

logger = logging.getLogger(__name__)

_OF_AN_ENGINE = "piecework.runtime.distributed.rank_process"
EXIT_USER_ERROR = 2
END = "end"
"""The call that ends a rank."""
_END_SECONDS = 5.0
_LOOPBACK = "127.0.0.1"


def start_ranks(config: EngineConfig, when_lost: Callable[[str], None] | None = None) -> Ranks:
    """The ranks of an engine, seen from rank 0, which this process is; the others begin to load.

    `when_lost`: called, in a thread of its own, with a line that says which rank ended
    unexpectedly; else the process ends. Raises `ValueError` where the machine has too few devices.
    """
    if config.tp_size == 1:
        return ALONE
    if has_group(TENSOR_PARALLEL):
        raise ValueError(
            "a process has one engine of several ranks at a time: delete the LLM that it has, or "
            "take another process"
        )
    detect(config.device).check_ranks(config.tp_size)
    return start_processes(_OF_AN_ENGINE, asdict(config), config.tp_size, when_lost)


def start_processes(
    module: str,
    config: dict[str, Any],
    size: int,
    when_lost: Callable[[str], None] | None = None,
) -> Ranks:
    """`size` ranks, of which the others run `module`; its job has `config`."""
    # torch would listen on all addresses of the machine.
    listener = socket.create_server((_LOOPBACK, 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        _LOOPBACK,
        port,
        size,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    processes = _Processes(module, when_lost or _leave)
    connections = [
        processes.start({"config": config, "rank": rank, "size": size, "port": port})
        for rank in range(1, size)
    ]
    return Leader(connections, group_maker(store), processes.end)


def group_maker(store: Any) -> MakeGroup:
    """What makes a rank's group once all ranks meet at `store`."""

    def make_group(platform: Platform, rank: int, size: int) -> None:
        set_group(TENSOR_PARALLEL, platform.make_group(store, rank, size))

    return make_group


def local_store(port: int, size: int) -> Any:
    """Where the ranks of this machine meet, seen from one that is not rank 0."""
    return TCPStore(_LOOPBACK, port, size, is_master=False)


class _Processes:
    """The processes of the other ranks."""

    def __init__(self, module: str, when_lost: Callable[[str], None]) -> None:
        self._command = (sys.executable, "-m", module)
        self._when_lost, self._ending = when_lost, False
        self._running: list[tuple[subprocess.Popen[bytes], Connection]] = []

    def start(self, job: dict[str, Any]) -> Connection:
        """A rank that gets its job; the connection to it."""
        ours, theirs = Pipe()
        process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, pass_fds=[theirs.fileno()], close_fds=True
        )
        assert process.stdin is not None
        level = logging.getLevelName(logging.getLogger().getEffectiveLevel())
        line = json.dumps({**job, "connection": theirs.fileno(), "log_level": level})
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()
        theirs.close()
        self._running.append((process, ours))
        threading.Thread(
            target=self._watch, args=(job["rank"], process), name="rank", daemon=True
        ).start()
        return ours

    def end(self) -> None:
        """All of them: in order where they listen, and else by force."""
        self._ending = True
        for process, connection in self._running:
            connection.close()
            assert process.stdin is not None
            process.stdin.close()
        for process, _ in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            process.kill()
        set_group(TENSOR_PARALLEL, None)
        if dist.is_initialized():
            dist.destroy_process_group()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        # One that the user can mend rank 0 hears through the connection.
        if not self._ending and code != EXIT_USER_ERROR:
            self._when_lost(f"rank {rank} ended unexpectedly (exit code {code})")


def _leave(line: str) -> None:
    """Without the interpreter's end: the main thread may wait for the rank in a collective."""
    logger.error("%s, and the engine with it", line)
    os._exit(1)
