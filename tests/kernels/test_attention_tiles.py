"""Tiles of Triton's attention fit the device, and what a device refuses is replaced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_steps import Step
from triton_interpreter import DEVICE

from piecework.kernels.triton import attention_layer, launches
from piecework.kernels.triton.attention import TritonAttention
from piecework.kernels.triton.attention_tiles import (
    MAX_SPLITS,
    Blocks,
    Shape,
    chosen_splits,
    decode_blocks,
    obstacle,
    prefill_blocks,
    window_splits,
)
from piecework.kernels.triton.device import Properties

A10 = Properties((8, 6), 84, 99 * 1024)
H100 = Properties((9, 0), 132, 227 * 1024)
TINY = Properties((8, 6), 84, 4096)


@pytest.mark.parametrize("device", [A10, H100])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_size", [64, 80, 128, 192, 256])
def test_every_tile_fits(head_size: int, itemsize: int, device: Properties) -> None:
    shape = Shape(4, head_size, itemsize)
    for blocks in (*prefill_blocks(shape, 512, device), *decode_blocks(shape, device)):
        assert shape.bytes_of(blocks) <= device.shared_memory
    assert obstacle(shape, device) is None


def test_a_gpu_with_more_memory_gets_larger_tiles() -> None:
    shape = Shape(2, 256, 2)
    small, large = (prefill_blocks(shape, 512, device)[0] for device in (A10, H100))
    assert (small.rows, large.rows) == (64, 128)


def test_a_device_that_no_tile_fits_has_an_obstacle() -> None:
    assert "8192" not in str(obstacle(Shape(1, 64, 2), A10))
    found = obstacle(Shape(1, 256, 2), TINY)
    assert found is not None and "shared memory" in found and "4096" in found


def test_a_refused_tile_is_replaced_by_a_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device refuses every tile but the last. The result is the same, and the next step does
    not try refused tiles again.
    """
    tried: list[Blocks] = []

    def refusing(function: Any) -> Any:
        def launch(self: Any, *given: Any) -> Any:
            blocks = next(one for one in given if isinstance(one, Blocks))
            tried.append(blocks)
            if blocks.keys > 16:
                raise launches.OutOfResources(200_000, 101_376, "shared memory")
            return function(self, *given)

        return launch

    monkeypatch.setattr(launches, "_accepted", {})
    for name in ("_prefill", "_decode"):
        method = getattr(attention_layer.Layer, name)
        monkeypatch.setattr(attention_layer.Layer, name, refusing(method))
    step = Step(
        [(9, 20), (1, 60)], page_size=16, heads=4, seed=1, dtype=torch.float16, device=DEVICE
    )
    backend = TritonAttention()
    actual = step.run(backend).double().cpu()
    assert (actual - step.expected(None)).norm() <= 1e-2 * step.expected(None).norm()
    assert max(one.keys for one in tried) > 16
    tried.clear()
    step.run(backend)
    assert tried and all(one.keys == 16 for one in tried)


def test_a_device_that_refuses_every_tile_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **options: Any) -> None:
        raise launches.OutOfResources(200_000, 101_376, "shared memory")

    monkeypatch.setattr(launches, "_accepted", {})
    monkeypatch.setattr(attention_layer.Layer, "_decode", refuse)
    step = Step([(1, 60)], page_size=16, heads=4, seed=1, device=DEVICE)
    for _ in range(2):
        with pytest.raises(ValueError, match="--attention-backend torch"):
            step.run(TritonAttention())


def test_a_long_request_is_split_beside_short_ones() -> None:
    """63 requests of 100 tokens fill the device without splits, the long one would run alone."""
    total = 32_000 + 63 * 100
    splits = chosen_splits(64, 8, total, 32_000, False, H100)
    length = max(splits.least, -(-total // splits.wanted), -(-32_000 // splits.number))
    assert splits.number > 20 and -(-100 // length) == 1
    assert chosen_splits(1, 8, 100, 100, False, H100).number == 1


def test_a_recorded_step_has_splits_for_longer_ones() -> None:
    assert chosen_splits(1, 8, 0, 32_768, True, H100).number == MAX_SPLITS
    assert chosen_splits(256, 8, 0, 32_768, True, H100).number <= 2
    assert window_splits(1, 8, 1024, H100).number == 8
