"""Quantised checkpoints that contradict themselves, or mean harm: one line, before weights are
read.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_checkpoints import edit_config, make_fp8
from safetensors.torch import load_file, save_file

from piecework.runtime.config.quantization_registry import (
    find_formats,
    quantization_of,
    read_scheme,
)
from piecework.runtime.loader.loader import load_model
from piecework.runtime.quantization.config import Patterns

LAYER = "model.layers.1.mlp.up_proj"
Tensors = dict[str, torch.Tensor]


def put(name: str, value: torch.Tensor | None) -> Callable[[Tensors], object]:
    def edit(tensors: Tensors) -> None:
        tensors.pop(f"{LAYER}.{name}")
        if value is not None:
            tensors[f"{LAYER}.{name}"] = value

    return edit


STATIC = {
    "no scale": (put("weight_scale", None), rf"lacks 1 tensors, for example {LAYER}.weight_scale"),
    "no input scale": (
        put("input_scale", None),
        rf"lacks 1 tensors, .* {LAYER}.input_scale",
    ),
    "a scale of another shape": (
        put("weight_scale", torch.ones(3)),
        r"up_proj\.weight_scale has shape \[3\], .* asks for \[1\]",
    ),
    "a scale of NaN": (
        put("weight_scale", torch.tensor(float("nan"))),
        r"weight_scale has 1 of 1 scales that are no positive numbers up to 1e\+06, such as nan",
    ),
    "a scale beyond all": (
        put("weight_scale", torch.tensor(1e7)),
        r"weight_scale .* such as 10000000",
    ),
    "a scale of zero": (put("weight_scale", torch.tensor(0.0)), r"such as 0\.0; download"),
    "a negative scale": (put("input_scale", torch.tensor(-0.5)), r"input_scale .* such as -0\.5"),
    "a scale of integers": (
        put("weight_scale", torch.ones(1, dtype=torch.int32)),
        r"weight_scale is stored as int32, but the model's configuration asks for numbers",
    ),
    "a weight of 16 bits": (
        put("weight", torch.ones(384, 256, dtype=torch.bfloat16)),
        r"weight is stored as bfloat16, but .* asks for float8_e4m3fn",
    ),
    "a number that is none": (
        lambda tensors: tensors[f"{LAYER}.weight"].view(torch.uint8)[3, 7].fill_(0xFF),
        r"up_proj\.weight holds NaN; download the model again",
    ),
}


def check_refused(folder: Path, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as error:
        load_model(str(folder), torch.float32, torch.device("cpu"), False, quantization="auto")
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("fault", STATIC)
def test_tensors_that_contradict_the_scheme(fault: str, tmp_path: Path) -> None:
    folder = make_fp8(tmp_path, block=False, static=True)
    edit, reason = STATIC[fault]
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    check_refused(folder, reason)


BLOCK: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GROUP: dict[str, Any] = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": GROUP},
}
SIX_BITS = GROUP | {"weights": GROUP["weights"] | {"num_bits": 6}}
CONFIGS: dict[str, tuple[Any, str]] = {
    "an unknown method": (
        {"quant_method": "bitsandbytes"},
        "quantised by bitsandbytes are not supported; supported: .*compressed-tensors.*fp8",
    ),
    "no method": ({"bits": 4}, "quantised by some method are not supported"),
    "a list": ([1, 2], "quantised by some method"),
    "a part of a fused layer left out": (
        BLOCK | {"modules_to_not_convert": ["model.layers.1.self_attn.k_proj"]},
        r"keeps model\.layers\.1\.self_attn\.q_proj as .* and .*k_proj as 'bfloat16', which are",
    ),
    "other blocks": (BLOCK | {"weight_block_size": [64, 64]}, r"\[64, 64\] .*not supported"),
    "static blocks": (BLOCK | {"activation_scheme": "static"}, "with static activations are not"),
    "an unknown activation scheme": (BLOCK | {"activation_scheme": "x"}, "must be static or dyn"),
    "another float": (BLOCK | {"fmt": "e5m2"}, "format e5m2 are not supported"),
    "names that are numbers": (BLOCK | {"ignored_layers": [3]}, "must list names of layers, got 3"),
    "names that are a text": (BLOCK | {"ignored_layers": "x"}, "must be a list, got 'x'"),
    "no groups": (COMPRESSED | {"config_groups": None}, "config_groups must be an object"),
    "a group that is a list": (COMPRESSED | {"config_groups": {"a": []}}, "a must be an object"),
    "too many groups": (
        COMPRESSED | {"config_groups": {str(i): GROUP for i in range(33)}},
        "more than 32 config_groups",
    ),
    "sparse weights": (
        COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "with a sparsity_config are not supported",
    ),
    "transforms": (COMPRESSED | {"transform_config": {"x": 1}}, "with a transform_config are not"),
    "6 bits": (
        COMPRESSED | {"config_groups": {"a": SIX_BITS}},
        "weights as float 6 bits by channel .* not supported",
    ),
    "a broken pattern": (
        COMPRESSED | {"ignore": ["re:(((("]},
        r"\(' is no valid pattern",
    ),
    "a long pattern": (COMPRESSED | {"ignore": ["re:" + "a" * 2000]}, "of more than 1000 char"),
    "many patterns": (
        COMPRESSED
        | {
            "ignore": ["re:a"] * 500,
            "config_groups": {"a": GROUP | {"targets": [f"re:{i}" for i in range(501)]}},
        },
        "more than 1000 patterns",
    ),
}


@pytest.mark.parametrize("fault", CONFIGS)
def test_configs_that_are_not_served(fault: str, tmp_path: Path) -> None:
    folder = make_fp8(tmp_path, block=True)
    quantization, reason = CONFIGS[fault]
    edit_config(folder, quantization_config=quantization)
    check_refused(folder, reason)


def test_a_pattern_that_backtracks_for_ever_is_cut_off() -> None:
    """Of all lists of a file together."""
    patterns = Patterns()
    matchers = [patterns.matcher(["re:(a|a|aa)+$", r"re:(.*a){25}b"]) for _ in range(20)]
    took = []
    for number in range(20):
        began = time.process_time()
        with pytest.raises(ValueError, match="patterns take too long"):
            for _ in range(1000):
                matchers[number]("a" * 200 + str(number))
        took.append(time.process_time() - began)
    assert sum(took[1:]) < 2 * took[0], "all lists have the time of one"


MONSTERS = {
    "calls itself": "(?R)",
    "calls a group": "((?1)|a)*",
    "repeats": "(?:a{30000}){30000}",
    "repeats with spaces": "(?x)(?:a{30 000}){30 000}",
    "flags": "(?au)a",
    "a count": "a{" + "9" * 99 + "}",
}


@pytest.mark.parametrize("pattern", MONSTERS.values(), ids=MONSTERS)
def test_patterns_that_would_take_all_memory_or_python_s_stack(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"^quantization_config: 're:.* is no valid pattern \("):
        Patterns().matcher([f"re:{pattern}"])("model.layers.0.mlp.up_proj")


def test_a_deep_pattern_is_refused_or_matches() -> None:
    """How deep Python's own parser goes depends on who calls it."""
    pattern = "re:" + "(?:" * 240 + "lm_head" + ")" * 240
    try:
        found = Patterns().matcher([pattern])("lm_head")
    except ValueError as error:
        assert "is no valid pattern (" in str(error)
    else:
        assert found


