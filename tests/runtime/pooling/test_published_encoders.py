"""Encoders as they are published for code of their own: config.json and tensors are other than what
transformers writes, and what transformers has no class for is computed here by the papers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pooled_texts import inputs, run, states
from safetensors.torch import load_file, save_file
from tiny_encoders import make_tiny_encoder

from piecework.runtime.config.encoder import EncoderConfig
from piecework.runtime.models.deberta_v2 import DebertaV2
from piecework.runtime.models.gte import Gte
from piecework.runtime.models.jina_bert import JinaBert
from piecework.runtime.models.jina_embeddings_v3 import JinaEmbeddingsV3
from piecework.runtime.models.nomic_bert import NomicBert

HEADS, SIZE, WIDE, LAYERS = 4, 32, 48, 2
NOMIC = {
    "architectures": ["NomicBertModel"],
    "model_type": "nomic_bert",
    "activation_function": "swiglu",
    "layer_norm_epsilon": 1e-12,
    "n_embd": SIZE,
    "n_head": HEADS,
    "n_inner": WIDE,
    "n_layer": LAYERS,
    "n_positions": 128,
    "max_trained_positions": 64,
    "rotary_emb_base": 1000,
    "rotary_scaling_factor": 2,
    "vocab_size": 64,
    "type_vocab_size": 2,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "qkv_proj_bias": False,
}


def rewrite(folder: Path, content: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(content))


def means(folder: Path) -> torch.Tensor:
    return torch.stack([state.mean(0) for state in states(folder, inputs())])


def test_nomic_bert_is_read_by_the_names_of_its_own_code(tmp_path: Path) -> None:
    folder = make_tiny_encoder(tmp_path, "nomic_bert")
    expected = means(folder)
    rewrite(folder, NOMIC)
    np.testing.assert_allclose(run(folder, inputs()), expected, atol=1e-5)


def test_positions_that_nomic_bert_was_not_trained_for_are_left_out() -> None:
    assert EncoderConfig.from_content(NOMIC, NomicBert).max_length == 64


def test_gte_with_ntk_scaling_turns_by_a_larger_base_and_slower(tmp_path: Path) -> None:
    factor, theta = 4.0, 500.0
    slower = factor ** (2 / (SIZE // HEADS))
    rope = {"rope_type": "linear", "factor": slower, "rope_theta": theta * factor}
    folder = make_tiny_encoder(tmp_path, "gte", type_vocab_size=0, rope_parameters=rope)
    expected = means(folder)
    file = folder / "model.safetensors"
    save_file({f"new.{name}": tensor for name, tensor in load_file(file).items()}, file)
    content = json.loads((folder / "config.json").read_text())
    del content["rope_parameters"]
    content |= {"architectures": ["NewModel"], "model_type": "new", "rope_theta": theta}
    content |= {"position_embedding_type": "rope", "layer_norm_type": "layer_norm"}
    rewrite(folder, content | {"rope_scaling": {"type": "ntk", "factor": factor}})
    np.testing.assert_allclose(run(folder, inputs()), expected, atol=1e-5)


def norm(x: torch.Tensor, tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
    return F.layer_norm(x, weight.shape, weight, bias, 1e-5)


def random_tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) / 4 for name, shape in shapes.items()}


def turned(x: torch.Tensor, theta: float) -> torch.Tensor:
    """x [H, L, D] by its positions."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half) / half)
    angles = torch.outer(torch.arange(x.shape[1]).float(), frequencies)
    first, second = x.split(half, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def with_experts(ids: torch.Tensor, tensors: dict[str, torch.Tensor], top: int) -> torch.Tensor:
    """Nomic BERT whose second layer has experts: ids [L] to states [L, SIZE]."""
    x = tensors["embeddings.word_embeddings.weight"][ids]
    x = norm(x + tensors["embeddings.token_type_embeddings.weight"][0], tensors, "emb_ln")
    for number in range(LAYERS):
        own = f"encoder.layers.{number}."
        part = {name.removeprefix(own): each for name, each in tensors.items()}
        heads = F.linear(x, part["attn.Wqkv.weight"], part["attn.Wqkv.bias"])
        q, k, v = heads.view(len(ids), 3, HEADS, -1).permute(1, 2, 0, 3)
        seen = F.scaled_dot_product_attention(turned(q, 10000.0), turned(k, 10000.0), v)
        seen = F.linear(
            seen.transpose(0, 1).flatten(1),
            part["attn.out_proj.weight"],
            part["attn.out_proj.bias"],
        )
        x = norm(x + seen, part, "norm1")
        if number == 0:
            wide = F.gelu(F.linear(x, part["mlp.fc1.weight"], part["mlp.fc1.bias"]))
            x = norm(
                x + F.linear(wide, part["mlp.fc2.weight"], part["mlp.fc2.bias"]), part, "norm2"
            )
            continue
        rows = []
        for row in x:
            shares, chosen = (part["mlp.router.layer.weight"] @ row).softmax(-1).topk(top)
            found = part["mlp.experts.bias"].clone()
            for share, expert in zip(shares, chosen.tolist(), strict=True):
                up, down = (
                    part[f"mlp.experts.mlp.{name}"].view(-1, WIDE, SIZE)[expert]
                    for name in ("w1", "w2")
                )
                found += share * (F.gelu(up @ row) @ down)
            rows.append(found)
        x = norm(x + torch.stack(rows), part, "norm2")
    return x


def test_nomic_bert_with_experts_is_what_its_paper_says(tmp_path: Path) -> None:
    experts, top = 4, 2
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (64, SIZE),
        "embeddings.token_type_embeddings.weight": (1, SIZE),
        "emb_ln.weight": (SIZE,),
        "emb_ln.bias": (SIZE,),
        "encoder.layers.0.mlp.fc1.weight": (WIDE, SIZE),
        "encoder.layers.0.mlp.fc1.bias": (WIDE,),
        "encoder.layers.0.mlp.fc2.weight": (SIZE, WIDE),
        "encoder.layers.0.mlp.fc2.bias": (SIZE,),
        "encoder.layers.1.mlp.router.layer.weight": (experts, SIZE),
        "encoder.layers.1.mlp.experts.mlp.w1": (experts * WIDE, SIZE),
        "encoder.layers.1.mlp.experts.mlp.w2": (experts * WIDE, SIZE),
        "encoder.layers.1.mlp.experts.bias": (SIZE,),
    }
    for number in range(LAYERS):
        for name, rows in (("Wqkv", 3 * SIZE), ("out_proj", SIZE)):
            shapes[f"encoder.layers.{number}.attn.{name}.weight"] = rows, SIZE
            shapes[f"encoder.layers.{number}.attn.{name}.bias"] = (rows,)
        for name in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"):
            shapes[f"encoder.layers.{number}.{name}"] = (SIZE,)
    tensors = random_tensors(shapes)
    save_file(tensors, tmp_path / "model.safetensors")
    biased = dict.fromkeys(("mlp_fc1_bias", "mlp_fc2_bias", "qkv_proj_bias"), True)
    content = NOMIC | biased | {"activation_function": "gelu", "rotary_emb_base": 10000.0}
    content |= {"layer_norm_epsilon": 1e-5, "type_vocab_size": 1}
    rewrite(tmp_path, content | {"moe_every_n_layers": 2, "num_experts": experts, "moe_top_k": top})
    expected = [
        with_experts(torch.from_numpy(each.token_ids).long(), tensors, top).mean(0)
        for each in inputs()
    ]
    np.testing.assert_allclose(run(tmp_path, inputs()), torch.stack(expected), atol=1e-5)


