"""Where the tokens of a step lie, however many each request has."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from piecework.runtime.cache.block_pool import HOLE, Block
from piecework.runtime.engine.messages import GenerateRequest
from piecework.runtime.engine.request import Request
from piecework.runtime.executor.batch import Scheduled, build_batch
from piecework.runtime.sampling.params import SamplingParams

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
