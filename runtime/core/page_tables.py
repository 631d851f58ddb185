"""The page tables of a step: which pages the tokens of each request lie in.

A table that is laid out anew costs time for each page of each request. On a device with memory of
its own, a table therefore stays, and only its changes are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from .padding import RESERVED_PAGE
from .request import Request, Scheduled

Array = npt.NDArray[Any]


class TableRows(NamedTuple):
    """The page table of a step on the host: request b has row `rows[b]` of `numbers`."""

    numbers: Array
    rows: list[int]


class StepTable(Protocol):
    """The table of one step: its rows on the host, and how it reaches the device."""

    host: TableRows

    def arrays(self) -> list[Array]:
        """Return the arrays that `on_device` needs, which are sent with all others of the step."""
        ...

    def on_device(self, sent: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the table [B, most pages], given the tensors of `arrays`."""
        ...


class NewTable:
    """A table that is laid out for one step."""

    def __init__(self, numbers: Array) -> None:
        self.host = TableRows(numbers, list(range(len(numbers))))

    def arrays(self) -> list[Array]:
        return [self.host.numbers]

    def on_device(self, sent: Sequence[torch.Tensor]) -> torch.Tensor:
        return sent[0]


@dataclass(slots=True)
class _Row:
    """A request's row of a table. It holds `pages[begin:end]` of the list that the request had."""

    number: int
    pages: list[Any]
    begin: int
    end: int


class KeptTable:
    """A table on a device, and its copy on the host. `windowed`: that of layers with windows.

    A request of the last step keeps its row. A cache that replaces a page makes a new list of
    pages, so equal lists differ only at their ends.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, *, windowed: bool) -> None:
        self._dtype, self._device, self._windowed = dtype, device, windowed
        self.forget()

    def forget(self) -> None:
        """Forget all rows, because a step that changed the copy may not have reached the device."""
        self._host: Array = np.empty((0, 0), numpy_dtype(self._dtype))
        self._table = torch.empty(0, 0, dtype=self._dtype, device=self._device)
        self._rows: dict[Request, _Row] = {}
        self._free: list[int] = []

    def step(self, scheduled: Sequence[Scheduled]) -> StepTable:
        """Give each request of a step its row, and return the table. Rows of others are freed."""
        lists = [self._pages_of(request) for request, _ in scheduled]
        most = max([len(pages) for pages, _ in lists])
        if len(lists) > self._host.shape[0] or most > self._host.shape[1]:
            self._grow(len(lists), most)
        before, self._rows = self._rows, {}
        for request, _ in scheduled:
            if (row := before.pop(request, None)) is not None:
                self._rows[request] = row
        self._free += [row.number for row in before.values()]
        places: list[int] = []
        values: list[int] = []
        for (request, _), (pages, begin) in zip(scheduled, lists, strict=True):
            row = self._rows.get(request)
            if row is None or row.pages is not pages or begin < row.begin or len(pages) < row.end:
                self._rewrite(request, pages, begin, places, values)
            elif (row.begin, row.end) != (begin, len(pages)):
                self._extend(row, begin, places, values)
        return _KeptStep(
            TableRows(self._host, [self._rows[request].number for request, _ in scheduled]),
            self._table,
            most,
            places,
            values,
        )

    def _pages_of(self, request: Request) -> tuple[list[Any], int]:
        if self._windowed:
            return request.window, request.window_begin
        return request.pages, 0

    def _numbers(self, pages: Sequence[Any]) -> Sequence[int]:
        return [block.number for block in pages] if self._windowed else pages

    def _grow(self, rows: int, pages: int) -> None:
        self.forget()
        shape = 1 << (rows - 1).bit_length(), 1 << (pages - 1).bit_length()
        self._host = np.full(shape, RESERVED_PAGE, self._host.dtype)
        self._table = torch.full(shape, RESERVED_PAGE, dtype=self._dtype, device=self._device)
        self._free = list(range(shape[0]))

    def _rewrite(
        self, request: Request, pages: list[Any], begin: int, places: list[int], values: list[int]
    ) -> None:
        """Write the row of a request that had none, or whose pages are others now."""
        row = self._rows.get(request)
        number = self._free.pop() if row is None else row.number
        held, wanted = self._host[number], np.full(self._host.shape[1], RESERVED_PAGE)
        wanted[begin : len(pages)] = self._numbers(pages[begin:])
        changed = np.flatnonzero(held != wanted)
        held[changed] = wanted[changed]
        places += (changed + number * len(held)).tolist()
        values += wanted[changed].tolist()
        self._rows[request] = _Row(number, pages, begin, len(pages))

    def _extend(self, row: _Row, begin: int, places: list[int], values: list[int]) -> None:
        """Write pages that the request got at the end of its list, and holes at its beginning."""
        held, first = self._host[row.number], row.number * self._host.shape[1]
        end = len(row.pages)
        added = self._numbers(row.pages[row.end :])
        held[row.end : end] = added
        held[row.begin : begin] = RESERVED_PAGE
        places += [*range(first + row.end, first + end), *range(first + row.begin, first + begin)]
        values += [*added, *[RESERVED_PAGE] * (begin - row.begin)]
        row.begin, row.end = begin, end


class _KeptStep:
    """The rows of one step in a `KeptTable`, and its changes: `values` at flat `places`."""

    def __init__(
        self, host: TableRows, table: torch.Tensor, most: int, places: list[int], values: list[int]
    ) -> None:
        self.host, self._table, self._most = host, table, most
        self._places, self._values = places, values

    def arrays(self) -> list[Array]:
        arrays: list[Array] = [np.array(self.host.rows)]
        if self._places:
            arrays += [np.array(self._places), np.array(self._values, self.host.numbers.dtype)]
        return arrays

    def on_device(self, sent: Sequence[torch.Tensor]) -> torch.Tensor:
        rows, *changes = sent
        if changes:
            self._table.view(-1).index_copy_(0, *changes)
        # A copy, because the next step changes the table.
        return self._table[:, : self._most].index_select(0, rows)


def new_tables(
    scheduled: Sequence[Scheduled], dtype: torch.dtype, *, only_windows: bool
) -> list[StepTable]:
    """Return the tables of a step: of layers that keep all pages, then of windowed layers."""
    requests = [request for request, _ in scheduled]
    most = max([len(request.pages) for request in requests])
    padding, own = [RESERVED_PAGE] * most, numpy_dtype(dtype)
    tables: list[StepTable] = []
    if not only_windows:
        rows = [request.pages + padding[len(request.pages) :] for request in requests]
        tables.append(NewTable(np.array(rows, own)))
    if requests[0].window:
        rows = [
            padding[: request.window_begin]
            + [block.number for block in request.window[request.window_begin :]]
            + padding[len(request.window) :]
            for request in requests
        ]
        tables.append(NewTable(np.array(rows, own)))
    return tables


class KeptTables:
    """The tables of a model on a device. See `new_tables`."""

    def __init__(self, dtype: torch.dtype, device: torch.device, *, only_windows: bool) -> None:
        self._only_windows = only_windows
        self._all = KeptTable(dtype, device, windowed=False)
        self._windows = KeptTable(dtype, device, windowed=True)

    def step(self, scheduled: Sequence[Scheduled]) -> list[StepTable]:
        tables = [] if self._only_windows else [self._all.step(scheduled)]
        if scheduled[0].request.window:
            tables.append(self._windows.step(scheduled))
        return tables

    def forget(self) -> None:
        self._all.forget()
        self._windows.forget()


@cache
def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return np.dtype(str(dtype).removeprefix("torch."))
