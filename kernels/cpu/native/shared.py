"""Collectives through memory that all ranks of a machine have mapped (shared.h)."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import torch

from ...collectives import CollectiveError
from .build import Kernels
from .parts import RANKS
from .reduce_norm import all_reduce_norm

SLOT_BYTES = 2**20  # Bytes that a rank passes at once. Longer messages are split.
MOST_RANKS = 64
_SPINS = 4000
_OPS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "broadcast",
    "decode step",
    "all_reduce and norm",
)
_SUMMED = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
)
_BYTES = len(_SUMMED)  # In place of a dtype: numbers that are moved and not summed.
_LATE, _MISMATCH = 1, 2


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("number", "count")),
        *((name, ctypes.c_int32) for name in ("op", "dtype")),
    ]

    def __str__(self) -> str:
        if self.number == 0:
            return "nothing yet"
        unit = "bytes" if self.dtype == _BYTES else str(_SUMMED[self.dtype]).removeprefix("torch.")
        return f"{_OPS[self.op]} no. {self.number} of {self.count} {unit}"


class _Failure(ctypes.Structure):
    _fields_ = [
        *(("fault", ctypes.c_int32), ("rank", ctypes.c_int32), ("missing", ctypes.c_uint64)),
        *(("mine", _Call), ("theirs", _Call)),
    ]


class SharedMemoryGroup:
    """`collectives.Group` of `size` ranks that have mapped `memory`, `region_bytes(size)` of zeros.

    Raises `CollectiveError` if another rank is in another collective, has given up, or does not
    join within `seconds`. The group cannot be used afterwards. If `is_crowded`, ranks share cores,
    so waiting ranks yield at once.
    """

    def __init__(
        self,
        kernels: Kernels,
        memory: mmap.mmap,
        rank: int,
        size: int,
        *,
        seconds: float,
        is_crowded: bool = False,
    ) -> None:
        assert len(memory) >= region_bytes(kernels, size) and 0 <= rank < size <= MOST_RANKS
        self.rank, self.size, self.seconds = rank, size, seconds
        self.library = library = kernels.part(RANKS)
        # Keeps the memory alive, and the memory keeps its file, as long as the group exists.
        self._memory = (ctypes.c_char * len(memory)).from_buffer(memory)
        library.piecework_join.restype = ctypes.c_void_p
        self.member = ctypes.c_void_p(
            library.piecework_join(
                ctypes.byref(self._memory),
                rank,
                size,
                ctypes.c_int64(SLOT_BYTES),
                ctypes.c_double(seconds),
                0 if is_crowded else _SPINS,
            )
        )

    @property
    def slot_bytes(self) -> int:
        """Bytes that a rank passes at once."""
        return SLOT_BYTES

    def __del__(self) -> None:
        if member := getattr(self, "member", None):
            self.library.piecework_leave(member)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        self._run("all_reduce", x, out, x.numel(), self._summed(x))
        return out

    def all_reduce_(self, x: torch.Tensor) -> None:
        self._run("all_reduce", x, x, x.numel(), self._summed(x))

    def all_reduce_norm(
        self, norm: str, x: torch.Tensor, residual: torch.Tensor, *rest: Any
    ) -> tuple[torch.Tensor, ...] | None:
        """See `fused_collectives.FusesNorms`."""
        return all_reduce_norm(self, norm, x, residual, *rest)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape[0] * self.size, *x.shape[1:])
        self._run("all_gather", x, out, x.nbytes)
        return out

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(self._part(x), *x.shape[1:])
        self._run("reduce_scatter", x, out, out.numel(), self._summed(x))
        return out

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        self._part(x)
        out = torch.empty_like(x)
        self._run("all_to_all", x, out, x.nbytes // self.size)
        return out

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        is_asked = self.rank == 0
        out = x.new_empty(x.shape[0] * self.size, *x.shape[1:]) if is_asked else None
        self._run("gather", x, out, x.nbytes)
        return out

    def broadcast(self, x: torch.Tensor) -> None:
        assert x.is_contiguous()
        self._run("broadcast", x, x, x.nbytes)

    def give_up(self) -> None:
        """End the wait of every rank with an error, now and in later calls. May be called from any
        thread.
        """
        self.library.piecework_give_up(self.member)

    def last_calls(self) -> list[str]:
        """Return the last call of each rank. May be called from any thread."""
        calls = [_Call() for _ in range(self.size)]
        for rank, call in enumerate(calls):
            self.library.piecework_last_call(self.member, rank, ctypes.byref(call))
        return [str(call) for call in calls]

    def check(self, succeeded: int) -> None:
        """Raise the error of a library call that did not succeed."""
        if not succeeded:
            raise self._fault()

    def _run(
        self, op: str, x: torch.Tensor, out: torch.Tensor | None, count: int, dtype: int = _BYTES
    ) -> None:
        assert x.device.type == "cpu" and x.is_contiguous()
        self.check(
            self.library.piecework_collective(
                self.member,
                _OPS.index(op),
                ctypes.c_void_p(x.data_ptr()),
                None if out is None else ctypes.c_void_p(out.data_ptr()),
                ctypes.c_int64(count),
                dtype,
                torch.get_num_threads(),
            )
        )

    def _part(self, x: torch.Tensor) -> int:
        rows, rest = divmod(x.shape[0], self.size)
        assert rest == 0, f"{x.shape[0]} rows are no multiple of {self.size} ranks"
        return rows

    @staticmethod
    def _summed(x: torch.Tensor) -> int:
        assert x.dtype in _SUMMED, f"numbers of {x.dtype} are not summed"
        return _SUMMED.index(x.dtype)

    def _fault(self) -> CollectiveError:
        failure = _Failure()
        self.library.piecework_failure(self.member, ctypes.byref(failure))
        me = f"rank {self.rank} is in {failure.mine}"
        if failure.fault == _MISMATCH:
            them = f"rank {failure.rank} in {failure.theirs}"
            return CollectiveError(f"ranks meet in different collectives: {me}, {them}")
        if failure.fault == _LATE:
            missing = [rank for rank in range(self.size) if failure.missing >> rank & 1]
            them = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            return CollectiveError(
                f"{me}, where {them} did not come within {self.seconds:g} s (--dist-timeout); rank "
                f"{failure.rank} has come to {failure.theirs}",
                missing,
            )
        return CollectiveError(f"{me}, and rank {failure.rank} has given up")


def region_bytes(kernels: Kernels, size: int) -> int:
    """Return the bytes of the memory of `size` ranks. Pages that are never touched take none."""
    library = kernels.part(RANKS)
    library.piecework_shared_bytes.restype = ctypes.c_int64
    return int(library.piecework_shared_bytes(size, ctypes.c_int64(SLOT_BYTES)))