def with_alibi(ids: torch.Tensor, tensors: dict[str, torch.Tensor], heads: int) -> torch.Tensor:
    """Jina v2: ids [L] to states [L, SIZE]."""
    x = tensors["embeddings.word_embeddings.weight"][ids]
    x = x + tensors["embeddings.token_type_embeddings.weight"][0]
    x = norm(x, tensors, "embeddings.LayerNorm")
    # Of six heads four have the slopes of four, two the first and third of eight.
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])
    places = torch.arange(len(ids))
    falling = -slopes[:, None, None] * (places[:, None] - places).abs()
    for number in range(LAYERS):
        own = f"encoder.layer.{number}."
        part = {name.removeprefix(own): each for name, each in tensors.items()}

        def linear(given: torch.Tensor, name: str, part: Any = part) -> torch.Tensor:
            return F.linear(given, part[f"{name}.weight"], part.get(f"{name}.bias"))

        q, k, v = (
            linear(x, f"attention.self.{name}").unflatten(-1, (heads, -1)).transpose(0, 1)
            for name in ("query", "key", "value")
        )
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + falling
        seen = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = norm(x + linear(seen, "attention.output.dense"), part, "attention.output.LayerNorm")
        gates, values = linear(x, "mlp.gated_layers").chunk(2, -1)
        x = norm(x + linear(F.gelu(gates) * values, "mlp.wo"), part, "mlp.layernorm")
    return x


