"""GGUF files of encoders, with the names and metadata that llama.cpp's converter gives them, make
the vectors of the Hugging Face folder.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf.quants import quantize
from gguf_models import finish
from pooled_texts import inputs, run
from pooling_here import client_here, load
from safetensors.torch import load_file, save_file
from tiny_encoders import SPECIAL, WORDS, make_tiny_encoder, write_modules

from piecework.runtime.pooling.folder import makes_vectors, read_folder

Kind = gguf.GGMLQuantizationType
BERT = {
    r"embeddings\.word_embeddings": "token_embd",
    r"embeddings\.position_embeddings": "position_embd",
    r"embeddings\.token_type_embeddings": "token_types",
    r"embeddings\.LayerNorm": "token_embd_norm",
    r"encoder\.layer\.(\d+)\.attention\.self\.query": r"blk.\1.attn_q",
    r"encoder\.layer\.(\d+)\.attention\.self\.key": r"blk.\1.attn_k",
    r"encoder\.layer\.(\d+)\.attention\.self\.value": r"blk.\1.attn_v",
    r"encoder\.layer\.(\d+)\.attention\.output\.dense": r"blk.\1.attn_output",
    r"encoder\.layer\.(\d+)\.attention\.output\.LayerNorm": r"blk.\1.attn_output_norm",
    r"encoder\.layer\.(\d+)\.intermediate\.dense": r"blk.\1.ffn_up",
    r"encoder\.layer\.(\d+)\.output\.dense": r"blk.\1.ffn_down",
    r"encoder\.layer\.(\d+)\.output\.LayerNorm": r"blk.\1.layer_output_norm",
    r"classifier\.dense": "cls",
    r"classifier\.out_proj": "cls.output",
}
NAMES: dict[str, dict[str, str]] = {
    "bert": BERT,
    "roberta": BERT,
    "jina": {
        **BERT,
        r"encoder\.layer\.(\d+)\.mlp\.gated_layers": r"blk.\1.ffn_up",
        r"encoder\.layer\.(\d+)\.mlp\.wo": r"blk.\1.ffn_down",
        r"encoder\.layer\.(\d+)\.mlp\.layernorm": r"blk.\1.layer_output_norm",
    },
    "nomic_bert": {
        r"embeddings\.word_embeddings": "token_embd",
        r"embeddings\.token_type_embeddings": "token_types",
        "emb_ln": "token_embd_norm",
        r"encoder\.layers\.(\d+)\.attn\.Wqkv": r"blk.\1.attn_qkv",
        r"encoder\.layers\.(\d+)\.attn\.out_proj": r"blk.\1.attn_output",
        r"encoder\.layers\.(\d+)\.norm1": r"blk.\1.attn_output_norm",
        r"encoder\.layers\.(\d+)\.mlp\.fc11": r"blk.\1.ffn_up",
        r"encoder\.layers\.(\d+)\.mlp\.fc12": r"blk.\1.ffn_gate",
        r"encoder\.layers\.(\d+)\.mlp\.fc2": r"blk.\1.ffn_down",
        r"encoder\.layers\.(\d+)\.norm2": r"blk.\1.layer_output_norm",
    },
    "modernbert": {
        r"embeddings\.tok_embeddings": "token_embd",
        r"embeddings\.norm": "token_embd_norm",
        "final_norm": "output_norm",
        r"layers\.(\d+)\.attn_norm": r"blk.\1.attn_norm",
        r"layers\.(\d+)\.attn\.Wqkv": r"blk.\1.attn_qkv",
        r"layers\.(\d+)\.attn\.Wo": r"blk.\1.attn_output",
        r"layers\.(\d+)\.mlp_norm": r"blk.\1.ffn_norm",
        r"layers\.(\d+)\.mlp\.Wi": r"blk.\1.ffn_up",
        r"layers\.(\d+)\.mlp\.Wo": r"blk.\1.ffn_down",
    },
    "gemma3_text": {
        "embed_tokens": "token_embd",
        "norm": "output_norm",
        **{
            rf"layers\.(\d+)\.{theirs}": rf"blk.\1.{ours}"
            for theirs, ours in {
                r"self_attn\.q_proj": "attn_q",
                r"self_attn\.k_proj": "attn_k",
                r"self_attn\.v_proj": "attn_v",
                r"self_attn\.o_proj": "attn_output",
                r"self_attn\.q_norm": "attn_q_norm",
                r"self_attn\.k_norm": "attn_k_norm",
                "input_layernorm": "attn_norm",
                "post_attention_layernorm": "post_attention_norm",
                "pre_feedforward_layernorm": "ffn_norm",
                "post_feedforward_layernorm": "post_ffw_norm",
                r"mlp\.gate_proj": "ffn_gate",
                r"mlp\.up_proj": "ffn_up",
                r"mlp\.down_proj": "ffn_down",
            }.items()
        },
    },
}


def convert(
    folder: Path,
    path: Path,
    architecture: str,
    names: dict[str, str],
    *,
    kind: Kind = Kind.F32,
    first_position: int = 0,
    denses: int = 0,
    **changes: Any,
) -> Path:
    """Write a folder as a .gguf file. `changes`: metadata of the architecture; None leaves one
    out.
    """
    content = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    keys = {
        "context_length": content["max_position_embeddings"] - first_position,
        "embedding_length": content["hidden_size"],
        "block_count": content["num_hidden_layers"],
        "attention.head_count": content["num_attention_heads"],
        "feed_forward_length": content["intermediate_size"],
        "attention.layer_norm_epsilon": content.get("layer_norm_eps", 1e-5),
        "pooling_type": 1,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    for key, value in keys.items():
        if isinstance(value, float):
            writer.add_float32(f"{architecture}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_tokenizer_model("bert")
    writer.add_token_list([*SPECIAL, *(f"\u2581{word}" for word in WORDS)])
    writer.add_token_types([3] * len(SPECIAL) + [1] * len(WORDS))
    tensors = load_file(folder / "model.safetensors")
    for number in range(2, 2 + denses):
        dense = load_file(folder / f"{number}_Dense" / "model.safetensors")
        writer.add_tensor(f"dense_{number}.weight", dense["linear.weight"].numpy())
    for name, tensor in tensors.items():
        stem, _, last = name.removeprefix("roberta.").rpartition(".")
        found = [re.sub(f"^{ours}$", theirs, stem) for ours, theirs in names.items()]
        renamed = [each for each in found if each != stem]
        if stem.startswith("pooler"):
            continue
        assert len(renamed) == 1, (name, renamed)
        array = np.atleast_1d(tensor.numpy().squeeze())
        if renamed[0] == "position_embd":
            array = array[first_position:]
        if architecture == "gemma-embedding" and "norm" in renamed[0]:
            array = array + 1
        raw = kind if array.ndim == 2 and "embd" not in renamed[0] else Kind.F32
        stored, raw_dtype = quantize(array, raw), None if raw == Kind.F32 else raw
        writer.add_tensor(f"{renamed[0]}.{last}", stored, raw_dtype=raw_dtype)
    finish(writer)
    return path


def normalised(vectors: np.ndarray) -> np.ndarray:
    return F.normalize(torch.from_numpy(vectors), dim=-1).numpy()


@pytest.mark.parametrize(
    ("model_type", "architecture", "changes"),
    [
        ("bert", "bert", {}),
        ("roberta", "bert", {"first_position": 1}),
        ("nomic_bert", "nomic-bert", {"rope__freq_base": 1000.0}),
        (
            "modernbert",
            "modern-bert",
            {
                "rope__freq_base": 160000.0,
                "rope__freq_base_swa": 10000.0,
                "attention__sliding_window": 6,
                "attention__sliding_window_pattern": 3,
            },
        ),
    ],
)
def test_a_file_makes_the_vectors_of_its_folder_normalised(
    tmp_path: Path, model_type: str, architecture: str, changes: dict[str, Any]
) -> None:
    types = {"type_vocab_size": 1} if model_type == "roberta" else {}
    folder = make_tiny_encoder(tmp_path / "folder", model_type, **types)
    file = convert(folder, tmp_path / "m.gguf", architecture, NAMES[model_type], **changes)
    assert makes_vectors(str(file))
    np.testing.assert_allclose(run(file, inputs()), normalised(run(folder, inputs())), atol=1e-5)


def test_embedding_gemma_sees_both_ways_and_projects_by_the_files_matrices(tmp_path: Path) -> None:
    own = {"use_bidirectional_attention": True, "sliding_window_pattern": 6}
    folder = make_tiny_encoder(tmp_path / "folder", "gemma3_text", num_hidden_layers=6, **own)
    write_modules(folder, "pooling_mode_mean_tokens", dense=(32, 48, 32), activation="Identity")
    file = convert(
        folder,
        tmp_path / "m.gguf",
        "gemma-embedding",
        NAMES["gemma3_text"],
        denses=2,
        attention__head_count_kv=1,
        attention__key_length=8,
        attention__value_length=8,
        attention__layer_norm_epsilon=None,
        attention__layer_norm_rms_epsilon=1e-6,
        attention__sliding_window=8,
        rope__freq_base=1e6,
    )
    assert makes_vectors(str(file))
    np.testing.assert_allclose(run(file, inputs()), run(folder, inputs()), atol=1e-5)


@pytest.mark.parametrize("separate", [False, True], ids=["one matrix", "two matrices"])
def test_gates_and_values_of_jina_v2_are_one_matrix_or_two(tmp_path: Path, separate: bool) -> None:
    folder = make_tiny_encoder(tmp_path / "folder", "bert", max_position_embeddings=64)
    tensors = {
        name.replace("output.dense", "mlp.wo") if "attention" not in name else name: each
        for name, each in load_file(folder / "model.safetensors").items()
        if "position" not in name and "intermediate.dense.bias" not in name
    }
    tensors = {
        re.sub(r"(\d)\.output\.LayerNorm", r"\1.mlp.layernorm", name): each
        for name, each in tensors.items()
    }
    gates = [name for name in tensors if "intermediate" in name]
    for name in gates:
        whole = tensors.pop(name)
        fused = name.replace("intermediate.dense", "mlp.gated_layers")
        tensors[fused] = torch.cat((whole, whole.flip(0)))
    save_file(tensors, folder / "model.safetensors")
    content = json.loads((folder / "config.json").read_text())
    content |= {"architectures": ["JinaBertModel"], "position_embedding_type": "alibi"}
    (folder / "config.json").write_text(json.dumps(content))
    expected = normalised(run(folder, inputs()))
    names = dict(NAMES["jina"])
    if separate:
        for name in [name for name in tensors if "gated" in name]:
            first, second = tensors.pop(name).chunk(2)
            tensors[name.replace("layers", "layers_w")] = first.contiguous()
            tensors[name.replace("layers", "layers_v")] = second.contiguous()
        save_file(tensors, folder / "model.safetensors")
        names[r"encoder\.layer\.(\d+)\.mlp\.gated_layers_w"] = r"blk.\1.ffn_gate"
        names[r"encoder\.layer\.(\d+)\.mlp\.gated_layers_v"] = r"blk.\1.ffn_up"
    file = convert(folder, tmp_path / "m.gguf", "jina-bert-v2", names)
    np.testing.assert_allclose(run(file, inputs()), expected, atol=1e-5)


def test_blocks_of_eight_bits_become_numbers(tmp_path: Path) -> None:
    folder = make_tiny_encoder(tmp_path / "folder", "bert", intermediate_size=64)
    file = convert(folder, tmp_path / "m.gguf", "bert", BERT, kind=Kind.Q8_0)
    cosines = (run(file, inputs()) * normalised(run(folder, inputs()))).sum(-1)
    assert cosines.min() > 0.999 and cosines.max() < 1


async def test_a_reranker_scores_pairs_of_texts(tmp_path: Path) -> None:
    types = {"type_vocab_size": 1}
    folder = make_tiny_encoder(tmp_path / "folder", "roberta", classifier=True, **types)
    file = convert(folder, tmp_path / "m.gguf", "bert", BERT, first_position=1, pooling_type=4)
    body = {"query": "the quick fox", "documents": ["a dog sleeps", "never"]}
    answers = [
        (await client_here(load(path))[0].post("/v1/rerank", json=body)).json()["results"]
        for path in (folder, file)
    ]
    scores = [[each["relevance_score"] for each in answer] for answer in answers]
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("bert", {"pooling_type": 4}, "classifier of this kind"),
        ("bert", {"embedding_length": None}, "bert.embedding_length"),
        ("bert", {"block_count": 10**6}, "too few tensors"),
        ("neo-bert", {}, "'neo-bert' is not supported for vectors.*bert.*nomic-bert"),
    ],
)
def test_files_that_cannot_be_served_are_refused(
    tmp_path: Path, architecture: str, changes: dict[str, Any], reason: str
) -> None:
    folder = make_tiny_encoder(tmp_path / "folder", "bert")
    file = convert(folder, tmp_path / "m.gguf", architecture, BERT, **changes)
    assert makes_vectors(str(file))
    with pytest.raises(ValueError, match=reason):
        read_folder(str(file))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"x" * 100, b"general.architecture\x08\0\0\0"])
def test_what_is_no_such_file_makes_no_vectors(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    assert not makes_vectors(str(tmp_path / "m.gguf"))
    assert not makes_vectors(str(tmp_path / "absent.gguf"))
