"""What a model is: the numbers that its layers are built from, read from config.json or a GGUF file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .weights.gguf_reader import FastGGUFReader, metadata

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_TYPES = ("default", "linear", "llama3", "divided")
"""`divided` is GGUF's way to store llama3: the factor of each frequency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer. Lengths in tokens.

    `rope_scaling` holds the parameters of `rope_type` under transformers' names. `windows`: one sliding window a layer,
    None where the layer sees everything before it. `dtype`: the format the weights are stored in.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_type: str = "default"
    rope_scaling: dict[str, Any] = field(default_factory=dict)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: list[int | None] = field(default_factory=list)
    eos_token_ids: list[int] = field(default_factory=list)
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"rope scaling of type {self.rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> ModelConfig:
        """Of a Hugging Face folder. Raises `ValueError` with a remedy where there is none or the model is not supported."""
        architecture = _architecture(Path(folder))
        config = _auto_config(folder)
        rope = dict(config.rope_parameters or {})
        num_heads = config.num_attention_heads
        llama_bias = bool(getattr(config, "attention_bias", False))
        return cls(
            architecture=architecture,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            num_heads=num_heads,
            num_kv_heads=config.num_key_value_heads or num_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            intermediate_size=config.intermediate_size,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_position_embeddings,
            rope_theta=rope.pop("rope_theta", 10000.0),
            rope_type=rope.pop("rope_type", "default"),
            rope_scaling=rope,
            tie_word_embeddings=bool(config.tie_word_embeddings),
            qkv_bias=llama_bias or architecture == "Qwen2ForCausalLM",
            o_bias=llama_bias,
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            windows=_windows(config),
            eos_token_ids=_eos_token_ids(Path(folder), config),
            dtype=str(config.dtype or "bfloat16").removeprefix("torch."),
        )

    @classmethod
    def from_gguf(cls, reader: FastGGUFReader, *, eos_token_ids: list[int], rope_factors: list[float] | None = None) -> ModelConfig:
        """Of a GGUF file's metadata; `rope_factors`: what its rotary frequencies are divided by.

        Raises `ValueError` where a key is missing or the model is not supported.
        """
        name = metadata(reader, "general.architecture")
        architecture = _supported(GGUF_ARCHITECTURES.get(name, name))

        def get(key: str, default: Any = None) -> Any:
            value = metadata(reader, f"{name}.{key}", default)
            if value is None:
                raise ValueError(f"the GGUF file has no {name}.{key}; convert the model again")
            return value

        tensors = {tensor.name: tensor for tensor in reader.tensors}
        num_heads, hidden_size = get("attention.head_count"), get("embedding_length")
        scaling = metadata(reader, f"{name}.rope.scaling.type", "none")
        num_layers = get("block_count")
        rope_type, rope_scaling = ("default", {}) if scaling == "none" else (scaling, {})
        if scaling == "linear":
            rope_scaling = {"factor": get("rope.scaling.factor")}
        if rope_factors is not None:
            rope_type, rope_scaling = "divided", {"factors": rope_factors}
        return cls(
            architecture=architecture,
            vocab_size=int(tensors["token_embd.weight"].shape[1]) if "token_embd.weight" in tensors else get("vocab_size"),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=get("attention.head_count_kv", num_heads),
            head_dim=get("attention.key_length", hidden_size // num_heads),
            intermediate_size=get("feed_forward_length"),
            rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
            max_position_embeddings=get("context_length"),
            rope_theta=get("rope.freq_base", 10000.0),
            rope_type=rope_type,
            rope_scaling=rope_scaling,
            tie_word_embeddings="output.weight" not in tensors,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            o_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_up.bias" in tensors,
            qk_norm="blk.0.attn_q_norm.weight" in tensors,
            windows=[None] * num_layers,
            eos_token_ids=eos_token_ids,
        )


def _architecture(folder: Path) -> str:
    """Read before transformers does, so that what is wrong is said in one line."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json; --model-path takes a Hugging Face folder or a .gguf file")
    try:
        architectures = json.loads(path.read_text())["architectures"]
        return _supported(architectures[0])
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); fetch the model again") from None
    except (KeyError, IndexError, TypeError):
        raise ValueError(f'{path} names no model: it has no "architectures"') from None


def _supported(architecture: str) -> str:
    if architecture not in ARCHITECTURES:
        raise ValueError(f"the architecture {architecture} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return architecture


def _auto_config(folder: str | Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises many kinds for a config it cannot make sense of
        raise ValueError(f"{folder}/config.json cannot be read: {' '.join(str(error).split())[:300]}") from None


def _windows(config: Any) -> list[int | None]:
    """Qwen says for each layer whether it slides; Mistral's slide all, where it has a window."""
    count, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * count
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _eos_token_ids(folder: Path, config: Any) -> list[int]:
    """Every id that ends a text: generation_config.json often names more than config.json."""
    found = [config.eos_token_id]
    path = folder / "generation_config.json"
    if path.is_file():
        try:
            found.append(json.loads(path.read_text()).get("eos_token_id"))
        except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
            raise ValueError(f"{path} is not valid JSON ({error}); fetch the model again") from None
    ids = [token for entry in found for token in (entry if isinstance(entry, list) else [entry])]
    return sorted({token for token in ids if isinstance(token, int)})
