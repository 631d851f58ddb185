"""Settings of hybrid models: which layers have attention or a recurrent state, and the sizes of
Mamba, Mamba 2 and Gated DeltaNet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..config.model import ModelConfig
from ..config.rope import number
from ..layers.gated_delta_net import DeltaSizes
from ..layers.linear import StoredTensor
from ..layers.mamba import MambaMixer, MambaSizes
from ..layers.mamba2 import Mamba2Mixer, Mamba2Sizes
from ..layers.norm import GatedRMSNorm
from .checkpoint import changed, renamed

# Names of the modules of Mamba 2 in GGUF files.
GGUF_MAMBA = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt": "mamba.dt_proj",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
# Names of the modules of Mamba in GGUF files.
GGUF_FIRST_MAMBA = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_x": "mamba.x_proj",
    "ssm_dt": "mamba.dt_proj",
    "ssm_out": "mamba.out_proj",
    "ssm_dt_norm": "mamba.dt_layernorm",
    "ssm_b_norm": "mamba.b_layernorm",
    "ssm_c_norm": "mamba.c_layernorm",
}
GGUF_FIRST_MAMBA_KEYS = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.time_step_rank": "mamba_dt_rank",
}
GGUF_MAMBA_KEYS = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}
_MOST_COLUMNS = 256  # Most tokens that a convolution reads.


def kinds_of_layers(
    config: Any, kinds: Sequence[str], default: Sequence[str]
) -> dict[str, list[str]]:
    """Return `layer_types` of a config.json, or `default` if it is missing. Raises `ValueError` for
    others than `kinds`.
    """
    found = getattr(config, "layer_types", None)
    found = list(default) if found is None else found
    if not isinstance(found, list) or len(found) != config.num_hidden_layers:
        raise ValueError("layer_types must have an entry for each layer; download the model again")
    for kind in found:
        if kind not in kinds:
            raise ValueError(
                f"layer_types must be {' or '.join(kinds)}, got {kind!r:.60}; "
                "download the model again"
            )
    return {"layer_types": found}


def every_nth(config: Any, interval: Any, others: str) -> list[str]:
    """Return `layer_types` with attention in the last of each `interval` layers. Raises
    `ValueError`.
    """
    if type(interval) is not int or interval < 1:
        raise ValueError(
            f"full_attention_interval must be a whole number above 0, got {interval!r:.60}; "
            "download the model again"
        )
    return [
        others if (layer + 1) % interval else "full_attention"
        for layer in range(config.num_hidden_layers)
    ]


def kinds_in_gguf(get: Callable[..., Any], others: str) -> dict[str, Any]:
    """Return `layer_types` of a GGUF file. Layers without attention have no key/value heads
    there.
    """
    heads = get("attention.head_count_kv", 1, list)
    if not isinstance(heads, list):
        heads = [heads] * get("block_count")
    return {"layer_types": ["full_attention" if count else others for count in heads]}


def check_columns(name: str, width: int) -> None:
    """Raise `ValueError` for a number of convolution columns that no model has."""
    if not 2 <= width <= _MOST_COLUMNS:
        raise ValueError(
            f"{name} must be 2 to {_MOST_COLUMNS}, got {width}; download the model again"
        )


def check_delta(config: Any) -> None:
    """Raise `ValueError` if the sizes of a Gated DeltaNet in `config` are invalid."""
    check_columns("linear_conv_kernel_dim", config.linear_conv_kernel_dim)
    config.check_positive(
        *("linear_key_head_dim", "linear_value_head_dim"),
        *("linear_num_key_heads", "linear_num_value_heads"),
    )
    if config.linear_num_value_heads % config.linear_num_key_heads:
        raise ValueError(
            f"{config.linear_num_value_heads} value heads cannot share "
            f"{config.linear_num_key_heads} key heads; download the model again"
        )


def delta_sizes(config: Any) -> DeltaSizes:
    """Return the sizes of the Gated DeltaNet layers of `config`."""
    return DeltaSizes(
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        conv=config.linear_conv_kernel_dim,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config(ModelConfig):
    """The members of config.json for Mamba 2.

    `mamba_fields` replaces `mamba_d_head` and `time_step_limit` by numbers.
    """

    mamba_n_heads: int = 128
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    mamba_d_head: int | str = "auto"
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: list[float] | None = None

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        self.check_positive("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state")
        check_columns("mamba_d_conv", self.mamba_d_conv)
        if self.mamba_n_heads % self.mamba_n_groups:
            raise ValueError(
                f"{self.mamba_n_heads} heads of Mamba 2 cannot share {self.mamba_n_groups} groups; "
                "download the model again"
            )

    @property
    def mamba(self) -> Mamba2Sizes:
        """The sizes of a mixer."""
        assert self.time_step_limit is not None
        least, most = self.time_step_limit
        return Mamba2Sizes(
            heads=self.mamba_n_heads,
            head_dim=int(self.mamba_d_head),
            groups=self.mamba_n_groups,
            state=self.mamba_d_state,
            conv=self.mamba_d_conv,
            dt_limits=(least, most),
        )


def mamba_fields(config: Any, inner: int) -> dict[str, Any]:
    """Return the fields of `Mamba2Config` that follow from the inner size. Raises `ValueError`."""
    heads, size = config.mamba_n_heads, config.mamba_d_head
    if heads < 1 or inner % heads or size not in ("auto", inner // heads):
        raise ValueError(
            f"{heads} heads of {size!r:.60} numbers make no layer of Mamba 2 of {inner}; download "
            "the model again"
        )
    limits = [_as_float(limit) for limit in config.time_step_limit or (0.0, float("inf"))]
    if len(limits) != 2 or not 0.0 <= limits[0] <= limits[1]:
        raise ValueError(
            f"time_step_limit must be two numbers, the lower first, got "
            f"{config.time_step_limit!r:.60}; download the model again"
        )
    return {"mamba_d_head": inner // heads, "time_step_limit": limits}


def mamba2_mixer(config: Any, layer: int) -> Mamba2Mixer:
    """Return a mixer whose heads share one norm, as in most models. `config` is a
    `Mamba2Config`.
    """
    sizes: Mamba2Sizes = config.mamba
    return Mamba2Mixer(
        layer,
        config.hidden_size,
        sizes,
        GatedRMSNorm(sizes.inner, config.norm_eps, groups=sizes.groups),
        conv_bias=config.mamba_conv_bias,
        in_bias=config.mamba_proj_bias,
        out_bias=config.mamba_proj_bias,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig(ModelConfig):
    """The members of config.json for Mamba. `first_mamba_fields` replaces `mamba_dt_rank` by a
    number.
    """

    mamba_d_state: int = 16
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_dt_rank: int | str = "auto"
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        self.check_positive("mamba_d_state", "mamba_expand", "mamba_dt_rank")
        check_columns("mamba_d_conv", self.mamba_d_conv)


def first_mamba_fields(config: Any) -> dict[str, Any]:
    """Return the fields of `MambaConfig` that follow from others. Raises `ValueError`."""
    rank = config.mamba_dt_rank
    if rank == "auto":
        rank = -(-config.hidden_size // 16)
    if type(rank) is not int:
        raise ValueError(
            f"the rank of time steps must be a whole number or 'auto', got {rank!r:.60}; download "
            "the model again"
        )
    return {"mamba_dt_rank": rank}


def first_mamba_in_gguf(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
    """Return the fields of `MambaConfig` that no key of a GGUF file holds."""
    return {
        "mamba_expand": get("ssm.inner_size") // max(get("embedding_length"), 1),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in tensors),
        "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in tensors),
    }


def mamba_sizes(config: Any, inner: int) -> MambaSizes:
    """Return the sizes of a mixer with `inner` channels. `config` is a `MambaConfig`."""
    return MambaSizes(
        inner=inner,
        state=config.mamba_d_state,
        rank=config.mamba_dt_rank,
        conv=config.mamba_d_conv,
    )


def mamba_mixer(
    config: Any, layer: int, inner: int, norm: Callable[[int], nn.Module] | None = None
) -> MambaMixer:
    """Return a mixer with `inner` channels. `config` is a `MambaConfig`. `norm`: see
    `MambaMixer`.
    """
    return MambaMixer(
        layer,
        config.hidden_size,
        mamba_sizes(config, inner),
        conv_bias=config.mamba_conv_bias,
        bias=config.mamba_proj_bias,
        norm=norm,
    )


def first_mamba_tensors(tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
    """Convert tensors of a checkpoint to those of a `MambaMixer`."""
    names = {r"\.dt_proj\.bias$": ".dt_bias", r"\.A_log$": ".A"}
    return [
        changed(tensor, tensor.shape, lambda wide: -wide.exp())
        if tensor.name.endswith(".A")
        else tensor
        for tensor in renamed(tensors, names)
    ]


def _as_float(value: Any) -> float:
    """Return a number of a config.json. Transformers may write infinity as an object."""
    if isinstance(value, dict):
        value = {"Infinity": float("inf")}.get(str(value.get("__float__")))
    return value if value == float("inf") else number("time_step_limit", value)
