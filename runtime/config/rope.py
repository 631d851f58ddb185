"""The settings of rotary positions, under their names in transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .model_registry import UnsupportedError

# Numbers that each type of rope scaling needs. `divided` is how GGUF stores llama3: a divisor of
# each frequency.
ROPE_PARAMETERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("factor", "original_max_position_embeddings"),
    "divided": (),
    "proportional": ("partial_rotary_factor",),
}
# Lists with a factor for each frequency, by type.
_LISTS = {"longrope": ("short_factor", "long_factor"), "divided": ("factors",)}
# Optional numbers of any type. 0 means that the number is missing.
_MAY_HAVE = (
    *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    *("short_mscale", "long_mscale"),
)
_FROM_ORIGINAL = ("llama3", "yarn", "longrope")


def rope_fields(
    rope: Any, config: Any, head_dim: int, *, takes_partial: bool = False
) -> dict[str, Any]:
    """Return the fields of `ModelConfig` for `rope`, the member rope_scaling or rope_parameters.

    Older files have `rope_scaling` and `rope_theta`, newer ones have all in `rope_parameters`.
    `config` are all members. `takes_partial`: the model may rotate a part of each head. Raises
    `ValueError`.
    """
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise UnsupportedError(f"rope scaling {rope!r:.60} is not supported; choose another model")
    rope = {"type": "default", **rope}
    old_name = rope.pop("type")
    rope_type = {"su": "longrope"}.get(kind := str(rope.pop("rope_type", old_name)), kind)
    theta = rope.pop("rope_theta", getattr(config, "rope_theta", 10000.0))
    partial = rope.pop("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    if rope_type == "proportional":
        # Whole heads are rotated, the numbers after this part by 0.
        rope["partial_rotary_factor"] = 1.0 if partial is None else partial
        rotary_dim = head_dim
    elif partial in (None, 1.0):
        rotary_dim = head_dim
    elif not takes_partial:
        raise UnsupportedError(
            "rotary embedding of a part of each head (partial_rotary_factor) is not supported; "
            "choose another model"
        )
    else:
        rotary_dim = int(head_dim * number("partial_rotary_factor", partial))
    longest = config.max_position_embeddings
    if rope_type in _FROM_ORIGINAL:
        original = rope.get("original_max_position_embeddings", longest)
        original = getattr(config, "original_max_position_embeddings", original)
        rope["original_max_position_embeddings"] = original
        if rope_type != "llama3" and rope.get("factor") is None and type(original) is int:
            rope["factor"] = longest / max(original, 1)
    fields = {
        "rope_theta": number("rope_theta", theta),
        "rope_type": rope_type,
        "rope_scaling": rope,
        "rotary_dim": rotary_dim,
    }
    if rope_type == "yarn" and is_number(original) and is_number(rope["factor"]):
        # Some files state the original context as the longest one.
        fields["max_position_embeddings"] = max(longest, int(original * rope["factor"]))
    return fields


def check_rope(rope_type: str, scaling: Mapping[str, Any], rotary_dim: int) -> None:
    """Raise `ValueError` for an unknown type, or one that lacks parameters."""
    if rope_type not in ROPE_PARAMETERS:
        named = ", ".join(name for name in ROPE_PARAMETERS if name not in ("default", "divided"))
        raise UnsupportedError(
            f"rope scaling of type {rope_type!r} is not supported ({named} are); "
            "without it the model serves up to its original context length"
        )
    for name in ROPE_PARAMETERS[rope_type]:
        if not _is_positive(value := scaling.get(name)):
            raise ValueError(
                f"rope scaling of type {rope_type!r} needs a positive {name}, got {value!r}; "
                "download the model again"
            )
    for name in _MAY_HAVE:
        value = scaling.get(name)
        if value is not None and not (is_number(value) and value >= 0):
            raise ValueError(
                f"{name} of rope scaling must be a number and not below 0, got {value!r:.60}; "
                "download the model again"
            )
    for name in _LISTS.get(rope_type, ()):
        factors = scaling.get(name)
        if not isinstance(factors, list) or not all(map(_is_positive, factors)):
            raise ValueError(
                f"rope scaling of type {rope_type!r} needs positive numbers as {name}, got "
                f"{factors!r:.60}; download the model again"
            )
        if len(factors) != rotary_dim // 2:
            raise ValueError(
                f"{len(factors)} rope factors do not fit a head size of {rotary_dim}; convert "
                "the model again"
            )


_MOST = 1e30  # Products of several numbers up to this are finite.


def is_number(value: Any) -> bool:
    """Whether the value is a number that is neither infinite nor huge."""
    return type(value) in (int, float) and -_MOST < value < _MOST


def _is_positive(value: Any) -> bool:
    return is_number(value) and value > 0


def number(name: str, value: Any) -> float:
    """Return the member of config.json. Raises `ValueError` if it is no number."""
    if not is_number(value):
        raise ValueError(f"{name} must be a number, got {value!r:.60}; download the model again")
    return float(value)


_GGUF_YARN = {
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
}


def gguf_rope(get: Callable[..., Any], factors: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return rope_scaling for the metadata of a GGUF file and its `factors`, stored tensors by
    name.

    Source of the keys: `rope.scaling` of the GGUF specification.
    """
    if "rope_freqs.weight" in factors:
        return {"rope_type": "divided", "factors": factors["rope_freqs.weight"]}
    original = get("rope.scaling.original_context_length", 0)
    if "rope_factors_long.weight" in factors:
        attention = get("rope.scaling.attn_factor", 0.0, float)
        return {
            "rope_type": "longrope",
            "long_factor": factors["rope_factors_long.weight"],
            "short_factor": factors.get("rope_factors_short.weight"),
            "original_max_position_embeddings": original or get("context_length"),
            **({"attention_factor": attention} if attention else {}),
        }
    rope_type = get("rope.scaling.type", "none", str)
    if rope_type == "none":
        return {}
    rope = {"rope_type": rope_type, "factor": get("rope.scaling.factor", 0.0, float)}
    if original:
        rope["original_max_position_embeddings"] = original
    if rope_type == "yarn":
        found = {member: get(key, 0.0, float) for key, member in _GGUF_YARN.items()}
        rope |= {member: value for member, value in found.items() if value}
        if "mscale_all_dim" in rope:
            # Files do not hold `mscale`. llama.cpp uses this value.
            rope["mscale"] = 1.0
    return rope
