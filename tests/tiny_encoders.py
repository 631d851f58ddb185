"""Tiny random encoders and their classifiers in Hugging Face's format, for tests, and the decoders
of `tiny_models` as embedders.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tiny_models import make_tiny_model
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

ENCODERS = (
    "bert",
    "roberta",
    "xlm-roberta",
    "modernbert",
    "distilbert",
    "mpnet",
    "albert",
    "nomic_bert",
    "gte",
    "deberta-v2",
    "jina_embeddings_v3",
    "camembert",
    "electra",
)
WITH_TYPES = ("bert", "albert", "nomic_bert", "electra")
"""Whose classifiers are told which tokens are a pair's second text."""
WORDS = [
    "the",
    "a",
    "fox",
    "dog",
    "cat",
    "jumps",
    "sleeps",
    "over",
    "under",
    "quick",
    "lazy",
    "brown",
    "red",
    "and",
    "never",
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
VOCAB = 64
_SENTENCE = "sentence_transformers.models."


def make_tiny_encoder(
    path: Path, model_type: str, *, classifier: bool = False, **overrides: Any
) -> Path:
    """Write a model folder; `overrides` are members of its config.json."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 66,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "cls_token_id": 2,
        "sep_token_id": 3,
        "num_labels": 1,
        "dtype": "float32",
    }
    if model_type == "gemma3_text":
        settings |= {"num_key_value_heads": 1, "head_dim": 8, "query_pre_attn_scalar": 8}
        settings |= {"sliding_window": 8, "sliding_window_pattern": 2}
    if model_type == "electra":
        settings |= {"embedding_size": 16}
    if model_type == "albert":
        settings |= {"embedding_size": 16, "inner_group_num": 2, "num_hidden_groups": 2}
        settings |= {"num_hidden_layers": 4}
    if model_type == "deberta-v2":
        settings |= {"relative_attention": True, "pos_att_type": "p2c|c2p", "position_buckets": 8}
        settings |= {"share_att_key": True, "norm_rel_ebd": "layer_norm"}
        settings |= {"position_biased_input": False}
    if model_type == "distilbert":
        settings |= {"hidden_dim": 48}
    if model_type == "modernbert":
        settings |= {"local_attention": 6, "num_hidden_layers": 4}
    config: PretrainedConfig = AutoConfig.for_model(model_type, **{**settings, **overrides})
    torch.manual_seed(0)
    kind = AutoModelForSequenceClassification if classifier else AutoModel
    save_random(kind.from_config(config), path)
    write_pair_tokenizer(path)
    return path


def make_tiny_embedder(path: Path, architecture: str, **overrides: Any) -> Path:
    """A decoder's folder, saved without its head as published embedders are."""
    from transformers import AutoModelForCausalLM

    make_tiny_model(path, architecture, **overrides)
    trunk = AutoModelForCausalLM.from_pretrained(path).model
    trunk.save_pretrained(path)
    return path


def save_random(model: PreTrainedModel, path: Path, *, seed: int = 0) -> None:
    """Norms and biases random too: as they start, one would not see that they are left out."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            mean = float("norm" in name.lower() and name.endswith("weight"))
            torch.nn.init.normal_(parameter, mean=mean, std=0.3, generator=generator)
    model.save_pretrained(path)


def write_modules(
    path: Path,
    mode: str,
    *,
    normalize: bool = True,
    dense: tuple[int, ...] = (),
    activation: str = "Tanh",
    max_length: int | None = None,
    prompts: dict[str, str] | None = None,
    default_prompt: str | None = None,
) -> None:
    """What sentence-transformers writes beside a transformer. `dense`: sizes of a chain of
    projections, which have biases where `activation` is Tanh.
    """
    kinds = ["Transformer", "Pooling"]
    _write(path / "1_Pooling" / "config.json", {"word_embedding_dimension": 32, mode: True})
    generator = torch.Generator().manual_seed(1)
    for sizes in pairwise(dense):
        folder = path / f"{len(kinds)}_Dense"
        kinds.append("Dense")
        _write_dense(folder, *sizes, activation, generator)
    if normalize:
        kinds.append("Normalize")
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": _SENTENCE + kind}
        for i, kind in enumerate(kinds)
    ]
    _write(path / "modules.json", modules)
    if max_length is not None:
        _write(path / "sentence_bert_config.json", {"max_seq_length": max_length})
    if prompts is not None:
        content = {"prompts": prompts, "default_prompt_name": default_prompt}
        _write(path / "config_sentence_transformers.json", content)


def _write_dense(
    folder: Path, size: int, to: int, activation: str, generator: torch.Generator
) -> None:
    from safetensors.torch import save_file

    bias = activation == "Tanh"
    kind = "torch.nn.modules.activation.Tanh" if bias else f"torch.nn.modules.linear.{activation}"
    config = {"in_features": size, "out_features": to, "bias": bias, "activation_function": kind}
    _write(folder / "config.json", config)
    weights = {"linear.weight": torch.randn(to, size, generator=generator)}
    if bias:
        weights["linear.bias"] = torch.randn(to, generator=generator)
    save_file(weights, folder / "model.safetensors")


def write_pair_tokenizer(path: Path) -> None:
    """Words, and what BERT puts around a text and between two."""
    vocab = {token: number for number, token in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.save(str(path / "tokenizer.json"))
    names = {"pad_token": 0, "unk_token": 1, "cls_token": 2, "sep_token": 3}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 64,
    }
    settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    _write(path / "tokenizer_config.json", settings | {n: SPECIAL[i] for n, i in names.items()})


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
