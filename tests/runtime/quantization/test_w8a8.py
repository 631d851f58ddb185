"""Checkpoints with weights and activations in 8 bits are served as their schemes say."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_checkpoints import (
    COMPRESSED,
    FLOAT,
    INT,
    differences,
    input_scale,
    make_compressed,
    make_fp8,
    reference,
    said,
)
from tiny_models import make_tiny_model
from torch import nn

from piecework.kernels.cpu.native.linear import native_linear
from piecework.runtime.config.quantization_registry import PLAIN, read_scheme
from piecework.runtime.loader.loader import load_model
from piecework.runtime.models.llama import LlamaForCausalLM
from piecework.runtime.quantization.methods import describe, linear_kinds, named_linears

CPU = torch.device("cpu")

FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "mlp", "up_proj": "mlp"}


def dequantised(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    weight = tensors["weight"].float()
    scale = tensors.get("weight_scale", tensors.get("weight_scale_inv"))
    assert scale is not None
    if scale.dim() == 2 and scale.shape[1] > 1:
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        scale = scale[: weight.shape[0], : weight.shape[1]]
    return weight * scale


def rounded(x: torch.Tensor, scale: torch.Tensor | float, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.int8:
        return (x / scale).round().clamp(-127, 127) * scale
    return (x / scale).clamp(-448, 448).to(dtype).float() * scale


def quantise_input(scheme: str, name: str, x: torch.Tensor) -> torch.Tensor:
    """As vLLM's layers do: fused ones have one static scale, the largest of theirs."""
    dtype = torch.int8 if scheme.startswith("int8") else torch.float8_e4m3fn
    largest = 127 if dtype == torch.int8 else 448
    last = name.rpartition(".")[2]
    if scheme.endswith("static"):
        together = [part for part in FUSED if FUSED[part] == FUSED.get(last)] or [last]
        return rounded(x, max(map(input_scale, together)), dtype)
    if scheme.endswith("group"):
        groups = x.unflatten(-1, (-1, 128))
        scale = groups.abs().amax(-1, keepdim=True) / largest
        return rounded(groups, scale, dtype).flatten(-2)
    return rounded(x, x.abs().amax(-1, keepdim=True) / largest, dtype)


def assert_served(folder: Path, scheme: str) -> None:
    expected = reference(folder, dequantised, lambda name, x: quantise_input(scheme, name, x))
    found = differences(expected, said(folder))
    # Sums in another order round a few activations to the other neighbour.
    assert found[int(0.9 * len(found))] < 1e-4 and found[-1] < 0.1


@pytest.mark.parametrize("scheme", COMPRESSED)
def test_compressed_tensors(scheme: str, tmp_path: Path) -> None:
    form, weights, inputs = COMPRESSED[scheme]
    assert_served(make_compressed(tmp_path, weights, inputs, form=form), scheme)


@pytest.mark.parametrize(
    ("scheme", "settings"),
    {
        "tensor-static": {"block": False, "static": True},
        "tensor-token": {"block": False},
        "block-group": {"block": True},
    }.items(),
)
def test_fp8(scheme: str, settings: dict[str, bool], tmp_path: Path) -> None:
    assert_served(make_fp8(tmp_path, **settings), f"fp8-{scheme}")


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_parts_that_do_not_fill_blocks_keep_scales_of_their_own(
    architecture: str, tmp_path: Path
) -> None:
    """Keys and values of 64 rows: their blocks begin in the middle of the fused weight's."""
    folder = make_fp8(
        tmp_path, block=True, architecture=architecture, num_key_value_heads=1, head_dim=64
    )
    assert_served(folder, "fp8-block-group")


def test_quantization_none_widens(tmp_path: Path) -> None:
    folder = make_fp8(tmp_path, block=True)
    expected = reference(folder, dequantised)
    assert differences(expected, said(folder, quantization="none"))[-1] < 1e-3


@pytest.mark.usefixtures("compiled_here")
@pytest.mark.parametrize(
    "settings",
    [pytest.param({"block": False, "static": True}, marks=pytest.mark.slow), {"block": True}],
)
def test_pieces_say_the_same(settings: dict[str, bool], tmp_path: Path) -> None:
    folder = make_fp8(tmp_path, **settings)
    pieces = {"piecewise_cuda_graph": True, "piecewise_cuda_graph_compiler": "eager"}
    eager, compiled = said(folder), said(folder, **pieces)
    pairs = zip(chain(*eager), chain(*compiled), strict=True)
    found = sorted(abs(one - other) for one, other in pairs)
    assert found[int(0.9 * len(found))] < 1e-4 and found[-1] < 0.1