def test_jina_v2_is_what_its_paper_says(tmp_path: Path) -> None:
    heads, size = 6, 24
    names = [f"attention.self.{name}" for name in ("query", "key", "value")]
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (64, size),
        "embeddings.token_type_embeddings.weight": (2, size),
        "embeddings.LayerNorm.weight": (size,),
        "embeddings.LayerNorm.bias": (size,),
    }
    for own in (f"encoder.layer.{number}." for number in range(LAYERS)):
        for name in (*names, "attention.output.dense"):
            shapes |= {f"{own}{name}.weight": (size, size), f"{own}{name}.bias": (size,)}
        for name in ("attention.output.LayerNorm", "mlp.layernorm"):
            shapes |= {f"{own}{name}.weight": (size,), f"{own}{name}.bias": (size,)}
        shapes[f"{own}mlp.gated_layers.weight"] = 2 * WIDE, size
        shapes |= {f"{own}mlp.wo.weight": (size, WIDE), f"{own}mlp.wo.bias": (size,)}
    tensors = random_tensors(shapes)
    save_file(tensors, tmp_path / "model.safetensors")
    rewrite(
        tmp_path,
        {
            "architectures": ["JinaBertForMaskedLM"],
            "model_type": "bert",
            "position_embedding_type": "alibi",
            "feed_forward_type": "geglu",
            "vocab_size": 64,
            "hidden_size": size,
            "intermediate_size": WIDE,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": heads,
            "layer_norm_eps": 1e-5,
        },
    )
    expected = [
        with_alibi(torch.from_numpy(each.token_ids).long(), tensors, heads).mean(0)
        for each in inputs()
    ]
    np.testing.assert_allclose(run(tmp_path, inputs()), torch.stack(expected), atol=1e-5)


GTE = {"architectures": ["NewModel"], "model_type": "new"}
DEBERTA = {"architectures": ["DebertaV2Model"], "model_type": "deberta-v2"}
JINA = {"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta"}
MODELS = {
    "nomic_bert": NomicBert,
    "new": Gte,
    "deberta-v2": DebertaV2,
    "bert": JinaBert,
    "xlm-roberta": JinaEmbeddingsV3,
}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (NOMIC | {"prenorm": True}, "prenorm is True, but only False"),
        (NOMIC | {"activation_function": "glu"}, "activation 'glu'"),
        (NOMIC | {"rotary_emb_base": -1}, "rope_theta must be more than 0"),
        (NOMIC | {"moe_every_n_layers": 2, "num_experts": 2, "moe_top_k": 3}, "num_experts"),
        (GTE | {"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_scaling"),
        (GTE | {"rope_scaling": {"type": "ntk", "factor": 0}}, "factor must be more than 0"),
        (GTE | {"layer_norm_type": "rms_norm"}, "layer_norm_type"),
        (GTE | {"rope_parameters": {"rope_type": "yarn"}}, "rope scaling 'yarn'"),
        (JINA | {"lora_adaptations": "abc"}, "lora_adaptations must be a list"),
        (JINA | {"lora_adaptations": ["a"], "lora_rank": 0}, "lora_rank must be at least 1"),
        (JINA | {"position_embedding_type": "alibi"}, "position_embedding_type 'alibi'"),
        (JINA | {"model_type": "bert", "feed_forward_type": "glu"}, "feed_forward_type 'glu'"),
        (DEBERTA | {"conv_kernel_size": 3}, "convolution.*choose a DeBERTa v3"),
        (DEBERTA | {"position_buckets": 2}, "position_buckets"),
        (DEBERTA | {"embedding_size": 128}, "embedding_size is 128"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_name(content: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        EncoderConfig.from_content(content, MODELS[content["model_type"]])
