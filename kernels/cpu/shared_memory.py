"""Memory that the ranks of one machine share, and their group over it.

Rank 0 creates a file without a name in any folder, so nothing is left of it however the ranks end.
The others open it through rank 0's process.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import secrets
import subprocess
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from .native.build import Kernels, load_kernels
from .native.parts import RANKS
from .native.shared import MOST_RANKS, SharedMemoryGroup, region_bytes

_FILE = "piecework ranks"
_TOKEN_BYTES = 32


class Store(Protocol):
    """How ranks exchange values before they have a group: a store of `torch.distributed`."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes:
        """Wait until the key is set, and return its value."""
        ...


class NoSharedMemory(Exception):
    """Why these ranks cannot have such a group. The text is the same on every rank."""


def shared_memory_group(store: Store, rank: int, size: int, *, seconds: float) -> SharedMemoryGroup:
    """Return the group of all ranks that meet at `store`. Each rank calls this once, and nothing
    else may use the same keys.

    `seconds` is the timeout of a collective. Raise `NoSharedMemory`, or `ValueError` if ranks have
    different kernels.
    """
    offered: _Offer | None = None
    try:
        if rank == 0:
            offer: dict[str, Any]
            try:
                offered = _Offer.make(size)
                offer = offered.message()
            except (NoSharedMemory, OSError) as error:
                offer = {"obstacle": f"rank 0: {error}"}
            store.set("memory", json.dumps(offer))
        else:
            offer = json.loads(store.get("memory"))
        memory: mmap.mmap | None = None
        mine: dict[str, Any] = {"obstacle": offer.get("obstacle"), "cpus": _cpus()}
        if mine["obstacle"] is None:
            try:
                memory = offered.memory if offered is not None else _map(offer)
                mine["kernels"] = _name_of(_kernels())
            except (NoSharedMemory, OSError) as error:
                mine["obstacle"] = f"rank {rank}: {error}"
        store.set(f"joined {rank}", json.dumps(mine))
        joined = [json.loads(store.get(f"joined {each}")) for each in range(size)]
    finally:
        if offered is not None:
            os.close(offered.file)
    for each in joined:
        if each["obstacle"] is not None:
            raise NoSharedMemory(each["obstacle"])
    assert memory is not None
    _check_kernels([each["kernels"] for each in joined])
    cpus = set().union(*(each["cpus"] for each in joined))
    crowded = 0 < len(cpus) < size
    return SharedMemoryGroup(_kernels(), memory, rank, size, seconds=seconds, is_crowded=crowded)


class _Offer(NamedTuple):
    """Rank 0's memory. `file` is closed after the other ranks have opened it."""

    memory: mmap.mmap
    file: int
    token: str

    @classmethod
    def make(cls, size: int) -> _Offer:
        if size > MOST_RANKS:
            raise NoSharedMemory(f"at most {MOST_RANKS} ranks share memory")
        if not hasattr(os, "memfd_create"):
            raise NoSharedMemory("this system has no memfd_create")
        length, token = region_bytes(_kernels(), size), secrets.token_hex(_TOKEN_BYTES)
        file = os.memfd_create(_FILE, os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, length)
            memory = mmap.mmap(file, length)
        except BaseException:
            os.close(file)
            raise
        memory[: len(token)] = token.encode()
        return cls(memory, file, token)

    def message(self) -> dict[str, Any]:
        return {
            "path": f"/proc/{os.getpid()}/fd/{self.file}",
            "length": len(self.memory),
            "token": self.token,
        }


def _map(offer: dict[str, Any]) -> mmap.mmap:
    """Map the memory that rank 0 offers. The process id may belong to another process, on another
    machine or in another container.
    """
    length, token = offer["length"], offer["token"].encode()
    try:
        # Do not open any other file with that number, because opening a device may have effects.
        if not os.readlink(offer["path"]).startswith(f"/memfd:{_FILE}"):
            raise NoSharedMemory("rank 0 runs on another machine")
        file = os.open(offer["path"], os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise NoSharedMemory(f"rank 0's memory cannot be opened ({error})") from error
    try:
        if os.fstat(file).st_size != length:
            raise NoSharedMemory("rank 0 runs on another machine")
        memory = mmap.mmap(file, length)
    finally:
        os.close(file)
    if memory[: len(token)] != token:
        raise NoSharedMemory("rank 0 runs on another machine")
    return memory


def _kernels() -> Kernels:
    """Return the kernels with the collectives."""
    kernels = load_kernels()
    if kernels is None:
        raise NoSharedMemory("the C++ kernels cannot be built")
    try:
        kernels.need(RANKS)
    except (OSError, subprocess.SubprocessError) as error:
        raise NoSharedMemory(f"the C++ kernels lack collectives: {error}") from error
    return kernels


def _name_of(library: ctypes.CDLL) -> str:
    """Return the library's file name, which identifies the instruction set, the compiler and the
    sources.
    """
    return Path(library._name).name


def _check_kernels(names: list[str]) -> None:
    """Raise `ValueError` if ranks have different kernels: their sums would be equal, but not their
    products.
    """
    for rank, name in enumerate(names):
        if name != names[0]:
            raise ValueError(
                f"rank {rank} has other CPU kernels than rank 0 ({name}, {names[0]}): start all "
                "ranks with the same compiler, piecework and PIECEWORK_KERNELS_DIR"
            )


def _cpus() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
