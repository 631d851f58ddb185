"""The configuration of a model, read from config.json or from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_origin, get_type_hints

from ..files.folder import config_eos_token_ids, no_model, read_json
from .model_registry import (
    FALLBACK,
    ModelCode,
    UnsupportedError,
    find_models,
    model_class,
    model_type_of,
)
from .quantization_registry import quantization_of
from .rope import check_rope, number, rope_fields

if TYPE_CHECKING:
    from ..files.gguf_reader import FastGGUFReader

_WHOLE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window",
    "max_window_layers",
)  # fmt: skip
# Lists of layers and tables of positions are made before a file of weights is read.
_MOST = {"num_hidden_layers": 10_000, "max_position_embeddings": 2**24}
_MOST_OF_OTHERS = 2**30
# Positions. Pieces of graphs depend on the size of a table, so smaller tables keep their size.
_LONG_TABLE = 2**20
_FLAGS = ("tie_word_embeddings", "use_sliding_window")
# Members of config.json that may be null.
_OPTIONAL = ("num_key_value_heads", "head_dim", "sliding_window")
# Activations of gated feed-forward layers, from names of transformers to those of
# `layers.activation`.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
}
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_POSITIVE = (
    "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "intermediate_size", "max_position_embeddings", "rope_theta", "norm_eps",
)  # fmt: skip
_LLAMA = "LlamaForCausalLM"
# Members of config.json that Llama has, or that do not affect the computation.
_OF_LLAMA = frozenset(
    {
        *_WHOLE[:-2], "architectures", "attention_bias", "attention_dropout", "auto_map",
        "bos_token_id", "dtype", "eos_token_id", "hidden_act", "initializer_range", "mlp_bias",
        "model_type", "pad_token_id", "pretraining_tp", "quantization_config", "rms_norm_eps",
        "rope_parameters", "rope_scaling", "rope_theta", "tie_word_embeddings", "torch_dtype",
        "transformers_version", "use_cache", "_name_or_path",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer: what the engine and most layers need to know of it.

    A subclass in the file of an architecture adds its own members (`CausalLM.config_class`).
    Lengths are in tokens. Raises `ValueError` for numbers that no supported model can have.

    Attributes:
        rope_scaling: Parameters of `rope_type` under their names in transformers. For `divided`,
            the list `factors`.
        rotary_dim: Numbers of a head that are rotated. 0: all.
        windows: The sliding window of each layer. None: the layer has full attention.
        dtype: The format of the stored weights.
        kept_layers: Layers whose inputs are appended to the hidden states: see `Decoder`.
        takes_images: Whether an encoder is loaded, whose results replace embeddings.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_type: str = "default"
    rope_scaling: dict[str, Any] = field(default_factory=dict)
    rotary_dim: int = 0
    activation: str = "silu"
    tie_word_embeddings: bool = False
    windows: list[int | None] = field(default_factory=list)
    eos_token_ids: list[int] = field(default_factory=list)
    dtype: str = "bfloat16"
    kept_layers: list[int] = field(default_factory=list)
    takes_images: bool = False
    expert_activations: ClassVar[tuple[str, ...]] = ("silu",)

    def __post_init__(self) -> None:
        self.check_positive(*_POSITIVE)
        # `rope_fields` may have multiplied it by the factor of YaRN.
        check_size("max_position_embeddings", self.max_position_embeddings)
        if any(window is not None and window <= 0 for window in self.windows):
            raise ValueError(
                "sliding_window must be more than 0, or null; download the model again"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads; "
                "download the model again"
            )
        object.__setattr__(self, "rotary_dim", self.rotary_dim or self.head_dim)
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"rotary embedding needs an even head size, got {self.rotary_dim} of "
                f"{self.head_dim}; download the model again"
            )
        if self.activation not in _ACTIVATIONS.values():
            raise UnsupportedError(
                f"the activation {self.activation!r} is not supported; supported: "
                f"{', '.join(_ACTIVATIONS)}"
            )
        has_experts = any(getattr(self, name, 0) for name in _EXPERT_COUNTS)
        if has_experts and self.activation not in self.expert_activations:
            raise UnsupportedError(
                f"activation {self.activation!r} of experts is not supported; choose another model"
            )
        check_rope(self.rope_type, self.rope_scaling, self.rotary_dim)

    def check_positive(self, *names: str) -> None:
        """Raise `ValueError` for a number that is not above 0. None is accepted."""
        for name in names:
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(
                    f"{name} must be more than 0, got {value}; download the model again"
                )

    @staticmethod
    def from_pretrained(
        folder: str | Path, architecture: str | None = None, code: ModelCode | None = None
    ) -> ModelConfig:
        """Return the config of a folder. Raises the errors of `read_config`."""
        folder, code = Path(folder), code or ModelCode()
        content = read_config(folder, architecture, code)
        architecture = architecture or code.architecture(content["architectures"][0])
        try:
            ends = sorted(config_eos_token_ids(folder))
            if architecture == FALLBACK:
                return _of_transformers(folder, content, ends, code)
            try:
                return _configured(architecture, content, ends)
            except UnsupportedError:
                if code.impl != "auto":
                    raise
                with suppress(ValueError):
                    return _of_transformers(folder, content, ends, code)
                raise
        except ValueError as error:
            raise ValueError(f"{folder / 'config.json'}: {error}") from None

    @staticmethod
    def from_gguf(reader: FastGGUFReader, *, eos_token_ids: list[int]) -> ModelConfig:
        """Return the config of a GGUF file. Raises `ValueError` if it is not supported."""
        # Machines that only measure have no gguf library.
        from .gguf import gguf_members

        try:
            return _configured(*gguf_members(reader), eos_token_ids)
        except ValueError as error:
            raise ValueError(f"{reader.path}: {error}") from None

    def within(self, context_length: int | None) -> ModelConfig:
        """Return the config for texts of up to `context_length` tokens.

        LongRoPE has other frequencies for contexts within the original length. Tables of all
        positions might take gigabytes.
        """
        longest = self.max_position_embeddings
        if context_length is not None and context_length < longest and longest > _LONG_TABLE:
            return replace(self, max_position_embeddings=context_length)
        original = self.rope_scaling.get("original_max_position_embeddings", 0)
        if self.rope_type != "longrope" or context_length is None or context_length > original:
            return self
        longest = min(original, self.max_position_embeddings)
        return replace(self, max_position_embeddings=longest)

    @staticmethod
    def from_fields(values: dict[str, Any]) -> ModelConfig:
        """Return the config of which `dataclasses.asdict` made these fields."""
        kind: type[ModelConfig] = model_class(values["architecture"]).config_class
        return kind(**values)


def read_config(
    folder: Path, architecture: str | None = None, code: ModelCode | None = None
) -> dict[str, Any]:
    """Return config.json, with the architecture by which the model is computed.

    Raises `ValueError` with a remedy if there is none, or no model that `code` computes. Imports
    nothing heavy, so that errors appear at once.
    """
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not a folder; --model-path takes a Hugging Face folder or a .gguf file"
        )
    path = folder / "config.json"
    if not path.is_file():
        raise no_model(folder, "config.json")
    content = read_json(path)
    if isinstance(content, dict) and isinstance(text := content.get("text_config"), dict):
        # In a model of images and text, the members of the text model replace those of the whole.
        own = ("architectures", "model_type", "quantization_config", "tie_word_embeddings")
        content = {**content, **text, **{name: content[name] for name in own if name in content}}
    try:
        match content:
            case {"architectures": [str(said), *_]}:
                architecture = architecture or (code or ModelCode()).architecture(said)
            case _:
                raise ValueError(
                    'it names no model, having no "architectures"; download the model again'
                )
        if code is not None and code.impl == "auto" and architecture == _LLAMA:
            # Some models call themselves a Llama, but have an unknown `model_type`.
            ours = {kind for names in find_models() for kind in (names.model_type, names.also)}
            kind = content.get("model_type")
            if isinstance(kind, str) and kind not in ours and _is_like_llama(content):
                content["model_type"] = "llama"
            elif isinstance(kind, str) and kind not in ours:
                architecture = FALLBACK
                content["architectures"] = [FALLBACK]
        wanted = model_type_of(architecture, content)
        if (found := content.get("model_type")) != wanted:
            rule = f'{architecture} goes with "model_type": "{wanted}"'
            raise ValueError(f"{rule}, got {found!r}; download the model again")
        quantization_of(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return dict(content)


def _is_like_llama(content: dict[str, Any]) -> bool:
    """Whether a model has only members of Llama, empty members and disabled biases, and no
    `model_type` of transformers.
    """
    from transformers import CONFIG_MAPPING

    return content.get("model_type") not in CONFIG_MAPPING and all(
        name in _OF_LLAMA or value is None or (value is False and name.endswith("bias"))
        for name, value in content.items()
    )


def _configured(
    architecture: str, content: dict[str, Any], eos_token_ids: list[int]
) -> ModelConfig:
    """Return the members of config.json, with the defaults of transformers for missing ones.

    Importing the classes of transformers would take longer than loading a small model.
    """
    model = model_class(architecture)
    kind: type[ModelConfig] = model.config_class
    own = _own_defaults(kind)
    given = model.config_names.items()
    content = {**content, **{here: content[name] for name, here in given if name in content}}
    if content.get("intermediate_size") is None and "intermediate_size" in model.config_defaults:
        # A default of 0: the model's `config_fields` gives the size.
        content["intermediate_size"] = model.config_defaults["intermediate_size"]
    config = SimpleNamespace(**{**own, **model.config_defaults, **content})
    for name, wanted, said in (
        *((name, int, "a whole number") for name in _WHOLE),
        *((name, bool, "true or false") for name in _FLAGS),
    ):
        if name not in model.config_defaults:
            continue
        value = getattr(config, name)
        if name not in _OPTIONAL and value is None:
            raise ValueError(f"it has no {name}; download the model again")
        if value is not None and type(value) is not wanted:
            raise ValueError(f"{name} must be {said}, got {value!r:.60}; download the model again")
        if type(value) is int:
            check_size(name, value)
    _check_own(kind, own, config)
    heads = config.num_attention_heads
    if config.head_dim is None and heads > 0 and config.hidden_size % heads:
        raise ValueError(
            f"{heads} heads cannot share a hidden_size of {config.hidden_size}; download the model "
            "again"
        )
    head_dim = config.head_dim or config.hidden_size // max(heads, 1)
    is_gemma = "hidden_activation" in model.config_defaults
    activation = str(config.hidden_activation if is_gemma else config.hidden_act)
    rope = model.rope_parameters(content)
    values = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": heads,
        "num_kv_heads": config.num_key_value_heads or heads,
        "head_dim": head_dim,
        # If layers have different sizes, the model's `config_fields` states them.
        "intermediate_size": getattr(config, "intermediate_size", None),
        "norm_eps": number("rms_norm_eps", config.rms_norm_eps),
        "max_position_embeddings": config.max_position_embeddings,
        "activation": _ACTIVATIONS.get(activation, activation),
        "tie_word_embeddings": config.tie_word_embeddings,
        "windows": [None] * config.num_hidden_layers,
        "dtype": str(content.get("dtype") or content.get("torch_dtype") or "bfloat16"),
        **rope_fields(rope, config, head_dim, takes_partial=model.takes_partial_rotary),
        **{name: getattr(config, name) for name in own},
        **model.config_fields(config),
    }
    return kind(architecture=architecture, eos_token_ids=eos_token_ids, **values)


def check_size(name: str, value: int) -> None:
    """Raise `ValueError` for a size that no model has."""
    most = _MOST.get(name, _MOST_OF_OTHERS)
    if not 0 <= value <= most:
        raise ValueError(f"{name} must be 0 to {most}, got {value!r:.60}; download the model again")


def _of_transformers(
    folder: Path, content: dict[str, Any], ends: list[int], code: ModelCode
) -> ModelConfig:
    model_type_of(FALLBACK, content)
    config: ModelConfig = model_class(FALLBACK).read_config(folder, ends, trusted=code.trusted)
    return config


def _own_defaults(kind: type[ModelConfig]) -> dict[str, Any]:
    """Return the fields of a subclass with their defaults. None: the member is required."""
    common = {each.name for each in fields(ModelConfig)}
    defaults = {}
    for each in fields(kind):
        if each.name not in common:
            made = None if each.default_factory is MISSING else each.default_factory()
            defaults[each.name] = made if each.default is MISSING else each.default
    return defaults


def _check_own(kind: type[ModelConfig], own: Sequence[str] | dict[str, Any], config: Any) -> None:
    """Raise `ValueError` for a member that does not have the type of its field."""
    hints = get_type_hints(kind)
    for name in own:
        value, hint = getattr(config, name), hints[name]
        options = [hint] if get_origin(hint) in (None, list, dict) else get_args(hint)
        kinds = tuple(get_origin(each) or each for each in options)
        if type(value) in (int, float):
            number(name, value)
        if type(value) is int:
            check_size(name, value)
        if type(value) in kinds or (float in kinds and type(value) is int):
            continue
        if value is None:
            raise ValueError(f"it has no {name}; download the model again")
        said = {bool: "true or false", int: "a whole number", float: "a number"}.get(
            kinds[0], f"a {kinds[0].__name__}"
        )
        raise ValueError(f"{name} must be {said}, got {value!r:.60}; download the model again")


def sliding_windows(config: Any, window: int | None, first: int) -> list[int | None]:
    """Return the window of each layer, by `layer_types`. Without it, layers from `first` on have a
    window.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window if layer >= first else None for layer in range(config.num_hidden_layers)]
    if not isinstance(kinds, list) or len(kinds) != config.num_hidden_layers:
        raise ValueError("layer_types must have an entry for each layer; download the model again")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def patterned_windows(config: Any, window: int | None, every: int) -> list[int | None]:
    """Return the window of each layer, by `layer_types`. Without it, the last of each `every`
    layers has full attention.

    A `sliding_window_pattern` replaces `every`. It is a number, or a list that is true for layers
    with a window.
    """
    pattern = getattr(config, "sliding_window_pattern", None) or every
    if getattr(config, "layer_types", None) is not None:
        return sliding_windows(config, window, 0)
    count = config.num_hidden_layers
    if isinstance(pattern, list) and len(pattern) == count:
        return [window if slides else None for slides in pattern]
    if type(pattern) is not int or pattern < 1:
        raise ValueError(
            f"sliding_window_pattern must be a whole number above 0, got {pattern!r:.60}; download "
            "the model again"
        )
    return [window if (layer + 1) % pattern else None for layer in range(count)]