def test_names_match_as_the_libraries_match_them() -> None:
    exact = Patterns().matcher(["lm_head", r"re:.*\.layers\.1\..*"])
    parts = Patterns().matcher(["mlp"], parts=True)
    assert exact("lm_head") and exact("model.layers.1.mlp.up_proj")
    assert not exact("model.lm_head") and not exact("model.layers.10.mlp.up_proj")
    assert parts("model.layers.0.mlp.up_proj") and not parts("model.layers.0.mlp2.up_proj")


NAMES = st.sampled_from(
    [
        *("config_groups", "weights", "input_activations", "output_activations", "targets"),
        *("ignore", "format", "num_bits", "bits", "type", "strategy", "symmetric", "dynamic"),
        *("group_size", "block_structure", "weight_block_size", "activation_scheme", "fmt"),
        *("ignored_layers", "modules_to_not_convert", "desc_act", "version", "zero_point"),
        *("group_0", "actorder", "sym", "checkpoint_format", "lm_head", "kv_cache_scheme"),
    ]
)
WORDS = st.sampled_from(
    [
        *(
            "float",
            "int",
            "channel",
            "tensor",
            "token",
            "group",
            "block",
            "Linear",
            "re:.*",
            "re:(",
        ),
        *(
            "re:.*",
            "re:(",
            "",
            "float-quantized",
            "int-quantized",
            "pack-quantized",
            "static",
            "gemm",
            "gptq_v2",
        ),
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 200) | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=6),
    max_leaves=12,
)


@given(method=st.sampled_from(sorted(find_formats())), config=st.dictionaries(NAMES, VALUES))
@settings(deadline=None, max_examples=examples(120, exploring=400))
def test_any_config_is_a_scheme_or_one_line(method: str, config: dict[str, Any]) -> None:
    text = json.dumps({"quantization_config": {**config, "quant_method": method}})
    quantization = quantization_of(json.loads(text))
    assert quantization is not None
    try:
        kind = read_scheme(quantization)("model.layers.0.self_attn.q_proj")
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 800
    else:
        assert kind.split()


@pytest.mark.parametrize(
    ("config", "flags", "reason"),
    [
        pytest.param(
            *({}, ["--quantization", "int8"], "--quantization int8 needs weights of 16 bits"),
            marks=pytest.mark.slow,
        ),
        ({"weight_block_size": "\ud800\n"}, [], r"in blocks of \ud800 with dynamic activations"),
    ],
    ids=["a flag", "half a surrogate pair"],
)
def test_the_command_ends_with_code_2_and_one_line(
    config: dict[str, Any], flags: list[str], reason: str, tmp_path: Path
) -> None:
    folder = make_fp8(tmp_path, block=False)
    edit_config(folder, quantization_config={"quant_method": "fp8", **config})
    command = [sys.executable, "-m", "piecework", "serve", str(folder), "--port", "0", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert reason in done.stderr.splitlines()[-1]
