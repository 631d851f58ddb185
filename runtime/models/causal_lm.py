"""The base class of models: a decoder and its output head, with the names of parts in config.json,
GGUF files and checkpoints.

The file of a model overrides what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from ...kernels.attention import KVLayout
from ...kernels.state import StateLayout
from ...kernels.step_parts import DecoderParts, part_of
from ..config.model import ModelConfig
from ..layers.decoder import Decoder, DecoderLayer
from ..layers.linear import Linear, StoredTensor
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.rotary import Rotary
from ..layers.self_attention import SelfAttention

GGUF_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Of a layer, what most models' modules are called in GGUF files."""


def gguf_names(block: dict[str, str]) -> dict[str, str]:
    """`CausalLM.gguf_names` for layers with these names."""
    return {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
        **{f"blk.{{}}.{key}": f"model.layers.{{}}.{name}" for key, name in block.items()},
    }


class CausalLM(nn.Module):
    """Token ids to hidden states and to logits. Modules are named as in Hugging Face's checkpoints.

    A model's file is a class that says what differs from Llama's shape:

        class Qwen3ForCausalLM(CausalLM):
            config_class = Qwen3Config                  # its own members of config.json
            def make_attention(self, layer): ...        # or make_mlp, make_layer, make_rotaries
    """

    config_class: ClassVar[type[ModelConfig]] = ModelConfig
    """Its own fields are members of config.json, under their names and with transformers' defaults;
    a field without a default must be in the file.
    """
    config_defaults: ClassVar[dict[str, Any]] = {
        "vocab_size": None,
        "hidden_size": None,
        "intermediate_size": None,
        "num_hidden_layers": None,
        "num_attention_heads": None,
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    """What transformers' configuration takes for the members of all models that a config.json
    leaves out. None: it may not, but where null means something. Members that are neither here nor
    in `config_class` mean nothing, whatever they are.
    """
    config_names: ClassVar[dict[str, str]] = {}
    """Members of config.json that this model calls otherwise, and what they are here."""
    takes_partial_rotary: ClassVar[bool] = False
    gguf_names: ClassVar[dict[str, str]] = gguf_names(GGUF_BLOCK)
    """The modules' names in GGUF files."""
    gguf_keys: ClassVar[dict[str, str]] = {}
    """Metadata of GGUF files, without the architecture's name before it, that are members of
    config.json: numbers that the file need not have.
    """
    gguf_lists: ClassVar[tuple[str, ...]] = ()
    """Keys that all files have and that here may hold a number for each layer."""
    gguf_rope: ClassVar[dict[str, Any]] = {}
    """Members of rope_scaling that no metadata hold, and all models of this kind have."""
    gguf_interleaves_heads: ClassVar[bool] = False
    """Whether GGUF files hold the rows of q and k in the order of pairs (2i, 2i + 1), where
    checkpoints do not.
    """

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        """The fields of `ModelConfig` that follow from several members of config.json, or that this
        model calls otherwise.
        """
        return {}

    @staticmethod
    def rope_parameters(content: dict[str, Any]) -> Any:
        """Of the members of a config.json, those of the first table of rotary positions."""
        return content.get("rope_scaling") or content.get("rope_parameters") or {}

    @staticmethod
    def fits_gguf(get: Callable[..., Any]) -> bool:
        """Whether a GGUF file holds this model and not another one that such files call the same.
        `get`: as `gguf_members`.
        """
        return True

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        """Members of config.json that do not follow from one key of a GGUF file alone. `get(key,
        default, type)`: metadata of the architecture; `tensors`: their names.
        """
        return {}

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        """The tensors of a safetensors checkpoint under the names and in the shapes of the modules:
        see `loader.checkpoint`.
        """
        return tensors

    @staticmethod
    def gguf_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        """The same of a GGUF file, whose tensors have the names that `gguf_names` gives."""
        return tensors

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config: Any = config
        self.model = self.make_decoder()
        attention: list[Any] = self._keepers("kv_layout")
        self.kv_layers: list[int] = [module.layer for module in attention]
        """Those of the decoder that `kv_layouts` speaks of."""
        self.kv_scales = [(1.0, 1.0)] * len(attention)
        for keepers in (attention, self._keepers("state_layout")):
            for number, module in enumerate(keepers):
                module.layer = number
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.tied_weights: dict[str, str] = {}
        if config.tie_word_embeddings:
            self.tied_weights = {"lm_head.weight": "model.embed_tokens.weight"}

    def make_decoder(self) -> Decoder:
        config = self.config
        layers = map(self.make_layer, range(config.num_layers))
        norm, rotaries = self.make_norm(), self.make_rotaries()
        return Decoder(config, layers, norm, rotaries, embedding_scale=self.embedding_scale())

    def make_norm(self) -> nn.Module:
        """One of the norms of the residual stream, with RMSNorm's methods."""
        return RMSNorm(self.config.hidden_size, self.config.norm_eps)

    def make_rotaries(self) -> Sequence[nn.Module]:
        """The tables that layers turn by, by their index."""
        return [Rotary(self.config)]

    def embedding_scale(self) -> float | None:
        """What embeddings are multiplied by."""
        return None

    def make_layer(self, layer: int) -> nn.Module:
        attention, mlp = self.make_attention(layer), self.make_mlp(layer)
        return DecoderLayer(self.config, attention, mlp, norm=self.make_norm)

    def make_attention(self, layer: int) -> nn.Module:
        return SelfAttention(self.config, layer)

    def make_mlp(self, layer: int) -> nn.Module:
        config = self.config
        return GatedMLP(config.hidden_size, config.intermediate_size, activation=config.activation)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """input_ids, positions [T] int64 to hidden states [T, hidden], normalised."""
        hidden: torch.Tensor = self.model(input_ids, positions)
        return hidden

    def step_parts(self) -> DecoderParts:
        """What `forward` computes, told to kernels that compute a whole decode step."""
        parts: DecoderParts = part_of(self.model)
        if type(self).compute_logits is not CausalLM.compute_logits:
            return parts
        finishes = type(self).finish_logits is not CausalLM.finish_logits
        return parts._replace(head=self.lm_head, finish=self.finish_logits if finishes else None)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, hidden] to logits [N, vocab] float32."""
        return self.finish_logits(self.lm_head(hidden).float())

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """What is done to the head's logits [N, V] float32, which may be a rank's part of them."""
        return logits

    def kv_layouts(self, dtype: torch.dtype) -> list[KVLayout]:
        """What each layer with attention keeps of a token, in order, once weights are loaded."""
        return [module.kv_layout(dtype) for module in self._keepers("kv_layout")]

    def state_layouts(self, dtype: torch.dtype) -> list[StateLayout]:
        """What each layer with a recurrent state keeps of a request, in order. A module with such
        a state has `state_layout(dtype)` and `layer`, by which its op finds it (`current_states`):
        its number among those modules, which it gets here.
        """
        return [module.state_layout(dtype) for module in self._keepers("state_layout")]

    def _keepers(self, method: str) -> list[Any]:
        """The modules that keep something of a request."""
        return [module for module in self.modules() if hasattr(module, method)]

    def remarks(self) -> dict[str, str]:
        """What the summary of the start says of the model, such as what of it is left out."""
        return {}
