"""What a model is: the numbers that its layers are built from, read from config.json or a GGUF
file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from .loader.files import no_model, read_json
from .models.registry import find_model, model_class
from .quantization.registry import quantization_of

if TYPE_CHECKING:
    from .loader.gguf_reader import FastGGUFReader

ROPE_PARAMETERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "divided": (),
}
"""Numbers that each type of rope scaling needs. `divided` is GGUF's way to store llama3: the factor
of each frequency.
"""
GGUF_ROPE_FACTORS = "rope_freqs.weight"
"""A tensor of what each rotary frequency is divided by: Llama 3.1's scaling, worked out by the
converter.
"""
_WHOLE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window",
    "max_window_layers",
)  # fmt: skip
_MOST_LAYERS = 10_000
"""Lists are made for each before a file of weights is looked into."""
_FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
_OPTIONAL = ("num_key_value_heads", "head_dim", "sliding_window")
"""Members of config.json: by their kind, and those that may be null."""
_POSITIVE = (
    "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "intermediate_size", "max_position_embeddings", "rope_theta", "rms_norm_eps",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer. Lengths in tokens. Raises `ValueError` for numbers that no model
    of ours can have.

    `rope_scaling` holds the parameters of `rope_type` under transformers' names, for `divided` the
    list `factors`. `windows`: one sliding window a layer, None where the layer sees everything
    before it. `dtype`: the format the weights are stored in. `extra`: numbers that one architecture
    alone has, by its `config_fields`.
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
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise ValueError(
                    f"{name} must be more than 0, got {getattr(self, name)}; fetch the model again"
                )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads; "
                "fetch the model again"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"rotary embedding needs an even head size, got {self.head_dim}; fetch the model "
                "again"
            )
        _check_rope(self.rope_type, self.rope_scaling, self.head_dim)

    @classmethod
    def from_pretrained(cls, folder: str | Path, architecture: str | None = None) -> ModelConfig:
        """Of a Hugging Face folder. `architecture`: what to take it for, instead of what it says.
        Raises `ValueError` with a remedy where there is none or the model is not supported.
        """
        folder = Path(folder)
        content = read_config(folder, architecture)
        architecture = architecture or content["architectures"][0]
        try:
            return cls(
                architecture=architecture,
                eos_token_ids=sorted(config_eos_token_ids(folder)),
                **_hugging_face_fields(architecture, content),
            )
        except ValueError as error:
            raise ValueError(f"{folder / 'config.json'}: {error}") from None

    @classmethod
    def from_gguf(cls, reader: FastGGUFReader, *, eos_token_ids: list[int]) -> ModelConfig:
        """Of a GGUF file's metadata. Raises `ValueError` where a key is missing or the model is not
        supported.
        """
        try:
            return cls(eos_token_ids=eos_token_ids, **_gguf_fields(reader))
        except ValueError as error:
            raise ValueError(f"{reader.path}: {error}") from None


def _check_rope(rope_type: str, scaling: dict[str, Any], head_dim: int) -> None:
    if rope_type not in ROPE_PARAMETERS:
        raise ValueError(
            f"rope scaling of type {rope_type!r} is not supported (linear and llama3 are); "
            "without it the model serves up to its original context length"
        )
    for name in ROPE_PARAMETERS[rope_type]:
        value = scaling.get(name)
        if not isinstance(value, int | float) or value <= 0:
            raise ValueError(
                f"rope scaling of type {rope_type!r} needs a positive {name}, got {value!r}; fetch "
                "the model again"
            )
    if rope_type == "divided" and len(scaling["factors"]) != head_dim // 2:
        raise ValueError(
            f"{len(scaling['factors'])} rope factors do not fit a head size of {head_dim}; convert "
            "the model again"
        )


def read_config(folder: Path, architecture: str | None = None) -> dict[str, Any]:
    """What config.json says, of a model that is taken for `architecture`. Raises `ValueError` with
    a remedy where there is none or it describes no model that we have.

    Imports nothing heavy, so that what is wrong is said at once and in one line.
    """
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not a folder; --model-path takes a Hugging Face folder or a .gguf file"
        )
    path = folder / "config.json"
    if not path.is_file():
        raise no_model(folder, "config.json")
    content = read_json(path)
    try:
        match content:
            case {"architectures": [str(said), *_]}:
                architecture = architecture or said
                wanted = find_model(architecture=architecture).model_type
            case _:
                raise ValueError(
                    'it names no model, having no "architectures"; fetch the model again'
                )
        if (found := content.get("model_type")) != wanted:
            raise ValueError(
                f'{architecture} goes with "model_type": "{wanted}", got {found!r}; fetch the '
                "model again"
            )
        quantization_of(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    config: dict[str, Any] = content
    return config


def _hugging_face_fields(architecture: str, content: dict[str, Any]) -> dict[str, Any]:
    """What config.json says, and for members that it leaves out what transformers takes: its own
    classes take longer to import than a small model to load.
    """
    model = model_class(architecture)
    config = SimpleNamespace(**{**model.config_defaults, **content})
    for name, kind, said in (
        *((name, int, "a whole number") for name in _WHOLE),
        *((name, bool, "true or false") for name in _FLAGS),
    ):
        if name not in model.config_defaults:
            continue
        value = getattr(config, name)
        if name not in _OPTIONAL and value is None:
            raise ValueError(f"it has no {name}; fetch the model again")
        if value is not None and type(value) is not kind:
            raise ValueError(f"{name} must be {said}, got {value!r:.60}; fetch the model again")
    if config.num_hidden_layers > _MOST_LAYERS:
        raise ValueError(
            f"num_hidden_layers must be at most {_MOST_LAYERS}, got {config.num_hidden_layers}; "
            "fetch the model again"
        )
    if config.hidden_act not in ("silu", "swish"):
        raise ValueError(f"the activation {config.hidden_act!r} is not supported; supported: silu")
    heads = config.num_attention_heads
    if config.head_dim is None and heads > 0 and config.hidden_size % heads:
        raise ValueError(
            f"{heads} heads cannot share a hidden_size of {config.hidden_size}; fetch the model "
            "again"
        )
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": heads,
        "num_kv_heads": config.num_key_value_heads or heads,
        "head_dim": config.head_dim or config.hidden_size // max(heads, 1),
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": _number("rms_norm_eps", config.rms_norm_eps),
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "windows": [None] * config.num_hidden_layers,
        "dtype": str(content.get("dtype") or content.get("torch_dtype") or "bfloat16"),
        **_rope_fields(config, content),
        **model.config_fields(config),
    }


def _rope_fields(config: Any, content: dict[str, Any]) -> dict[str, Any]:
    """Older files have `rope_scaling` beside `rope_theta`, newer ones all in `rope_parameters`."""
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"rope scaling {rope!r:.60} is not supported; choose another model")
    rope = {"type": "default", **rope}
    old_name = rope.pop("type")
    rope_type = rope.pop("rope_type", old_name)
    theta = rope.pop("rope_theta", content.get("rope_theta", 10000.0))
    if rope.pop("partial_rotary_factor", content.get("partial_rotary_factor")) not in (None, 1.0):
        raise ValueError(
            "rotary embedding of a part of each head (partial_rotary_factor) is not supported; "
            "choose another model"
        )
    if rope_type == "llama3":
        original = rope.get("original_max_position_embeddings", config.max_position_embeddings)
        rope["original_max_position_embeddings"] = content.get(
            "original_max_position_embeddings", original
        )
    return {
        "rope_theta": _number("rope_theta", theta),
        "rope_type": str(rope_type),
        "rope_scaling": rope,
    }


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{name} must be a number, got {value!r:.60}; fetch the model again")
    return float(value)


def sliding_windows(config: Any, window: int | None, first: int) -> list[int | None]:
    """One a layer: those slide of which `layer_types` says so, or else those from `first` on."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window if layer >= first else None for layer in range(config.num_hidden_layers)]
    if not isinstance(kinds, list) or len(kinds) != config.num_hidden_layers:
        raise ValueError("layer_types must have an entry for each layer; fetch the model again")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def config_eos_token_ids(folder: Path) -> list[int]:
    """The tokens that end a text, by generation_config.json and config.json; either may give one or
    a list.
    """
    ids: list[object] = []
    for path in (folder / "generation_config.json", folder / "config.json"):
        content = read_json(path) if path.is_file() else None
        value = content.get("eos_token_id") if isinstance(content, dict) else None
        ids += value if isinstance(value, list) else [value]
    return list(dict.fromkeys(token_id for token_id in ids if isinstance(token_id, int)))


