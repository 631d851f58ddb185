"""Starts the other ranks of an engine as processes that end with this one, and waits for the ranks
of other machines.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ...kernels.collectives import TENSOR_PARALLEL, get_group, has_group, set_group
from ...kernels.detect import detect
from ...kernels.platform import Platform
from ..config.engine import DIST_TIMEOUT, EngineConfig
from ..files.resolve import resolve_model_path
from ..loader.loader import read_model_config
from ..process.parent import ENVIRONMENT
from .channel import Channel, Follower, Leader, MakeGroup
from .join import Hello, accept, await_ranks, hello, keep_to_interface, listen
from .ranks import ALONE, Ranks
from .sealed import Sealed, hung_up, read_key

logger = logging.getLogger(__name__)

_RANK_PROCESS = "piecework.runtime.engine.rank_process"
KILLED_WITH_PARENT = "piecework.runtime.process.parent"
EXIT_USER_ERROR = 2
END = "end"  # The call that ends a rank.
_END_SECONDS = 5.0
_LOOPBACK = "127.0.0.1"


class OtherNodes(NamedTuple):
    """The machines whose ranks join. `ranks` maps their ranks to nodes."""

    listener: socket.socket
    key: bytes
    here: Hello
    ranks: dict[int, int]


def start_ranks(config: EngineConfig, when_lost: Callable[[str], None] | None = None) -> Ranks:
    """Start the ranks of an engine. This process is rank 0. The others begin to load.

    If a rank ends unexpectedly, a thread calls `when_lost` with a line that names the rank. Without
    `when_lost`, this process ends in the same way as the rank. Raise `ValueError` if the machine
    has too few devices, or if another machine does not join.
    """
    if config.tp_size == 1:
        return ALONE
    if has_group(TENSOR_PARALLEL):
        raise ValueError(
            "a process has one engine of several ranks at a time: delete its LLM, or use another "
            "process"
        )
    if config.node_rank > 0:
        raise ValueError(
            f"--node-rank {config.node_rank} has no rank 0; run `piecework serve` there with the "
            "same settings"
        )
    # Check this before processes allocate memory.
    path = resolve_model_path(config.model_path)
    if config.tp_size > (heads := read_model_config(path, config.model_code).num_heads):
        raise ValueError(f"--tp-size {config.tp_size} is more than the {heads} heads of {path}")
    detect(config.device).check_ranks(config.tp_size // config.nnodes)
    others = None
    if config.nnodes > 1:
        assert config.dist_init_addr is not None
        key, here = read_key(config.dist_key_file), hello(config, 0)
        each = config.tp_size // config.nnodes
        nodes = {rank: rank // each for rank in range(each, config.tp_size)}
        others = OtherNodes(listen(config.dist_init_addr), key, here, nodes)
    return start_processes(
        _RANK_PROCESS,
        asdict(config),
        config.tp_size,
        when_lost,
        seconds=config.dist_timeout,
        others=others,
    )


def start_processes(
    module: str,
    config: dict[str, Any],
    size: int,
    when_lost: Callable[[str], None] | None = None,
    *,
    seconds: float = DIST_TIMEOUT,
    others: OtherNodes | None = None,
) -> Ranks:
    """Start `size` ranks. Those other than 0 run `module`, whose job holds `config`.

    `seconds` is the timeout for a rank.
    """
    host = _LOOPBACK if others is None else others.listener.getsockname()[0]
    local_size = size - (0 if others is None else len(others.ranks))
    processes = _Processes(module, when_lost)
    with contextlib.ExitStack() as unless_started:
        if others is not None:
            unless_started.enter_context(others.listener)
            keep_to_interface(host)
        store, port = _make_store(host, size, seconds)
        job = {"config": config, "size": size, "port": port, "seconds": seconds}
        job |= {"local_size": local_size, "is_server": when_lost is None}
        unless_started.callback(processes.end)
        connections: list[Channel] = [
            processes.start({**job, "rank": rank, "host": host}) for rank in range(1, local_size)
        ]
        if others is not None:
            joined = await_ranks(others.listener, others.key, others.here, others.ranks, seconds)
            for connection in joined:
                accept(connection, job)
            processes.joined(joined, others.ranks)
            connections += joined
        for channel in connections:
            _limit_sending(channel, seconds)
        unless_started.pop_all()
    return Leader(connections, _group_maker(store, seconds), processes.end, local_size=local_size)


def _limit_sending(connection: Channel, seconds: float) -> None:
    """Set a timeout for sends, because a stopped rank reads nothing. See socket(7)."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        whole = int(seconds)
        limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def follower(job: dict[str, Any], leader: Channel | None = None) -> Follower:
    """Return the `Ranks` of a rank other than 0.

    `job` is the rank's job. `leader` is the connection to a rank 0 on another machine.
    """
    store = TCPStore(
        job["host"],
        job["port"],
        job["size"],
        is_master=False,
        timeout=timedelta(seconds=job["seconds"]),
    )
    return Follower(
        job["rank"],
        job["size"],
        leader or Connection(job["connection"]),
        _group_maker(store, job["seconds"]),
        local_size=job["local_size"],
    )


