"""Packed models compute what their checkpoints say, in the bits that these hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tiny_models import make_tiny_model

from piecework.kernels.cpu.native.linear import layout_name, native_linear
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.layers.linear import FusedLinear, Linear, StoredTensor
from piecework.runtime.llm import LLM
from piecework.runtime.loader.hollow import hollow_model
from piecework.runtime.loader.loader import load_model
from piecework.runtime.models.llama import LlamaForCausalLM
from piecework.runtime.quantization.gguf import GGUFBlocks
from piecework.runtime.quantization.methods import linear_kinds

CPU = torch.device("cpu")


def write_gguf(
    path: Path, kinds: dict[str, str], default: str = "Q4_1", *, tied: bool = True
) -> Path:
    """A Llama of random weights; `kinds`: the formats of tensors by a part of their name."""
    writer = gguf.GGUFWriter(path, "llama")
    hidden, inner, heads, kv_heads, layers, vocab = 64, 96, 4, 2, 2, 160
    for add, value in [
        (writer.add_context_length, 256),
        (writer.add_embedding_length, hidden),
        (writer.add_block_count, layers),
        (writer.add_feed_forward_length, inner),
        (writer.add_head_count, heads),
        (writer.add_head_count_kv, kv_heads),
        (writer.add_vocab_size, vocab),
    ]:
        add(value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{i}" for i in range(vocab)])
    writer.add_eos_token_id(0)
    shapes = {"token_embd": (vocab, hidden)} | ({} if tied else {"output": (vocab, hidden)})
    for i in range(layers):
        block = {
            "attn_q": (hidden, hidden),
            "attn_k": (hidden // 2, hidden),
            "attn_v": (hidden // 2, hidden),
            "attn_output": (hidden, hidden),
        }
        block |= {
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        kind = next((kind for part, kind in kinds.items() if part in name), default)
        tensor = gguf.GGMLQuantizationType[kind]
        numbers = random.normal(0, 0.1, shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(numbers, tensor), raw_dtype=tensor)
    for name in [
        "output_norm",
        *(f"blk.{i}.{norm}" for i in range(layers) for norm in ("attn_norm", "ffn_norm")),
    ]:
        writer.add_tensor(f"{name}.weight", random.uniform(0.5, 1.5, hidden).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path: Path, **settings: Any) -> LlamaForCausalLM:
    return load_model(str(path), torch.bfloat16, CPU, False, native_linear(), **settings)


def layers_of(loaded: LlamaForCausalLM) -> dict[str, Linear]:
    return {name: module for name, module in loaded.named_modules() if isinstance(module, Linear)}


def assert_same_layers(packed: LlamaForCausalLM, path: Path) -> None:
    """Every linear layer gives what one with the file's numbers in float32 gives."""
    exact = layers_of(load_model(str(path), torch.float32, CPU, False))
    for name, layer in layers_of(packed).items():
        x = torch.randn(5, layer.in_features).bfloat16()
        expected = exact[name](x.float())
        assert torch.allclose(layer(x).float(), expected, rtol=2.0**-7, atol=0.01), name


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("tied", [True, False])
def test_quantised_weights_stay_in_their_bits(kind: str, tied: bool, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", {}, kind, tied=tied)
    loaded = load(path, quantization="auto")
    assert {layout_name(layer.layout) for layer in layers_of(loaded).values()} == {kind}
    assert set(linear_kinds(loaded).values()) == {kind}
    assert_same_layers(loaded, path)
    exact = load_model(str(path), torch.float32, CPU, False)
    embedding, packed = exact.model.embed_tokens.weight, loaded.model.embed_tokens
    assert packed.kind == kind and (packed.weight is loaded.lm_head.weight) == tied
    ids = torch.randperm(len(embedding))
    assert torch.equal(packed(ids), embedding[ids].bfloat16())


def test_parts_of_several_kinds_stay_in_their_bits(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "model.gguf", {"attn_v": "Q8_0", "ffn_down": "Q5_0", "token_embd": "F16"}
    )
    loaded = load(path, quantization="auto")
    kinds = {name.rpartition(".")[2]: kind for name, kind in linear_kinds(loaded).items()}
    assert kinds == {
        "qkv_proj": "gguf Q4_1 Q4_1 Q8_0 packed",
        "o_proj": "Q4_1",
        "gate_up_proj": "Q4_1",
        "down_proj": "Q5_0",
        "lm_head": "bfloat16",
    }
    assert_same_layers(loaded, path)


def test_nothing_is_kept_unless_wanted(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", {})
    loaded = load(path)
    assert set(linear_kinds(loaded).values()) == {"bfloat16"}
    assert_same_layers(loaded, path)


@pytest.mark.parametrize("tied", [True, False])
def test_a_hollow_model_has_the_shapes_of_the_packed_one(tied: bool, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", {"ffn_down": "Q8_0"}, tied=tied)
    loaded = load(path, quantization="auto")
    hollow = hollow_model(loaded.config, torch.bfloat16, CPU, native_linear(), linear_kinds(loaded))
    described = [
        {
            name: (tensor.shape, tensor.stride(), tensor.dtype, type(tensor))
            for name, tensor in model.state_dict(keep_vars=True).items()
        }
        for model in (hollow, loaded)
    ]
    assert described[0] == described[1]
    assert [layer.layout for layer in hollow.modules() if isinstance(layer, Linear)] == [
        layer.layout for layer in layers_of(loaded).values()
    ]


class Kernels:
    """Kernels whose layout is the blocks, one after another."""

    op: Any = None
    scaled_op: Any = None
    embedding_op: Any = None

    def layout(self, kind: str, in_features: int) -> int | None:
        return 7

    def packed_shape(self, kind: str, in_features: int, out_features: int) -> tuple[int, int]:
        return out_features, 2

    def pack(
        self, kind: str, parts: Sequence[torch.Tensor], scales: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        return torch.cat(list(parts))


def test_blocks_are_read_one_layer_at_a_time_and_put_in_order() -> None:
    """However they come: so that no second copy of a model lies in memory while it loads."""
    read = []

    def stored(part: str, rows: int) -> StoredTensor:
        def blocks() -> torch.Tensor:
            read.append(part)
            return torch.full((rows, 2), ord(part[0]), dtype=torch.uint8)

        return StoredTensor(
            Path(part), part, (rows, 32), lambda _: None, kind="Q4_1", blocks=blocks
        )

    layer, method = FusedLinear(32, {"q_proj": 3, "k_proj": 1, "v_proj": 2}), GGUFBlocks("Q4_1")
    method.create(layer)
    for part in ("v_proj", "q_proj", "k_proj"):
        method.places(layer, part)["weight"].load(stored(part, layer.parts[part]))
    assert not read and not layer.weight.numel()
    method.finish(layer, Kernels())
    assert bytes(layer.weight[:, 0].tolist()) == b"qqqkvv" and layer.layout == 7
    assert read == ["q_proj", "k_proj", "v_proj"]


def test_biases_and_odd_widths_stay_right(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, "qwen2", hidden_size=56, intermediate_size=77)
    loaded = load(path)
    assert layers_of(loaded)["model.layers.0.self_attn.qkv_proj"].bias is not None
    assert_same_layers(loaded, path)


@pytest.mark.usefixtures("compiled_here")
def test_graphs_on_and_off_agree_on_quantised_weights(tmp_path: Path) -> None:
    """Eagerly, in pieces, and in one native call a step: one file, one answer."""
    path = write_gguf(tmp_path / "model.gguf", {})
    prompts = [[5, 6, 7], list(range(20, 60)), [9]]
    params = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True, logprobs=1)
    found = []
    for settings in (
        {"disable_cuda_graph": True},
        {"piecewise_cuda_graph": True, "piecewise_cuda_graph_compiler": "eager"},
    ):
        llm = LLM(str(path), max_total_tokens=2048, context_length=128, num_threads=1, **settings)
        found.append(
            [
                [entry.logprob for entry in output.logprobs]
                for output in llm.generate(prompts, params)
            ]
        )
    assert np.allclose(found[0], found[1], atol=0.05)


def test_matrix_units_multiply_numbers_and_kernels_the_rest(tmp_path: Path) -> None:
    """Where torch is faster by numbers: they stay torch's, and so do those of a .gguf file."""
    kernels = native_linear(packs_numbers=False)
    folder = make_tiny_model(tmp_path / "model", hidden_size=64, intermediate_size=96)
    plain, int8 = (
        load_model(str(folder), torch.bfloat16, CPU, False, kernels, quantization=quantization)
        for quantization in ("auto", "int8")
    )
    assert not linear_kinds(plain) and len(linear_kinds(int8)) == 13
    path = write_gguf(tmp_path / "model.gguf", {})
    settings = {"kernels": kernels, "quantization": "auto"}
    assert not linear_kinds(load_model(str(path), torch.bfloat16, CPU, False, **settings))
