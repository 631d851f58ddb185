"""Gemma 3n: Gemma 3 with several streams of hidden states (AltUp, arXiv:2301.13310), embeddings for
each layer, sparse gates in the first layers, and last layers that read the keys and values of
earlier ones.

Shapes: T tokens, n streams, P numbers of a layer's own input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, ClassVar

import torch
from torch import nn

from ..config.model import ModelConfig, check_size, patterned_windows
from ..config.rope import is_number
from ..layers.activation import ACTIVATIONS, soft_cap
from ..layers.altup import AltUp, Laurel
from ..layers.decoder import Decoder
from ..layers.linear import Linear, StoredTensor, rounded
from ..layers.mlp import GatedMLP, GaussianTopKMLP
from ..layers.norm import RMSNorm
from ..layers.own_inputs import OwnInputDecoder
from ..layers.rotary import Rotations
from ..layers.shared_attention import (
    Kept,
    SharedAttention,
    check_shared,
    shared_layer,
    without_shared,
)
from .causal_lm import gguf_names
from .checkpoint import renamed
from .gemma2 import GGUF_SANDWICH
from .gemma3 import Gemma3ForCausalLM, local_theta

ARCHITECTURE = "Gemma3nForCausalLM"
MODEL_TYPE = "gemma3n_text"
GGUF_ARCHITECTURE = "gemma3n"

_MOST_STREAMS = 64
_SPARSE_LAYERS, _SPARSITY = 10, 0.95  # if config.json does not say which layers are sparse
_LEAST_SQUARE = 1e-5
_GGUF_LAYER = {
    **GGUF_SANDWICH,
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3nConfig(ModelConfig):
    """The members of Gemma 3n. `activation_sparsity_pattern` says for each layer which share of its
    gates is set to 0.
    """

    attention_bias: bool = False
    final_logit_softcapping: float | None = 30.0
    rope_local_base_freq: float = 10000.0
    intermediate_sizes: int | list[int] = 16384
    vocab_size_per_layer_input: int | None = 262144
    hidden_size_per_layer_input: int = 256
    altup_active_idx: int = 0
    altup_correct_scale: bool = True
    altup_num_inputs: int = 4
    num_kv_shared_layers: int = 15
    laurel_rank: int = 64
    activation_sparsity_pattern: float | list[float] | None = None

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        self.check_positive(
            *("final_logit_softcapping", "vocab_size_per_layer_input", "laurel_rank"),
            *("hidden_size_per_layer_input", "altup_num_inputs"),
        )
        streams = self.altup_num_inputs
        if streams > _MOST_STREAMS or not 0 <= self.altup_active_idx < streams:
            raise ValueError(
                f"altup_active_idx is {self.altup_active_idx} and altup_num_inputs is {streams}: "
                f"the first must be below the second, and that at most {_MOST_STREAMS}; download "
                "the model again"
            )
        check_shared(self, self.num_kv_shared_layers)

    def shares(self, layer: int) -> int | None:
        """Return the layer whose keys and values `layer` reads, or None if it has its own."""
        return shared_layer(self, self.num_kv_shared_layers, layer)


def _of_layers(name: str, value: Any, layers: int) -> list[Any]:
    """Return the numbers of all layers; `value` is one number or a list. Raises `ValueError`."""
    values = value if isinstance(value, list) else [value] * layers
    if len(values) != layers or not all(is_number(each) for each in values):
        raise ValueError(f"{name} must have a number for each layer; download the model again")
    return values


def _magnitude(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean(-1, keepdim=True)


class Gemma3nLayer(nn.Module):
    def __init__(self, config: Gemma3nConfig, attention: SharedAttention, mlp: nn.Module) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.pre_feedforward_layernorm = RMSNorm(size, eps)
        self.mlp = mlp
        self.post_feedforward_layernorm = RMSNorm(size, eps)
        self.altup = AltUp(size, config.altup_num_inputs, config.altup_active_idx, eps)
        self.laurel = Laurel(size, config.laurel_rank, eps)
        self.per_layer_input_gate = Linear(size, config.hidden_size_per_layer_input)
        self.per_layer_projection = Linear(config.hidden_size_per_layer_input, size)
        self.post_per_layer_input_norm = RMSNorm(size, eps)
        self.activation = ACTIVATIONS[config.activation]
        self.scales_corrected = config.altup_correct_scale

    def forward(
        self,
        streams: torch.Tensor,
        own_input: torch.Tensor,
        rotations: Rotations,
        kept: Kept,
    ) -> torch.Tensor:
        """Return streams [T, n, hidden] for streams [T, n, hidden].

        `own_input` [T, P] comes from the embeddings of this layer. `kept`: see
        `SharedAttention.attend`.
        """
        altup = self.altup
        predicted = altup.predict(streams)
        active = predicted[:, altup.active]
        x = self.input_layernorm(active)
        attended = self.post_attention_layernorm(self.self_attn.attend(x, rotations, kept))
        attended = (active + attended + self.laurel(x)) / math.sqrt(2)
        fed = self.mlp(self.pre_feedforward_layernorm(attended))
        corrected = altup.correct(predicted, attended + self.post_feedforward_layernorm(fed))
        first = corrected[:, altup.active]
        if self.scales_corrected:
            first = first * altup.correct_output_scale
        gated = self.activation(self.per_layer_input_gate(first)) * own_input
        added = self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return torch.cat((corrected[:, :1], corrected[:, 1:] + added[:, None]), dim=1)


class Gemma3nDecoder(OwnInputDecoder):
    def __init__(
        self,
        config: Gemma3nConfig,
        layers: Sequence[nn.Module],
        norm: nn.Module,
        rotaries: Sequence[nn.Module],
        *,
        embedding_scale: float,
    ) -> None:
        super().__init__(config, layers, norm, rotaries, embedding_scale=embedding_scale)
        size, width = config.hidden_size, config.hidden_size_per_layer_input
        rows = config.vocab_size_per_layer_input or config.vocab_size
        self.add_own_inputs(config, rows, width)
        self.streams = config.altup_num_inputs
        self.altup_projections = nn.ModuleList(Linear(size, size) for _ in range(1, self.streams))
        self.altup_unembed_projections = nn.ModuleList(
            Linear(size, size) for _ in range(1, self.streams)
        )
        self.projection_scale, self.input_scale = rounded(size**-0.5), rounded(0.5**0.5)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(input_ids) * self.embedding_scale
        # An id that the table lacks counts as 0.
        inputs = self.own_inputs(x, torch.where(input_ids < self.rows, input_ids, 0))
        rotations = [rotary(positions) for rotary in self.rotaries]
        streams = torch.stack([x, *self._alike(x, [x] * (self.streams - 1), "in")], dim=1)
        kept: Kept = {}
        for layer, own_input in zip(self.layers, inputs, strict=True):
            streams = layer(streams, own_input, rotations, kept)
        first, *others = streams.unbind(1)
        mixed = torch.stack([first, *self._alike(first, others, "out")]).mean(0)
        hidden: torch.Tensor = self.norm(mixed)
        return hidden

    def _alike(self, like: torch.Tensor, each: Sequence[torch.Tensor], way: str) -> Any:
        """Yield a product of each stream [T, hidden], scaled to the magnitude of `like`."""
        wanted = _magnitude(like) ** 0.5
        linears = self.altup_projections if way == "in" else self.altup_unembed_projections
        for linear, stream in zip(linears, each, strict=True):
            made = linear(stream)
            yield made * wanted / torch.sqrt(_magnitude(made).clamp(min=_LEAST_SQUARE))


class Gemma3nForCausalLM(Gemma3ForCausalLM):
    config_class: ClassVar[type[ModelConfig]] = Gemma3nConfig
    config_defaults: ClassVar = {
        **{
            name: value
            for name, value in Gemma3ForCausalLM.config_defaults.items()
            if name != "intermediate_size"
        },
        "vocab_size": 262400,
        "hidden_size": 2048,
        "num_hidden_layers": 35,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
    }
    config_names: ClassVar[dict[str, str]] = {"intermediate_size": "intermediate_sizes"}
    gguf_names: ClassVar[dict[str, str]] = {
        **gguf_names(_GGUF_LAYER),
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
        "altup_proj": "model.altup_projections.*",
        "altup_unembd_proj": "model.altup_unembed_projections.*",
    }
    gguf_keys: ClassVar[dict[str, str]] = {
        "attention.sliding_window": "sliding_window",
        "attention.sliding_window_pattern": "sliding_window_pattern",
        "attention.shared_kv_layers": "num_kv_shared_layers",
        "altup.active_idx": "altup_active_idx",
        "altup.num_inputs": "altup_num_inputs",
        "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        "final_logit_softcapping": "final_logit_softcapping",
        "rope.freq_base_swa": "rope_local_base_freq",
    }
    gguf_lists: ClassVar[tuple[str, ...]] = ("feed_forward_length",)

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        layers = config.num_hidden_layers
        sizes = _of_layers("intermediate_size", config.intermediate_sizes, layers)
        for size in sizes:
            if type(size) is not int or size < 1:
                raise ValueError(
                    f"intermediate_size must be whole numbers above 0, got {size!r:.60}; download "
                    "the model again"
                )
            check_size("intermediate_size", size)
        if config.sliding_window is None:
            raise ValueError("it has no sliding_window; download the model again")
        if (shares := config.activation_sparsity_pattern) is None:
            sparse = _SPARSE_LAYERS if layers > _SPARSE_LAYERS else 0
            shares = [_SPARSITY] * sparse + [0.0] * (layers - sparse)
        shares = _of_layers("activation_sparsity_pattern", shares, layers)
        if not all(0.0 <= share < 1.0 for share in shares):
            raise ValueError(
                "activation_sparsity_pattern must have numbers from 0 to below 1; download the "
                "model again"
            )
        rows = config.vocab_size_per_layer_input
        return {
            "vocab_size_per_layer_input": config.vocab_size if rows is None else rows,
            "windows": patterned_windows(config, config.sliding_window, 5),
            "rope_local_base_freq": local_theta(config, config.rope_local_base_freq),
            "intermediate_size": max(sizes, default=0),
            "intermediate_sizes": sizes,
            "activation_sparsity_pattern": shares,
        }

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        """Files say the threshold of gates in standard deviations, not as a share. Both tables of
        embeddings have the same number of rows.
        """
        members: dict[str, Any] = {
            "intermediate_size": get("feed_forward_length", kind=list),
            "vocab_size_per_layer_input": None,
        }
        if deviations := get("activation_sparsity_scale", 0, list):
            members["activation_sparsity_pattern"] = [NormalDist().cdf(each) for each in deviations]
        return members

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        """Leave out the keys and values of layers that read those of earlier layers."""

        return without_shared(tensors, config.num_layers - config.num_kv_shared_layers)

    @staticmethod
    def gguf_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        names = {r"\.correct_output_scale\.weight$": ".correct_output_scale"}
        return Gemma3nForCausalLM.checkpoint_tensors(config, renamed(tensors, names))

    def make_decoder(self) -> Decoder:
        config = self.config
        layers = [self.make_layer(layer) for layer in range(config.num_layers)]
        norm, scale = RMSNorm(config.hidden_size, config.norm_eps), self.embedding_scale()
        return Gemma3nDecoder(config, layers, norm, self.make_rotaries(), embedding_scale=scale)

    def make_layer(self, layer: int) -> nn.Module:
        attention = SharedAttention(self.config, layer, self.config.shares(layer))
        return Gemma3nLayer(self.config, attention, self.make_mlp(layer))

    def make_mlp(self, layer: int) -> nn.Module:
        config = self.config
        size, between = config.hidden_size, config.intermediate_sizes[layer]
        share, activation = config.activation_sparsity_pattern[layer], config.activation
        if share == 0.0:
            return GatedMLP(size, between, activation=activation)
        deviations = NormalDist().inv_cdf(share)
        return GaussianTopKMLP(size, between, deviations, activation=activation)

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return soft_cap(logits, self.config.final_logit_softcapping)