@pytest.mark.parametrize("lacking", [[], [torch.float8_e4m3fn]])
@pytest.mark.parametrize("quantization", ["none", "auto"])
def test_where_nothing_multiplies_them_weights_have_16_bits_and_the_summary_says_so(
    quantization: str, lacking: list[torch.dtype], tmp_path: Path
) -> None:
    folder = make_fp8(tmp_path, block=False)
    model = load_model(
        str(folder),
        torch.bfloat16,
        torch.device("cpu"),
        False,
        quantization=quantization,
        lacking=lacking,
    )
    assert not linear_kinds(model) and describe(model) == [
        "8 layers in bfloat16, widened from fp8 by tensor, activations by token: 1.9 MiB",
        "1 layer in bfloat16: 0.2 MiB",
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_nothing_multiplies_is_refused_on_load(dtype: torch.dtype, tmp_path: Path) -> None:
    """For want of such numbers, or of a product: plain torch would widen all at each step."""
    folder = make_tiny_model(tmp_path / "model")
    lacking = [torch.float8_e4m3fn] if dtype == torch.float32 else []
    with pytest.raises(ValueError, match=r"--quantization fp8: no kernel .*; use .*none"):
        load_model(
            str(folder), dtype, torch.device("cpu"), False, quantization="fp8", lacking=lacking
        )


def load(folder: Path, dtype: torch.dtype, kernels: Any) -> LlamaForCausalLM:
    return load_model(str(folder), dtype, CPU, False, kernels, quantization="auto")


PACKED: dict[str, dict[str, Any]] = {
    "tensor-static": {"block": False, "static": True},
    "tensor-token": {"block": False},
    "blocks": {"block": True},
    "blocks across parts": {"block": True, "num_key_value_heads": 1, "head_dim": 64},
    "biases": {"block": True, "architecture": "qwen2"},
}


@pytest.mark.parametrize("case", PACKED)
def test_packed_layers_compute_what_plain_ones_do(case: str, tmp_path: Path) -> None:
    folder = make_fp8(tmp_path, **PACKED[case])
    packed, plain = (
        dict(named_linears(load(folder, dtype, kernels)))
        for dtype, kernels in ((torch.bfloat16, native_linear()), (torch.float32, None))
    )
    for name, layer in packed.items():
        x = torch.randn(5, layer.in_features).bfloat16()
        assert layer.layout is not None and plain[name].layout is None
        assert torch.allclose(layer(x).float(), plain[name](x.float()), rtol=0.02, atol=0.02), name


def test_each_layer_has_the_scheme_of_its_target_and_the_head_too(tmp_path: Path) -> None:
    """Names go before classes, and names that are ignored before both."""
    token = {"strategy": "token", "dynamic": True}
    scheme = {"targets": ["Linear"], "weights": INT | {"strategy": "channel"}}
    groups = {
        "all": scheme | {"input_activations": INT | token},
        "some": {
            "targets": [r"re:.*\.1\.mlp\..*"],
            "weights": FLOAT | {"strategy": "channel"},
            "input_activations": FLOAT | token,
        },
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": "naive-quantized",
        "config_groups": groups,
        "ignore": [r"re:.*self_attn\.o_proj"],
    }
    found = read_scheme(config)
    layers = [f"model.layers.{layer}" for layer in (0, 1, 11)]
    assert [found(f"{layer}.mlp.up_proj").split()[1] for layer in layers] == [
        "int8",
        "float8_e4m3fn",
        "int8",
    ]
    assert {found(f"{layer}.self_attn.o_proj") for layer in layers} == {PLAIN}
    assert found("lm_head") == "w8a8 int8 channel token weight_scale"


@settings(max_examples=40, deadline=None)
@given(
    targets=st.lists(
        st.lists(
            st.sampled_from(
                ["Linear", "up_proj", "mlp", "mlp.up_proj", "re:.*up", "re:mlp.*", r"re:.*_proj$"]
            ),
            min_size=1,
            max_size=3,
        ),
        min_size=1,
        max_size=4,
    )
)
def test_of_several_groups_that_name_a_layer_the_library_s_choice_counts(
    targets: list[list[str]],
) -> None:
    """Groups differ in the strategies of their weights and inputs."""
    strategies = [(w, i) for w in ("channel", "tensor") for i in ("token", "tensor")]
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"up_proj": nn.Linear(4, 4)})})
    groups = {
        str(number): QuantizationScheme(
            targets=listed,
            weights=QuantizationArgs(**INT, strategy=weight),
            input_activations=QuantizationArgs(**INT, strategy=inputs, dynamic=inputs == "token"),
        )
        for number, (listed, (weight, inputs)) in enumerate(zip(targets, strategies, strict=False))
    }
    config = QuantizationConfig(config_groups=groups, format="int-quantized")
    apply_quantization_config(model, config, show_progress=False)
    expected = getattr(model["mlp"]["up_proj"], "quantization_scheme", None)
    found = read_scheme(config.model_dump(mode="json"))("mlp.up_proj")
    if expected is None:
        assert found == PLAIN
    else:
        dynamic = "token" if expected.input_activations.dynamic else "static"
        assert found.split()[2:4] == [expected.weights.strategy, dynamic]


def test_a_head_that_is_not_ignored_is_quantised(tmp_path: Path) -> None:
    form, weights, inputs = COMPRESSED["fp8-channel-token"]
    folder = make_compressed(tmp_path, weights, inputs, form=form, ignore=())
    assert_served(folder, "fp8-channel-token")
