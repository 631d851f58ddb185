"""MXFP4 experts of GPT-OSS are the numbers that they stand for, in 8 bits or widened."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model

from piecework.kernels.cpu.native.build import runnable_variants
from piecework.kernels.cpu.native.linear import native_linear
from piecework.runtime.loader.loader import load_model
from piecework.runtime.loader.parallel import WHOLE, Shard
from piecework.runtime.models.causal_lm import CausalLM
from piecework.runtime.quantization.mxfp4 import gguf_blocks

NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
EXPERTS, SIZE, WIDTH = 4, 64, 96


def make_pair(folder: Path) -> tuple[Path, Path]:
    """A model whose experts are numbers, and the same as its makers store it."""
    shape = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    numbers = make_tiny_model(folder / "numbers", "gpt_oss", head_dim=16, **shape)
    tensors = load_file(numbers / "model.safetensors")
    stored = dict(tensors)
    make = torch.Generator().manual_seed(0)
    sizes = {"gate_up_proj": (2 * WIDTH, SIZE), "down_proj": (SIZE, WIDTH)}
    for name, (rows, columns) in sizes.items():
        key = f"model.layers.0.mlp.experts.{name}"
        shape_of = (EXPERTS, rows, columns // 32)
        codes = torch.randint(16, (*shape_of, 32), generator=make, dtype=torch.uint8)
        scales = torch.randint(120, 126, shape_of, generator=make, dtype=torch.uint8)
        stored[f"{key}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        stored[f"{key}_scales"] = scales
        wide = NUMBERS[codes.int()] * torch.exp2(scales.float() - 127).unsqueeze(-1)
        tensors[key] = wide.flatten(2).transpose(1, 2).contiguous()
        del stored[key]
    save_file(tensors, numbers / "model.safetensors")
    other = folder / "mxfp4"
    other.mkdir()
    config = json.loads((numbers / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }
    (other / "config.json").write_text(json.dumps(config))
    save_file(stored, other / "model.safetensors")
    return numbers, other


@pytest.mark.parametrize("shard", [WHOLE, Shard(0, 2, ep_size=1), Shard(1, 2, ep_size=2)])
def test_widened_they_are_the_numbers(tmp_path: Path, shard: Shard) -> None:
    def experts(path: Path) -> list[torch.Tensor]:
        cpu = torch.device("cpu")
        model = load_model(str(path), torch.float32, cpu, False, quantization="auto", shard=shard)
        return list(model.model.layers[0].mlp.experts.parameters())

    if shard.size == 2 and shard.ep_size == 1:
        # 48 columns a rank cut a block.
        with pytest.raises(ValueError, match="use --tp-size 1"):
            experts(make_pair(tmp_path)[1])
        return
    numbers, stored = map(experts, make_pair(tmp_path))
    assert all(map(torch.equal, numbers, stored))


@pytest.mark.skipif(not runnable_variants()[0].needs, reason="the CPU has no vectors")
def test_they_are_kept_in_their_bits(tmp_path: Path) -> None:
    def load(path: Path) -> CausalLM:
        cpu = torch.device("cpu")
        return load_model(
            str(path), torch.bfloat16, cpu, False, native_linear(), quantization="auto"
        )

    layers = [load(path).model.layers[0].mlp for path in make_pair(tmp_path)]
    assert layers[1].experts.gate_up_proj.method.kind == "mxfp4 MXFP4"
    x = torch.randn(5, SIZE, generator=torch.Generator().manual_seed(1)).bfloat16()
    numbers, stored = (layer(x).float() for layer in layers)
    assert (numbers - stored).abs().max() < 0.02 * numbers.abs().max()


def test_gguf_files_hold_them_in_another_order() -> None:
    values = np.random.default_rng(0).normal(0, 1, (4, 64)).astype(np.float32)
    stored = gguf.quants.quantize(values, gguf.GGMLQuantizationType.MXFP4)
    groups = torch.from_numpy(stored).view(4, 2, 17)
    codes = torch.cat((groups[..., 1:] & 15, groups[..., 1:] >> 4), dim=-1)
    assert np.array_equal(gguf_blocks(codes, groups[..., 0]).numpy(), stored)
