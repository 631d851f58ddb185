"""NVFP4 checkpoints of compressed-tensors and of ModelOpt are the numbers that they stand for:
widened, in their bits on a GPU, elsewhere in Triton's interpreter, and on a CPU.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from native_variants import built_variants, needs_kernels
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model
from triton_interpreter import DEVICE

from piecework.kernels import ops, reference
from piecework.kernels.cpu.native.linear import NativeLinear
from piecework.kernels.fp4 import fp4_values
from piecework.kernels.triton.packed_linear import PackedLinear
from piecework.runtime.loader.loader import load_model
from piecework.runtime.models.causal_lm import CausalLM
from piecework.runtime.quantization.methods import describe, linear_kinds

pytestmark = pytest.mark.on_gpu
ARGS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "compressed": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": ARGS, "input_activations": ARGS}
        },
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    },
    "modelopt": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["lm_head", "model.layers.*.mlp.gate"],
    },
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def make_pair(folder: Path, writer: str, architecture: str, **shape: Any) -> tuple[Path, Path]:
    """A model whose linear layers are NVFP4's numbers, and the same as `writer` stores it."""
    numbers = make_tiny_model(folder / "numbers", architecture, num_hidden_layers=1, **shape)
    tensors = load_file(numbers / "model.safetensors")
    stored, make = dict(tensors), torch.Generator().manual_seed(0)
    for name, weight in tensors.items():
        if not name.endswith("_proj.weight"):
            continue
        rows, columns = weight.shape
        packed = torch.randint(256, (rows, columns // 2), generator=make).to(torch.uint8)
        scale = (torch.rand(rows, columns // 16, generator=make) * 400).to(torch.float8_e4m3fn)
        whole = torch.rand(1, generator=make) / 20000
        values = unpack_fp4_from_uint8(packed, rows, columns, dtype=torch.float32)
        wide = values * scale.float().repeat_interleave(16, 1) * whole
        tensors[name] = wide.to(weight.dtype)
        prefix = name.removesuffix(".weight")
        del stored[name]
        if writer == "compressed":
            stored |= {
                f"{prefix}.weight_packed": packed,
                f"{prefix}.weight_scale": scale,
                f"{prefix}.weight_global_scale": 1 / whole,
                f"{prefix}.input_global_scale": torch.ones(1),
            }
        else:
            stored |= {
                f"{prefix}.weight": packed,
                f"{prefix}.weight_scale": scale,
                f"{prefix}.weight_scale_2": whole[0],
                f"{prefix}.input_scale": torch.ones(()),
            }
    save_file(tensors, numbers / "model.safetensors")
    other = folder / writer
    other.mkdir()
    config = json.loads((numbers / "config.json").read_text())
    (other / "config.json").write_text(
        json.dumps(config | {"quantization_config": CONFIGS[writer]})
    )
    save_file(stored, other / "model.safetensors")
    return numbers, other


def load(path: Path, *, packed: bool = False) -> CausalLM:
    here = torch.device(DEVICE)
    kernels = PackedLinear(torch.float32, here) if packed else None
    return load_model(str(path), torch.float32, here, False, kernels, quantization="auto")


@pytest.mark.parametrize("writer", CONFIGS)
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_layers_compute_what_their_numbers_do(
    tmp_path: Path, writer: str, architecture: str
) -> None:
    shape = MOE if architecture == "qwen3_moe" else {}
    numbers, stored = make_pair(tmp_path, writer, architecture, **shape)
    exact, widened, packed = load(numbers), load(stored), load(stored, packed=True)
    assert not linear_kinds(widened) and linear_kinds(packed)
    size = exact.config.hidden_size
    x = torch.randn(5, size, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for part in ("self_attn.qkv_proj", "mlp"):
        wanted, wide, own = (
            model.get_submodule(f"model.layers.0.{part}")(x) for model in (exact, widened, packed)
        )
        most = 1e-3 * float(wanted.abs().max())
        torch.testing.assert_close(wide, wanted, rtol=1e-3, atol=most)
        torch.testing.assert_close(own, wanted, rtol=1e-3, atol=most)
    name = "mlp.experts.gate_up_proj" if architecture == "qwen3_moe" else "mlp.gate_up_proj"
    ours, others = (
        model.get_submodule(f"model.layers.0.{name}").weight.nbytes for model in (packed, exact)
    )
    # 4.5 bits of 32, and padding of such short rows.
    assert ours <= others / 4


@pytest.mark.parametrize("writer", CONFIGS)
def test_a_device_that_multiplies_4_bits_gets_activations_of_4_bits(
    tmp_path: Path, writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(fp4_obstacle=lambda device: None)
    monkeypatch.setattr(ops, "_versions", {"cpu": device})
    numbers, stored = make_pair(tmp_path, writer, "llama", hidden_size=128)
    cpu, half = torch.device("cpu"), torch.bfloat16
    model = load_model(str(stored), half, cpu, False, None, quantization="auto")
    exact = load_model(str(numbers), torch.float32, cpu, False)
    # Parts that are multiplied as one have tensor scales of their own.
    kinds = linear_kinds(model)
    assert kinds["model.layers.0.self_attn.qkv_proj"] == f"nvfp4 {writer} fp4 rows"
    assert kinds["model.layers.0.self_attn.o_proj"] == f"nvfp4 {writer} fp4"
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).to(half)
    # The checkpoint's scale of activations is 1.
    rounded = fp4_values(*reference.quantize_fp4(x, torch.ones(1)))
    for name in ("qkv_proj", "o_proj"):
        name = f"model.layers.0.self_attn.{name}"
        wanted = exact.get_submodule(name)(rounded)
        found = model.get_submodule(name)(x).float()
        torch.testing.assert_close(found, wanted, rtol=2**-8, atol=float(wanted.abs().max()) / 256)
    monkeypatch.setattr(ops, "_versions", {})
    widened = load_model(str(stored), half, cpu, False, None, quantization="auto")
    assert not linear_kinds(widened)


@needs_kernels
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_a_cpu_keeps_them_in_their_bits(tmp_path: Path, architecture: str) -> None:
    """Each variant of the kernels, with activations of 16 bits and of 8."""
    shape = {"hidden_size": 128, **MOE, "moe_intermediate_size": 64}
    numbers, stored = make_pair(tmp_path, "modelopt", architecture, **shape)
    cpu, half = torch.device("cpu"), torch.bfloat16
    exact = load_model(str(numbers), torch.float32, cpu, False)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).to(half)
    for library, activations in product(built_variants(), ("bf16", "int8")):
        kernels = NativeLinear(library, activations=activations)
        model = load_model(str(stored), half, cpu, False, kernels, quantization="auto")
        layer = model.model.layers[0]
        assert set(linear_kinds(model).values()) <= {"nvfp4 modelopt packed", "bfloat16"}
        assert any("in nvfp4: " in line for line in describe(model))
        for part in ("self_attn.qkv_proj", "mlp"):
            wanted = exact.get_submodule(f"model.layers.0.{part}")(x.float())
            found = model.get_submodule(f"model.layers.0.{part}")(x).float()
            # Of activations: 8 bits, and three products behind one another in bfloat16.
            assert (found - wanted).abs().max() < 0.02 * wanted.abs().max()
        weight = layer.self_attn.qkv_proj.weight
        rows = layer.self_attn.qkv_proj.out_features
        # 4.5 bits a number, and two numbers of 32 bits a row.
        assert weight.nbytes == rows * (128 * 9 // 16 + 8)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("weight_scale", float("nan"), "up_proj.weight_scale holds NaN; download"),
        *(
            ("weight_global_scale", value, "weight_global_scale must hold a scale above")
            for value in (0.0, -1.0, float("nan"), float("inf"), 1e-38, 1e38)
        ),
    ],
)
def test_scales_that_no_quantiser_writes_are_one_clear_error(
    tmp_path: Path, name: str, value: float, text: str
) -> None:
    _, stored = make_pair(tmp_path, "compressed", "llama")
    tensors = load_file(stored / "model.safetensors")
    key = f"model.layers.0.mlp.up_proj.{name}"
    tensors[key] = torch.full(tensors[key].shape, value).to(tensors[key].dtype)
    save_file(tensors, stored / "model.safetensors")
    with pytest.raises(ValueError, match=text):
        load(stored)


@pytest.mark.parametrize("algorithm", ["FP8", "W4A8_AWQ", None])
def test_other_formats_of_modelopt_are_refused(tmp_path: Path, algorithm: str | None) -> None:
    _, stored = make_pair(tmp_path, "modelopt", "llama")
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"]["quant_algo"] = algorithm
    (stored / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="supported: NVFP4 and W4A16_NVFP4 with groups"):
        load(stored)