def _gguf_fields(reader: FastGGUFReader) -> dict[str, Any]:
    """Keys: the GGUF specification's "Standardized key-value pairs"."""
    # Machines that only measure have no gguf library.
    from .loader.gguf_reader import metadata

    name = metadata(reader, "general.architecture")
    architecture = find_model(gguf=name).architecture

    def get(key: str, default: Any = None, kind: type[int] | type[float] = int) -> Any:
        value = metadata(reader, f"{name}.{key}", default)
        if not isinstance(value, int | kind):
            raise ValueError(
                f"{name}.{key} must be a{' whole' if kind is int else ''} number, got {value!r}; "
                "convert the model again"
            )
        return value

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in tensors:
        raise ValueError(
            "it has no tensor token_embd.weight; it holds no whole model, or is one of several "
            "parts: merge them"
        )
    num_layers, num_heads, hidden_size = (
        get("block_count"),
        get("attention.head_count"),
        get("embedding_length"),
    )
    if num_layers > len(tensors):
        raise ValueError(
            f"{len(tensors)} tensors are too few for {num_layers} layers; fetch the model again"
        )
    head_dim = get("attention.key_length", hidden_size // max(num_heads, 1))
    if get("rope.dimension_count", head_dim) != head_dim:
        raise ValueError(
            "rotary embedding of a part of each head (rope.dimension_count) is not supported; "
            "choose another model"
        )
    if get("expert_count", 0):
        raise ValueError("mixtures of experts are not supported; choose another model")
    rope_type, rope_scaling = metadata(reader, f"{name}.rope.scaling.type", "none"), {}
    if (factors := tensors.get(GGUF_ROPE_FACTORS)) is not None:
        rope_type, rope_scaling = "divided", {"factors": [float(value) for value in factors.data]}
    elif rope_type == "linear":
        rope_scaling = {"factor": metadata(reader, f"{name}.rope.scaling.factor")}
    return {
        "architecture": architecture,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "intermediate_size": get("feed_forward_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon", kind=float),
        "max_position_embeddings": get("context_length"),
        "rope_theta": get("rope.freq_base", 10000.0, kind=float),
        "rope_type": "default" if rope_type == "none" else str(rope_type),
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": "output.weight" not in tensors,
        "qkv_bias": "blk.0.attn_q.bias" in tensors,
        "o_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        "windows": [None] * num_layers,
    }
