"""What is special about Triton's paged attention: results in fp8, the sizes of its blocks, real
models' shapes on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from paged_steps import Step, quantized
from triton_interpreter import DEVICE

from piecework.kernels import reference
from piecework.kernels.attention import QuantizedAttention
from piecework.kernels.cuda import platform as cuda_platform
from piecework.kernels.paged_attention import TorchAttention
from piecework.kernels.triton import device as devices
from piecework.kernels.triton.attention import Blocks, TritonAttention

pytestmark = pytest.mark.on_gpu

SMALL = Blocks(16, 16)
"""Tiles so small that short sequences have many."""


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> bool:
    return bool((actual.double().cpu() - expected).norm() <= tolerance * expected.norm())


@pytest.mark.parametrize(
    ("lens", "splits", "dtype"),
    [
        ([(20, 14), (1, 40), (3, 0)], 2, torch.float8_e4m3fn),
        ([(1, 60), (1, 5)], 1, torch.float8_e4m3fn),
        ([(1, 60), (1, 5)], 2, torch.float8_e4m3fn),
        ([(5, 30), (1, 40)], 2, torch.float8_e5m2),
    ],
)
def test_a_result_in_fp8_is_its_own_result_quantised(
    lens: list[tuple[int, int]], splits: int, dtype: torch.dtype
) -> None:
    """To the bit: in tiles, in one split, in several."""
    step = Step(lens, page_size=16, heads=4, seed=1, dtype=torch.float16, device=DEVICE)
    backend = TritonAttention(blocks=SMALL, num_splits=splits)
    assert isinstance(backend, QuantizedAttention)
    scale = torch.tensor([0.013], device=DEVICE)
    plain = step.run(backend)
    expected = reference.quantize_static(plain.flatten(1), scale, dtype).view(plain.shape)
    out = step.run_quantized(backend, scale, dtype)
    assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))


def test_gpus_write_fp8_where_triton_s_attention_is_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for has_flashinfer, obstacle in (
        (False, None),
        (True, "attention by flashinfer writes 16 bits"),
    ):
        monkeypatch.setattr(cuda_platform, "has_flashinfer", lambda found=has_flashinfer: found)
        assert cuda_platform.CudaPlatform().quantized_attention_obstacle() == obstacle


@pytest.mark.parametrize(
    ("lens", "dtype"),
    [
        ([(70, 30), (1, 90), (3, 0), (1, 0)], torch.float16),
        ([(1, 200), (1, 5)], torch.float32),
        pytest.param([(70, 30), (1, 90), (3, 0), (1, 0)], torch.float32, marks=pytest.mark.slow),
        pytest.param([(1, 200), (1, 5)], torch.float16, marks=pytest.mark.slow),
    ],
)
def test_the_blocks_it_chooses_itself(lens: list[tuple[int, int]], dtype: torch.dtype) -> None:
    step = Step(
        lens, page_size=16, heads=8, kv_heads=2, head_size=64, seed=3, dtype=dtype, device=DEVICE
    )
    assert close(
        step.run(TritonAttention()), step.expected(None), 1e-4 if dtype == torch.float32 else 1e-2
    )


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no NVIDIA GPU")
@pytest.mark.parametrize("head_size", [80, 128, 256])
@pytest.mark.parametrize("heads", [(32, 8), (14, 2), (8, 8)])
@pytest.mark.parametrize(
    "lens", [[(517, 300), (1, 900), (33, 0), (1, 0)], [(1, past) for past in range(1, 1200, 37)]]
)
def test_shapes_of_real_models(
    lens: list[tuple[int, int]], heads: tuple[int, int], head_size: int
) -> None:
    step = Step(
        lens,
        page_size=16,
        heads=heads[0],
        kv_heads=heads[1],
        head_size=head_size,
        seed=1,
        dtype=torch.bfloat16,
        device=DEVICE,
    )
    actual = step.run(TritonAttention(), padding=3)
    assert close(actual, step.run(TorchAttention(), padding=3).double().cpu(), 1e-2)


@pytest.mark.skipif(DEVICE != "cpu", reason="GPUs choose by themselves")
@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_instructions_give_what_integer_arithmetic_gives(
    cache: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries are divided by their largest number, and scores multiplied by it."""
    results = []
    for capability in ((8, 0), (9, 0)):
        chosen = devices.Properties(capability, 1, 2**30)
        monkeypatch.setattr(devices, "properties", lambda device, chosen=chosen: chosen)
        step = Step([(5, 30), (1, 60)], page_size=16, heads=4, seed=1, dtype=torch.float16)
        step, _, _ = quantized(step, cache, (0.5, 0.03))
        results.append(step.run(TritonAttention(blocks=SMALL, num_splits=2)).double())
    assert close(results[0], results[1], 2e-3)