def _group_maker(store: Any, seconds: float) -> MakeGroup:
    """Return a function that makes a rank's group. All ranks meet at `store`.

    `seconds` is the timeout of its collectives.
    """

    def make_group(platform: Platform, rank: int, size: int) -> None:
        set_group(TENSOR_PARALLEL, platform.make_group(store, rank, size, seconds=seconds))

    return make_group


def _make_store(host: str, size: int, seconds: float) -> tuple[Any, int]:
    """Return the store where the ranks meet, and its port."""
    # Without a listener of ours, torch listens on all addresses of the machine.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        size,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=timedelta(seconds=seconds),
    )
    return store, port


class _Processes:
    """The other ranks: processes on this machine, and connections to ranks of other machines."""

    def __init__(self, module: str, when_lost: Callable[[str], None] | None) -> None:
        self._module = module
        self._when_lost, self._ending = when_lost, False
        self._running: list[tuple[subprocess.Popen[bytes], Channel]] = []
        self._joined: Sequence[Sealed] = ()

    def start(self, job: dict[str, Any]) -> Channel:
        """Start a rank, give it its job and return the connection to it."""
        ours, theirs = Pipe()
        # The kernel kills the rank with the thread that starts it. A thread of a user of `LLM` may
        # end before the engine does.
        lasting = threading.current_thread() is threading.main_thread()
        process = subprocess.Popen(
            (sys.executable, "-m", *[KILLED_WITH_PARENT] * lasting, self._module),
            stdin=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            close_fds=True,
            env={**ENVIRONMENT, **os.environ},
        )
        give_job(process, {**job, "connection": theirs.fileno()})
        theirs.close()
        self._running.append((process, ours))
        watch = partial(self._watch, job["rank"], process)
        threading.Thread(target=watch, name="rank", daemon=True).start()
        return ours

    def joined(self, connections: Sequence[Sealed], nodes: dict[int, int]) -> None:
        """Watch the connections of ranks of other machines. `nodes` maps ranks to nodes."""
        self._joined = connections
        for connection, rank in zip(connections, sorted(nodes), strict=True):
            name = f"rank {rank} of node {nodes[rank]}"
            watch = partial(self._watch_connection, name, connection)
            threading.Thread(target=watch, name="rank", daemon=True).start()

    def end(self, announce: Callable[[], None] | None = None) -> None:
        """End all ranks: regularly if they respond, otherwise by force.

        `announce` sends the end to the ranks. It is None if the ranks have failed.
        """
        self._ending = True
        if announce is not None:
            announce()
        for connection in (*self._joined, *(own for _, own in self._running)):
            connection.close()
        for process, _ in self._running:
            assert process.stdin is not None
            process.stdin.close()
        for process, _ in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            process.kill()
        set_group(TENSOR_PARALLEL, None)
        # After a failure, libraries may wait here for a rank that is gone.
        if announce is not None and dist.is_initialized():
            dist.destroy_process_group()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        # Rank 0 receives errors that the user can correct by the connection.
        if not self._ending and code != EXIT_USER_ERROR:
            self._lost(f"rank {rank} {how_ended(code)}", killed=code == -signal.SIGKILL)

    def _watch_connection(self, name: str, connection: Sealed) -> None:
        peer = connection.peer
        hung_up(connection, None)
        if not self._ending:
            self._lost(f"{name} ({peer}) has ended, or cannot be reached any more", killed=True)

    def _lost(self, line: str, *, killed: bool) -> None:
        if self._when_lost is not None:
            self._when_lost(line)
            # A rank that waits in shared memory does not notice that another one is gone.
            if has_group(TENSOR_PARALLEL):
                get_group(TENSOR_PARALLEL).give_up()
            return
        logger.error("%s, and the engine with it", line)
        # A stopped process would not end by itself.
        for process, _ in self._running:
            process.kill()
        # Exit without the interpreter's end, because the main thread may wait in a collective. If
        # the rank was killed, be killed too, because the cause may be unrelated to the computation.
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)


def give_job(process: subprocess.Popen[bytes], job: dict[str, Any]) -> None:
    """Write the job of a rank to its standard input, as a line."""
    assert process.stdin is not None
    level = logging.getLevelName(logging.getLogger().getEffectiveLevel())
    # If the process has ended already, its exit code says so.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps({**job, "log_level": level}).encode() + b"\n")
        process.stdin.flush()


def how_ended(code: int) -> str:
    """Return how a process ended, by its exit code."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended unexpectedly (exit code {code})"
