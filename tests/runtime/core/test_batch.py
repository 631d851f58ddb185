"""Where the tokens of a step lie, however many each request has."""

from __future__ import annotations

import tracemalloc
from enum import Enum, auto
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piecework.runtime.cache.block_pool import HOLE, Block
from piecework.runtime.core import batch as batches
from piecework.runtime.core.batch import Batch, Layout, build_batch
from piecework.runtime.core.generation import GenerateRequest
from piecework.runtime.core.page_tables import KeptTables
from piecework.runtime.core.request import Request, Scheduled
from piecework.runtime.core.sampling_params import SamplingParams

_PAGE = 4


def request_of(length: int, first_page: int, holes: int) -> Request:
    message = GenerateRequest(
        rid=str(first_page), input_ids=list(range(100, 100 + length)), params=SamplingParams()
    )
    request = Request(message, seed=1, stop_ids=frozenset(), max_tokens=99)
    count = -(-length // _PAGE)
    request.pages = list(range(first_page, first_page + count))
    request.window_begin = min(holes, count - 1)
    request.window = [HOLE] * request.window_begin + [
        Block(page + 500) for page in request.pages[request.window_begin :]
    ]
    return request


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    news=st.lists(st.integers(1, 6), min_size=5, max_size=5) | st.just([1] * 5),
    holes=st.integers(0, 3),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    only_windows=st.booleans(),
)
def test_each_token_has_its_id_its_position_and_its_slot(
    lengths: list[int], news: list[int], holes: int, dtype: torch.dtype, only_windows: bool
) -> None:
    scheduled, ids, positions, slots, ends = [], [], [], [], []
    for number, (length, new) in enumerate(zip(lengths, news, strict=False)):
        request = request_of(length, 10 * number, holes)
        request.num_computed = max(length - new, request.window_begin * _PAGE)
        scheduled.append(Scheduled(request, length - request.num_computed))
        for position in range(request.num_computed, length):
            ids.append(100 + position)
            positions.append(position)
            slots.append((10 * number + position // _PAGE) * _PAGE + position % _PAGE)
        ends.append(len(ids) - 1)
    device = torch.device("cpu")
    batch = build_batch(scheduled, _PAGE, device, dtype, only_windows=only_windows)
    assert batch.input_ids.tolist() == ids and batch.positions.tolist() == positions
    assert batch.sample_rows.tolist() == ends and batch.num_tokens == len(ids)
    metadata = batch.metadata
    window = metadata if only_windows else metadata.window
    assert window is not None and metadata.slot_mapping.dtype == dtype
    of_windows = np.array(slots) + 500 * _PAGE
    assert window.slot_mapping.tolist() == of_windows.tolist()
    if not only_windows:
        assert metadata.slot_mapping.tolist() == slots
    for row, (request, _) in enumerate(scheduled):
        known = window.block_table[row, request.window_begin : len(request.pages)]
        assert known.tolist() == [page + 500 for page in request.pages[request.window_begin :]]


def fields(batch: Batch) -> list[object]:
    """All that a step is told of a batch without windows and states."""
    metadata = batch.metadata
    used = [-(-length // _PAGE) for length in metadata.seq_lens]
    return [
        *(metadata.query_lens, list(metadata.seq_lens), metadata.slot_mapping.tolist()),
        [row[:count].tolist() for row, count in zip(metadata.block_table, used, strict=True)],
        *(batch.input_ids.tolist(), batch.positions.tolist(), batch.sample_rows.tolist()),
        *(batch.samplers, batch.reach_end, batch.asks_no_more, batch.num_tokens),
    ]


def go_on(request: Request, token: int, next_page: int) -> None:
    """What a step and its reading do to a request."""
    request.num_computed = request.num_tokens
    request.add_placeholder(0)
    request.resolve([token])
    if len(request.pages) * _PAGE < request.num_tokens:
        request.pages.append(next_page)


class Change(Enum):
    """What happens between two steps, beside a token for each request."""

    NOTHING = auto()
    LEAVES = auto()
    COMES = auto()
    CHANGES_PLACES = auto()
    OTHER_PAGES = auto()
    TWO_TOKENS = auto()
    ONE_OF_TWO = auto()
    FAILED = auto()


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    changes=st.lists(st.sampled_from(Change), max_size=12),
    stays=st.booleans(),
)
def test_a_batch_that_goes_on_is_the_one_that_would_be_laid_out(
    lengths: list[int], changes: list[Change], stays: bool
) -> None:
    """On the host, and with page tables that stay on a device."""
    pages = count(1000)

    def new(length: int) -> Request:
        request = request_of(length, next(pages) * 10, 0)
        request.window = []
        request.window_begin = 0
        go_on(request, 7, next(pages))
        return request

    device = torch.device("cpu")
    layout, requests = Layout(_PAGE, device, torch.int64), [new(length) for length in lengths]
    kept = KeptTables(torch.int64, device, only_windows=False)
    for step, change in enumerate([Change.NOTHING, *changes]):
        if change is Change.LEAVES and len(requests) > 1:
            requests.pop(0)
        elif change is Change.COMES:
            requests.append(new(step % 9 + 1))
        elif change is Change.CHANGES_PLACES:
            requests.reverse()
        elif change is Change.OTHER_PAGES:
            requests[-1].pages = [next(pages) for _ in requests[-1].pages]
        elif change in (Change.TWO_TOKENS, Change.ONE_OF_TWO):
            computed = requests[0].num_computed
            go_on(requests[0], 50, next(pages))
            requests[0].num_computed = computed
        scheduled = [Scheduled(each, each.num_tokens - each.num_computed) for each in requests]
        if change is Change.ONE_OF_TWO:
            scheduled[0] = Scheduled(requests[0], 1)
        if stays:
            batch = build_batch(scheduled, _PAGE, device, torch.int64, kept=kept)
        else:
            batch = layout.batch(scheduled)
        assert fields(batch) == fields(build_batch(scheduled, _PAGE, device, torch.int64))
        if change is not Change.FAILED:
            for row, (request, num_new) in enumerate(scheduled):
                if request.num_computed + num_new < request.num_tokens:
                    request.num_computed += num_new
                else:
                    go_on(request, 10 * step + row, next(pages))


def test_decodes_of_the_same_requests_are_the_same_batch_again() -> None:
    request = request_of(5, 10, 0)
    request.window = []
    go_on(request, 7, 12)
    layout = Layout(_PAGE, torch.device("cpu"), torch.int64)
    first = layout.batch([Scheduled(request, 1)])
    go_on(request, 8, 12)
    assert layout.batch([Scheduled(request, 1)]) is first


@given(data=st.data())
def test_tables_that_stay_equal_those_laid_out_anew(data: st.DataObject) -> None:
    """Requests come, go, get pages, lose those before their windows, and get other pages."""
    numbers = count(1000)
    kept = KeptTables(torch.int32, torch.device("cpu"), only_windows=False)
    requests = [request_of(data.draw(st.integers(1, 30)), 10 * row, 0) for row in range(3)]
    for _ in range(8):
        if data.draw(st.booleans()):
            requests = data.draw(st.permutations(requests))[:3]
            requests += [request_of(data.draw(st.integers(1, 60)), next(numbers), 1)]
        for request in requests:
            added = data.draw(st.integers(0, 2))
            request.pages += [next(numbers) for _ in range(added)]
            request.window += [Block(next(numbers)) for _ in range(added)]
            if data.draw(st.booleans()) and request.window_begin < len(request.window) - 1:
                request.window[request.window_begin] = HOLE
                request.window_begin += 1
            if data.draw(st.booleans()):
                request.pages = [*request.pages[:-1], next(numbers)]
            # Nothing of these is computed, so the tables alone decide what slots there are.
            request.num_computed = request.num_tokens - 1
        scheduled = [Scheduled(request, 1) for request in requests]
        form = scheduled, _PAGE, torch.device("cpu"), torch.int32
        own, new = build_batch(*form, kept=kept).metadata, build_batch(*form).metadata
        assert torch.equal(own.block_table, new.block_table)
        assert torch.equal(own.slot_mapping, new.slot_mapping)
        assert own.window is not None and new.window is not None
        assert torch.equal(own.window.block_table, new.window.block_table)


def test_a_step_of_many_long_requests_costs_the_host_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """256 requests of 500 pages: their tables have 1 MB, and only new pages are sent."""
    requests = []
    for number in range(256):
        request = request_of(500 * _PAGE, 1000 * number, 0)
        request.window, request.num_computed = [], request.num_tokens - 1
        requests.append(request)
    sent: list[int] = []
    to_device = batches.to_device

    def counted(arrays: list[Any], device: torch.device) -> list[torch.Tensor]:
        sent.append(sum(array.nbytes for array in arrays))
        return to_device(arrays, device)

    monkeypatch.setattr(batches, "to_device", counted)
    kept = KeptTables(torch.int64, torch.device("cpu"), only_windows=False)
    peaks = []
    for step in range(3):
        for request in requests[::2] if step else ():
            go_on(request, 7, 999)
            request.num_computed = request.num_tokens - 1
        scheduled = [Scheduled(request, 1) for request in requests]
        tracemalloc.start()
        build_batch(scheduled, _PAGE, torch.device("cpu"), torch.int64, kept=kept)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert sent[0] > 10**6 > 16 * sent[1] and max(peaks[1:]) < peaks[0] / 20, (sent, peaks)
