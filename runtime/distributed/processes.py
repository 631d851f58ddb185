"""Starts the other ranks of an engine as processes that end with this one, and waits for the ranks
of other machines.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ...kernels.collectives import TENSOR_PARALLEL, get_group, has_group, set_group
from ...kernels.platform.detect import detect
from ...kernels.platform.rank_groups import RankGroups
from ..config.engine import DIST_TIMEOUT, EngineConfig
from ..files.resolve import resolve_model_path
from ..loader.loader import read_model_config
from ..process.job import EXIT_USER_ERROR, RANK, Job, command
from ..process.parent import ENVIRONMENT
from .channel import Channel, Follower, Leader, MakeGroup
from .join import Hello, accept, await_ranks, hello, keep_to_interface, listen
from .ranks import ALONE, Ranks
from .sealed import Sealed, hung_up, read_key

logger = logging.getLogger(__name__)

_TEXT = "piecework.runtime.engine.text"
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
        _TEXT,
        asdict(config),
        config.tp_size,
        when_lost,
        seconds=config.dist_timeout,
        others=others,
    )


def start_processes(
    kind: str,
    settings: dict[str, Any],
    size: int,
    when_lost: Callable[[str], None] | None = None,
    *,
    seconds: float = DIST_TIMEOUT,
    others: OtherNodes | None = None,
) -> Ranks:
    """Start `size` ranks, except rank 0, of the engine that the module `kind` builds of `settings`.

    `seconds` is the timeout for a rank.
    """
    host = _LOOPBACK if others is None else others.listener.getsockname()[0]
    local_size = size - (0 if others is None else len(others.ranks))
    processes = _Processes(kind, when_lost)
    with contextlib.ExitStack() as unless_started:
        if others is not None:
            unless_started.enter_context(others.listener)
            keep_to_interface(host)
        store, port = _make_store(host, size, seconds)
        shared: dict[str, Any] = {
            "settings": settings,
            "size": size,
            "local_size": local_size,
            "port": port,
            "timeout": seconds,
            "is_server": when_lost is None,
        }
        level = logging.getLevelName(logging.getLogger().getEffectiveLevel())
        job = Job(log_level=level, host=host, **shared)
        unless_started.callback(processes.end)
        connections: list[Channel] = [
            processes.start(replace(job, rank=rank)) for rank in range(1, local_size)
        ]
        if others is not None:
            joined = await_ranks(others.listener, others.key, others.here, others.ranks, seconds)
            for connection in joined:
                accept(connection, shared)
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


def follower(job: Job, leader: Channel | None = None) -> Follower:
    """Return the `Ranks` of a rank other than 0.

    `leader` is the connection to a rank 0 on another machine.
    """
    if leader is None:
        assert job.connection is not None
        leader = Connection(job.connection)
    store = TCPStore(
        job.host, job.port, job.size, is_master=False, timeout=timedelta(seconds=job.timeout)
    )
    make_group = _group_maker(store, job.timeout)
    return Follower(job.rank, job.size, leader, make_group, local_size=job.local_size)


def _group_maker(store: Any, seconds: float) -> MakeGroup:
    """Return a function that makes a rank's group. All ranks meet at `store`.

    `seconds` is the timeout of its collectives.
    """

    def make_group(platform: RankGroups, rank: int, size: int) -> None:
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

    def __init__(self, kind: str, when_lost: Callable[[str], None] | None) -> None:
        self._kind = kind
        self._when_lost, self._ending = when_lost, False
        self._running: list[tuple[subprocess.Popen[bytes], Channel]] = []
        self._joined: Sequence[Sealed] = ()

    def start(self, job: Job) -> Channel:
        """Start a rank, give it its job and return the connection to it."""
        ours, theirs = Pipe()
        # The kernel kills the rank with the thread that starts it. A thread of a user of `LLM` may
        # end before the engine does.
        lasting = threading.current_thread() is threading.main_thread()
        process = subprocess.Popen(
            command(RANK, self._kind, lasting=lasting),
            stdin=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            close_fds=True,
            env={**ENVIRONMENT, **os.environ},
        )
        replace(job, connection=theirs.fileno()).send(process)
        theirs.close()
        self._running.append((process, ours))
        watch = partial(self._watch, job.rank, process)
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
            how = (
                f"was ended by {signal.Signals(-code).name}"
                if code < 0
                else f"ended unexpectedly (exit code {code})"
            )
            self._lost(f"rank {rank} {how}", killed=code == -signal.SIGKILL)

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
