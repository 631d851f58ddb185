"""Ranks' parts of a layer, in every format of weights, are together the layer of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from gguf_models import Kind, write_gguf
from packed_models import awq, compressed, gptq, write_packed_model
from quantized_checkpoints import COMPRESSED, make_compressed, make_fp8
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model

from piecework.kernels.cpu.native.linear import native_linear
from piecework.runtime.layers.linear import Linear
from piecework.runtime.loader.loader import load_model
from piecework.runtime.loader.parallel import WHOLE, Shard
from piecework.runtime.quantization.methods import linear_kinds, named_linears
from tests.split_models import answer, answer_by, assert_alike, load

CPU = torch.device("cpu")
SIZES = {"num_hidden_layers": 1, "intermediate_size": 128}
BLOCKS = {"num_hidden_layers": 1, "intermediate_size": 512, "num_key_value_heads": 4}
"""Heads of 64 and halves of 128 and 256: no block of 128 is cut."""
UNEVEN = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32, "hidden_size": 96}
"""On two ranks the second has a key/value head of zeros, and two query heads."""


class Format(NamedTuple):
    """Writes a model into a folder, which is loaded with `--quantization`."""

    write: Callable[[Path], Path]
    quantization: str = "auto"
    scale_of_columns: bool = False
    """Whether each rank has scales of its own columns, so that its numbers are other ones."""


def packed(written: Any, architecture: str = "llama", **overrides: Any) -> Format:
    config, write = written

    def write_model(folder: Path) -> Path:
        source = make_tiny_model(folder / "source", architecture, **SIZES | overrides)
        return write_packed_model(folder, source, config, write).path

    return Format(write_model)


def scheme(name: str, **overrides: Any) -> Format:
    form, weights, inputs = COMPRESSED[name]
    return Format(
        lambda folder: make_compressed(folder, weights, inputs, form=form, **BLOCKS | overrides),
        scale_of_columns=name.endswith("token"),
    )


def fp8(*, block: bool, static: bool = False) -> Format:
    return Format(
        lambda folder: make_fp8(folder, block=block, static=static, **BLOCKS),
        scale_of_columns=not (block or static),
    )


def on_load(name: str, **overrides: Any) -> Format:
    return Format(
        lambda folder: make_tiny_model(folder, "qwen2", **SIZES | overrides),
        name,
        scale_of_columns=name in ("int8", "fp8"),
    )


def in_gguf(kind: Kind, architecture: str = "llama", **overrides: Any) -> Format:
    def write(folder: Path) -> Path:
        source = make_tiny_model(folder / "source", architecture, **SIZES | overrides)
        write_gguf(source, folder / "model.gguf", architecture, kind)
        return folder / "model.gguf"

    return Format(write)


FORMATS = {
    "16 bits": Format(lambda folder: make_tiny_model(folder, "qwen2", **SIZES)),
    "16 bits, uneven": Format(lambda folder: make_tiny_model(folder, **SIZES | UNEVEN)),
    "awq": packed(awq(32)),
    "awq, biases, uneven": packed(awq(16), "qwen2", **UNEVEN),
    "gptq": packed(gptq(4, 32)),
    "gptq, uneven": packed(gptq(4, 32), **UNEVEN),
    "gptq, 8 bits, zeros, v2": packed(gptq(8, 32, sym=False, version=2), "qwen3"),
    "gptq, rows, head": packed(gptq(8, -1, lm_head=True), vocab_size=1000),
    "pack": packed(compressed(4, 32)),
    "pack, uneven": packed(compressed(4, 32), **UNEVEN),
    "pack, zeros": packed(compressed(4, 32, symmetric=False), "qwen3"),
    "pack, rows": packed(compressed(4, -1)),
    "pack, 8 bits, zeros": packed(compressed(8, 16, symmetric=False), "qwen2"),
    **{name: scheme(name) for name in COMPRESSED},
    "fp8, uneven": scheme("fp8-channel-static", **UNEVEN | {"hidden_size": 192}),
    "fp8, blocks": fp8(block=True),
    "fp8, static": fp8(block=False, static=True),
    "on load q8_0": on_load("q8_0"),
    "on load q4_0, uneven": on_load("q4_0", **UNEVEN),
    "on load int8": on_load("int8"),
    "on load fp8": on_load("fp8", tie_word_embeddings=True),
    "widened": fp8(block=True)._replace(quantization="none"),
    "F16": in_gguf(Kind.F16, "qwen2"),
    "BF16, uneven": in_gguf(Kind.BF16, **UNEVEN),
    "Q5_0": in_gguf(Kind.Q5_0),
    "Q4_0": in_gguf(Kind.Q4_0, "qwen3"),
    "Q8_0, tied": in_gguf(Kind.Q8_0, tie_word_embeddings=True),
    "Q4_1, uneven": in_gguf(Kind.Q4_1, **UNEVEN),
}


REPEATED = ("16 bits", "awq", "pack", "pack, uneven", "gptq, uneven", "on load q8_0", "F16", "Q5_0")
"""Formats whose parts other lines have, or `SERVED` below."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in REPEATED)) for name in FORMATS]
)
def test_parts_are_together_the_whole(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    path = form.write(tmp_path)
    for dtype, kernels in ((torch.float32, None), (torch.bfloat16, native_linear())):
        models = [
            load_model(
                str(path), dtype, CPU, False, kernels, quantization=form.quantization, shard=shard
            )
            for shard in (WHOLE, Shard(0, 2), Shard(1, 2))
        ]
        kinds = [linear_kinds(model) for model in models]
        assert kinds[0].keys() == kinds[1].keys() and kinds[1] == kinds[2]
        whole, *parts = (dict(named_linears(model)) for model in models)
        loss = 1e-4 if dtype == torch.float32 else 0.03
        for layer_name, layer in whole.items():
            ranks = [layers[layer_name] for layers in parts]
            own = 0.05 if form.scale_of_columns and ranks[0].held_columns else 0.0
            assert_together(layer, ranks, dtype, loss + own, layer_name)


def assert_together(
    whole: Linear, ranks: list[Linear], dtype: torch.dtype, loss: float, name: str
) -> None:
    x = torch.randn(5, whole.in_features, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = whole.method.apply(whole, x).float()
    loss *= float(expected.abs().max())
    if ranks[0].held_columns is None:
        for part in whole.parts:
            rows, seen = expected[:, whole.rows(part)], set[int]()
            for rank in ranks:
                begin, size, of = rank.held_rows[part]
                end = min(begin + size, of)
                got = rank.method.apply(rank, x)[:, rank.rows(part)].float()
                assert torch.allclose(got[:, : end - begin], rows[:, begin:end], atol=loss), name
                assert not got[:, end - begin :].any(), name
                seen |= set(range(begin, end))
            assert seen == set(range(of))
        return
    total = torch.zeros_like(expected)
    for rank in ranks:
        assert rank.held_columns is not None
        begin, size, of = rank.held_columns
        own = torch.randn(5, size).to(dtype)
        own[:, : min(begin + size, of) - begin] = x[:, begin : begin + size]
        total += rank.method.apply(rank, own).float()
    assert torch.allclose(total, expected, atol=loss), name


SERVED = ("awq", "gptq, uneven", "pack, zeros", "on load q4_0, uneven", "Q8_0, tied")


@pytest.mark.parametrize("name", SERVED)
def test_two_ranks_of_few_bits_say_what_one_process_says(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    load_part = partial(load, form.write(tmp_path), quantization=form.quantization)
    assert_alike(answer_by(2, load_part), answer(load_part()))


@pytest.mark.parametrize("name", ["int8-channel-token", "fp8-tensor-token", "fp8-block-group"])
def test_two_ranks_quantise_activations_as_one_process_that_has_groups_of_their_columns(
    name: str, tmp_path: Path
) -> None:
    load_part = partial(load, FORMATS[name].write(tmp_path), quantization="auto")
    whole = load_part()
    for prefix, layer in named_linears(whole):
        if prefix.endswith(("o_proj", "down_proj")) and layer.input is not None:
            layer.input.group = min(layer.input.group, layer.in_features // 2)
    one, two = answer(whole), answer_by(2, load_part)
    found = (one.logprobs - two.logprobs).abs().flatten().sort().values
    # Sums in another order round a few activations to the other neighbour.
    assert found[int(0.9 * len(found))] < 1e-4 and found[-1] < 0.1
    assert one.tokens == two.tokens


@pytest.mark.parametrize("cache", ["fp8_e4m3", "int8"])
def test_two_ranks_keep_keys_and_values_in_8_bits(cache: str, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path)
    weights = load_file(path / "model.safetensors")
    weights["model.layers.1.self_attn.k_scale"] = torch.tensor(0.05)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    load_part = partial(load, path)
    assert_alike(answer_by(2, load_part, cache=cache), answer(load_part(), cache=cache), 1e-3)


REFUSED: dict[str, tuple[Format, str]] = {
    "a block of 128": (
        scheme("fp8-block-group", num_key_value_heads=2),
        r"qkv_proj, split over ranks: 64 of 128 rows .* cut a block of 128; .*-size 1$",
    ),
    "blocks along columns": (
        scheme("fp8-block-group", intermediate_size=384),
        r"down_proj, split over ranks: weights in blocks of 128 .* have 192; .*-size 1$",
    ),
    "groups": (
        packed(awq(32), intermediate_size=96),
        r"mlp\.down_proj, split over ranks: .*groups of 32 columns .* rows of 48 numbers; .* 1$",
    ),
    "words": (
        packed(gptq(8, -1), intermediate_size=100),
        r"gate_up_proj, split over ranks: .*50 numbers of 8 bits do not fill words .*; .* 1$",
    ),
    "act order": (
        packed(gptq(4, 32, act_order=True)),
        r"o_proj, split over ranks: its columns are in act order.*; use --tp-size 1$",
    ),
    "act order that is found": (
        packed(compressed(4, 32, act_order=True)),
        r"_proj: its columns are in act order",
    ),
    "blocks on load": (
        on_load("q8_0", intermediate_size=96),
        r"down_proj: 48 of its 96 columns a rank are no whole blocks of 32; use --tp-size 1$",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_split_would_cut_is_refused(case: str, tmp_path: Path) -> None:
    form, message = REFUSED[case]
    path, settings = form.write(tmp_path), {"quantization": form.quantization}
    with pytest.raises(ValueError, match=message):
        load_model(str(path), torch.float32, CPU, False, shard=Shard(0, 2), **settings)


def test_blocks_of_gguf_that_a_split_would_cut_are_refused(tmp_path: Path) -> None:
    path = in_gguf(Kind.Q4_1, intermediate_size=96).write(tmp_path)
    with pytest.raises(ValueError, match=r"down_proj: 48 of its 96 .* no whole blocks of Q4_1"):
        load_model(
            str(path),
            torch.bfloat16,
            CPU,
            False,
            native_linear(),
            quantization="auto",
            shard=Shard(1, 2),
        )
