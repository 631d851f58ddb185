"""Measure the peak rates of this machine's memory and cores, on the threads that kernels use."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from ..machine.huge_pages import on_huge_pages
from .build import load_kernels

# In the order of their numbers in `piecework_multiply_adds`.
_KINDS = ("float32", "bfloat16", "float16", "int8")
_STREAM_BYTES = 2**30
_FIRST_ROUNDS = 1 << 20
_SECONDS = 0.1  # Least duration of a loop of multiply-adds.


class Peaks(NamedTuple):
    """Peak rates.

    Attributes:
        triad, read: Bytes per second of a = b + 3 c over 1 GiB, and of reading 1 GiB.
        operations: Operations per second by dtype. A multiply-add counts as two. Dtypes without an
            instruction are missing.
    """

    triad: float
    read: float
    operations: dict[str, float]


def measure_peaks(rounds: int = 5) -> Peaks | None:
    """Return the best of `rounds` measurements, or None if there are no kernels."""
    library = load_kernels()
    if library is None:
        return None
    threads = torch.get_num_threads()
    count = _STREAM_BYTES // 4 // 3
    a, b, c = on_huge_pages(torch.empty(3, count)).fill_(1)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (a, b, c)]
    number, bytes_moved = ctypes.c_int64(count), 3 * 4 * count
    triad = _least(rounds, lambda: library.piecework_triad(*pointers, number, threads))
    whole = ctypes.c_int64(3 * count)
    read = _least(rounds, lambda: library.piecework_read(pointers[0], whole, threads))
    multiply_adds = library.piecework_multiply_adds
    multiply_adds.restype = ctypes.c_int64
    operations = {}
    for place, kind in enumerate(_KINDS):
        done, steps, seconds = 1, _FIRST_ROUNDS, 0.0
        while done and seconds < _SECONDS:
            steps *= 2
            began = time.perf_counter()
            done = multiply_adds(place, ctypes.c_int64(steps), threads)
            seconds = time.perf_counter() - began
        if done:
            again = partial(multiply_adds, place, ctypes.c_int64(steps), threads)
            operations[kind] = done / _least(rounds, again)
    return Peaks(bytes_moved / triad, bytes_moved / read, operations)


def _least(rounds: int, call: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(1 + rounds):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best
