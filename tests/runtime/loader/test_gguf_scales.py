"""Scales of GGUF files: those of whole tensors are multiplied in, and wrong ones are refused."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from gguf_models import _NAMES as NAMES
from gguf_models import Kind, add_metadata, experts, finish, metadata_of
from native_variants import built_variants, needs_kernels
from safetensors.torch import load_file
from transformers import AutoConfig

from piecework.kernels.cpu.native.linear import NativeLinear
from piecework.runtime.files.gguf_reader import open_gguf
from piecework.runtime.loader.gguf import list_tensors
from piecework.runtime.loader.gguf_scales import are_finite
from piecework.runtime.loader.loader import load_model
from piecework.runtime.quantization.methods import linear_kinds
from tests.runtime.loader.test_gguf import CONFIG
from tests.runtime.quantization.test_nvfp4 import MOE, make_pair

CPU, HALF = torch.device("cpu"), torch.bfloat16


def convert(folder: Path, file: Path, name: str) -> None:
    """Write ModelOpt's NVFP4 as llama.cpp's converter does (conversion/base.py): the e4m3 scales of
    a block of 64 columns, its numbers, and the other scales as tensors beside it.
    """
    tensors = load_file(folder / "model.safetensors")
    writer = gguf.GGUFWriter(file, name)
    for key, value in metadata_of(AutoConfig.from_pretrained(folder)).items():
        add_metadata(writer, f"{name}.{key.replace('__', '.')}", value)
    writer.add_eos_token_id(2)

    def add(stored: str, prefixes: list[str]) -> None:
        blocks, scales = [], []
        for prefix in prefixes:
            packed = tensors.pop(f"{prefix}.weight").numpy()
            four = tensors.pop(f"{prefix}.weight_scale").view(torch.uint8).numpy()
            rows = len(packed)
            numbers = np.stack((packed & 15, packed >> 4), axis=-1).reshape(rows, -1, 2, 8)
            halves = numbers[:, :, 0] | numbers[:, :, 1] << 4
            parts = four.reshape(rows, -1, 4), halves.reshape(rows, -1, 32)
            blocks.append(np.concatenate(parts, axis=-1).reshape(rows, -1))
            scales.append(tensors.pop(f"{prefix}.weight_scale_2").item())
            del tensors[f"{prefix}.input_scale"]
        data = np.stack(blocks) if "_exps" in stored else blocks[0]
        writer.add_tensor(f"{stored}.weight", data, raw_dtype=Kind.NVFP4)
        writer.add_tensor(f"{stored}.scale", np.array(scales, np.float32))
        writer.add_tensor(f"{stored}.input_scale", np.full(len(scales), 3.0, np.float32))

    for merged, owners in experts(tensors).items():
        add(merged.removesuffix(".weight"), [owner.removesuffix(".weight") for owner in owners])
    scaled = [name.removesuffix("_scale") for name in tensors if name.endswith(".weight_scale")]
    for owner in [*scaled, *(tensors.keys() - scaled)]:
        stored = owner
        for theirs, ours in NAMES.items():
            stored = stored.replace(theirs, ours)
        if owner in scaled:
            add(stored.removesuffix(".weight"), [owner.removesuffix(".weight")])
        elif owner in tensors:
            writer.add_tensor(stored, tensors[owner].float().numpy())
    finish(writer)


@needs_kernels
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_a_file_of_nvfp4_computes_what_its_checkpoint_does(
    tmp_path: Path, architecture: str
) -> None:
    moe = (
        {**MOE, "moe_intermediate_size": 64, "norm_topk_prob": True}
        if architecture == "qwen3_moe"
        else {}
    )
    shape = {"hidden_size": 128, "intermediate_size": 128, **moe}
    numbers, stored = make_pair(tmp_path, "modelopt", architecture, **shape)
    file = tmp_path / "model.gguf"
    convert(stored, file, architecture.replace("_", ""))
    exact = load_model(str(numbers), torch.float32, CPU, False)
    widened = load_model(str(file), torch.float32, CPU, False)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).to(HALF)
    wanted = {
        part: exact.get_submodule(f"model.layers.0.{part}")(x.float())
        for part in ("self_attn.qkv_proj", "mlp")
    }
    for part, each in wanted.items():
        found = widened.get_submodule(f"model.layers.0.{part}")(x.float())
        torch.testing.assert_close(found, each, rtol=1e-3, atol=1e-3 * float(each.abs().max()))
    for library, activations in product(built_variants(), ("bf16", "int8")):
        kernels = NativeLinear(library, activations=activations)
        model = load_model(str(file), HALF, CPU, False, kernels, quantization="auto")
        assert "NVFP4" in linear_kinds(model).values()
        for part, each in wanted.items():
            found = model.get_submodule(f"model.layers.0.{part}")(x).float()
            assert (found - each).abs().max() < 0.02 * each.abs().max()


@needs_kernels
def test_a_layer_of_several_formats_keeps_the_scale_of_each_part() -> None:
    kernels = NativeLinear(built_variants()[0])
    make = torch.Generator().manual_seed(0)
    columns, sizes = 128, {"NVFP4": 32, "Q8_0": 64}
    blocks = {
        "NVFP4": torch.randint(1, 60, (32, columns // 64 * 36), generator=make).to(torch.uint8),
        "Q8_0": torch.from_numpy(
            gguf.quants.quantize(torch.randn(64, columns, generator=make).numpy(), Kind.Q8_0)
        ),
    }
    kind = "mixed " + " ".join(f"{name} {rows}" for name, rows in sizes.items())
    factors = [
        torch.full((rows, 1), factor)
        for rows, factor in zip(sizes.values(), (0.25, 1.0), strict=True)
    ]
    packed = kernels.pack(kind, list(blocks.values()), factors)
    layout = kernels.layout(kind, columns)
    x = torch.randn(3, columns, generator=make).to(HALF)
    found = kernels.op(x, packed, None, 96, layout).float()
    rows = [torch.from_numpy(dequantize(each.numpy(), Kind[name])) for name, each in blocks.items()]
    wanted = x.float() @ torch.cat((rows[0] * 0.25, rows[1])).T
    torch.testing.assert_close(found, wanted, rtol=0.01, atol=0.01 * float(wanted.abs().max()))


def written(path: Path, kind: Kind, blocks: np.ndarray, **scales: np.ndarray) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("output.weight", blocks, raw_dtype=kind)
    for ending, values in scales.items():
        writer.add_tensor(f"output.{ending}", values)
    finish(writer)
    return path


READ = [kind for kind in gguf.quants._type_traits if kind not in (Kind.F16, Kind.F32, Kind.BF16)]


@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
@pytest.mark.parametrize("kind", READ, ids=lambda kind: kind.name)
def test_blocks_whose_numbers_are_not_finite_are_refused(tmp_path: Path, kind: Kind) -> None:
    """Each two bytes of a block in turn are NaN in float16. All are 255 in formats without such."""
    columns, size = gguf.GGML_QUANT_SIZES[kind]
    plain = np.full((1, size), 1, np.uint8)
    wrong = []
    for at in range(size - 1):
        halves = plain.copy()
        halves[0, at : at + 2] = 0xFF, 0x7F
        if not np.isfinite(dequantize(halves, kind)).all():
            assert not are_finite(halves, kind), at
            wrong.append(halves)
    assert are_finite(plain, kind)
    if kind in (Kind.MXFP4, Kind.NVFP4, Kind.IQ1_M):
        wrong = [np.full((1, size), 255, np.uint8)]
    assert wrong
    blocks = np.repeat(plain, 3, axis=0)
    blocks[1] = wrong[0]
    (tensor,) = list_tensors(open_gguf(written(tmp_path / "a.gguf", kind, blocks)), CONFIG)
    for read in (lambda: tensor.copy_to(torch.empty(3, columns)), tensor.blocks):
        with pytest.raises(ValueError, match=r"a\.gguf: the tensor output\.weight has scales that"):
            read()


def test_a_scale_beside_another_format_is_multiplied_in(tmp_path: Path) -> None:
    blocks = gguf.quants.quantize(np.ones((2, 64), np.float32), Kind.Q8_0)
    path = written(tmp_path / "a.gguf", Kind.Q8_0, blocks, scale=np.array([0.5], np.float32))
    (tensor,) = list_tensors(open_gguf(path), CONFIG)
    values = torch.empty(2, 64)
    tensor.copy_to(values)
    assert tensor.blocks is None, "the kernels of Q8_0 know no such scale"
    torch.testing.assert_close(values, torch.full_like(values, 0.5), rtol=0.01, atol=0.0)


def test_a_block_of_mxfp4_may_have_the_largest_scale_of_panels() -> None:
    largest, larger = (np.array([[power] + [1] * 16], np.uint8) for power in (143, 144))
    assert are_finite(largest, Kind.MXFP4) and not are_finite(larger, Kind.MXFP4)


def test_a_scale_of_16_bits_is_read_as_the_number_it_is(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tensor("output.weight", np.ones((2, 36), np.uint8), raw_dtype=Kind.NVFP4)
    two = gguf.quants.quantize(np.array([2.0], np.float32), Kind.BF16)
    writer.add_tensor("output.scale", two, raw_dtype=Kind.BF16)
    finish(writer)
    (tensor,) = list_tensors(open_gguf(file), CONFIG)
    assert tensor.factor == 2.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38, 0.0, -1.0])
@pytest.mark.parametrize("ending", ["scale", "input_scale"])
def test_scales_of_tensors_that_no_quantiser_writes_are_refused(
    tmp_path: Path, ending: str, value: float
) -> None:
    scales: Any = {ending: np.array([value], np.float32)}
    path = written(tmp_path / "a.gguf", Kind.NVFP4, np.ones((2, 36), np.uint8), **scales)
    with pytest.raises(ValueError, match=rf"output\.{ending} must hold scales above 0 and up to"):
        list_tensors(open_gguf(path), CONFIG)
