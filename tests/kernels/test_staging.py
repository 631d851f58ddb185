"""What the host sends to the device arrives as it was, each array where vector loads want it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piecework.kernels import staging

ARRAYS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), min_size=1, max_size=2),
        st.sampled_from([np.dtype(kind) for kind in ("int64", "int32", "float32", "float64")]),
    ).map(lambda drawn: np.arange(int(np.prod(drawn[0])), dtype=drawn[1]).reshape(drawn[0]) - 2),
    max_size=5,
)


@given(arrays=ARRAYS)
def test_packed_arrays_come_out_as_they_went_in(arrays: list[np.ndarray]) -> None:
    offsets, size = staging._layout(arrays)
    packed = torch.full((size,), 255, dtype=torch.uint8)
    staging._pack(arrays, offsets, packed)
    for array, tensor in zip(arrays, staging._unpack(arrays, offsets, packed), strict=True):
        assert (
            tensor.shape == array.shape
            and np.array_equal(tensor.numpy(), array)
            and tensor.numpy().dtype == array.dtype
        )
    assert all(offset % 16 == 0 for offset in offsets)


@given(arrays=ARRAYS)
def test_on_the_host_they_are_handed_over(arrays: list[np.ndarray]) -> None:
    for array, tensor in zip(arrays, staging.to_device(arrays, torch.device("cpu")), strict=True):
        assert np.array_equal(tensor.numpy(), array) and tensor.numpy().dtype == array.dtype


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_a_thousand_steps_in_flight_do_not_overwrite_each_other() -> None:
    device = torch.device("cuda")
    torch.cuda._sleep(100_000_000)
    sent = [
        staging.to_device([np.full(100, number), np.full(3, number, np.int32)], device)
        for number in range(1000)
    ]
    for number, (longs, ints) in enumerate(sent):
        assert bool((longs == number).all()) and bool((ints == number).all())


def test_tensors_of_the_host_are_there_already() -> None:
    tensor = torch.arange(3)
    (there,) = staging.HostCopy([tensor]).wait()
    assert there is tensor and staging.HostCopy([]).wait() == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_results_arrive_as_they_were_when_they_were_sent() -> None:
    numbers = torch.zeros(1000, device="cuda")
    torch.cuda._sleep(100_000_000)
    copies = []
    for number in range(100):
        numbers.fill_(number)
        copies.append(staging.HostCopy([numbers]))
    assert all(bool((copy.wait()[0] == number).all()) for number, copy in enumerate(copies))
