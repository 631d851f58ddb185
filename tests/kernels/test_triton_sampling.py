"""Where Triton's filtered sampling is used, and that it never waits for a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from test_filtered_sampling import Filters, columns, random_probs
from triton_interpreter import DEVICE

from piecework.kernels import ops, reference
from piecework.kernels.triton import ops as triton_ops
from piecework.kernels.triton.sampling import sample_filtered

pytestmark = pytest.mark.on_gpu


def arguments(probs: torch.Tensor, filters: Filters) -> list[torch.Tensor]:
    return [each.to(DEVICE) for each in (probs, *columns(filters, probs.shape[1]))]


def test_the_layers_ops_take_it_where_triton_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_versions", {DEVICE: triton_ops})
    monkeypatch.setattr(reference, "sample_filtered", None)
    given = arguments(random_probs(1, 50, 2.0, 3), [(3, 0.9, 0.0)])
    assert 0 <= int(ops.sample_filtered(*given)) < 50


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no NVIDIA GPU")
@pytest.mark.parametrize("vocab", [49152, 128256, 151936])
def test_it_does_so_for_many_rows_and_never_waits(vocab: int) -> None:
    filters = list(itertools.product([0, 1, 50, 5000], [1.0, 0.95, 0.3], [0.0, 0.05])) * 4
    for scale in (0.0, 0.5, 4.0):
        given = arguments(random_probs(len(filters), vocab, scale, 5), filters)
        torch.cuda.set_sync_debug_mode("error")
        try:
            drawn = sample_filtered(*given)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(drawn, reference.sample_filtered(*given))
