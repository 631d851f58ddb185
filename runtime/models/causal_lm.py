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

# Names of the modules of a layer in GGUF files, for most models.
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


def gguf_names(block: dict[str, str]) -> dict[str, str]:
    """Return `CausalLM.gguf_names` for layers with these names."""
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
            def make_attention(self, layer): ...        # Or make_mlp, make_layer, make_rotaries.
    """

    # Its own fields are members of config.json, with the same names and the defaults of
    # transformers. A field without a default must be in the file.
    config_class: ClassVar[type[ModelConfig]] = ModelConfig
    # Values of transformers' configuration for members of all models that config.json leaves out.
    # None: the member is required, unless null has a meaning. Members that are neither here nor in
    # `config_class` are ignored.
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
    # Members of config.json that have another name here.
    config_names: ClassVar[dict[str, str]] = {}
    takes_partial_rotary: ClassVar[bool] = False
    # Whether positions of images have rotations of their own (M-RoPE).
    turns_images: ClassVar[bool] = False
    # Whether checkpoints may hold a layer that predicts one token more (`NextLayer`).
    has_next_layer: ClassVar[bool] = False
    # Whether that layer reads the hidden states before the final norm.
    next_layer_reads_sums: ClassVar[bool] = False
    # Names of the modules in GGUF files.
    gguf_names: ClassVar[dict[str, str]] = gguf_names(GGUF_BLOCK)
    # Optional metadata of GGUF files, without the name of the architecture, that are members of
    # config.json.
    gguf_keys: ClassVar[dict[str, str]] = {}
    # Keys of all files that may hold a number for each layer in this model.
    gguf_lists: ClassVar[tuple[str, ...]] = ()
    # Members of rope_scaling that all models of this kind have and no metadata hold.
    gguf_rope: ClassVar[dict[str, Any]] = {}
    # Whether GGUF files, unlike checkpoints, hold the rows of q and k in the order of pairs (2i, 2i
    # + 1).
    gguf_interleaves_heads: ClassVar[bool] = False

    @staticmethod
    def config_fields(config: Any) -> dict[str, Any]:
        """Return the fields of `ModelConfig` that follow from several members of config.json, or
        that have another name in this model.
        """
        return {}

    @staticmethod
    def rope_parameters(content: dict[str, Any]) -> Any:
        """Return the parameters of the first rotary table from the members of a config.json."""
        return content.get("rope_scaling") or content.get("rope_parameters") or {}

    @staticmethod
    def fits_gguf(get: Callable[..., Any]) -> bool:
        """Whether a GGUF file holds this model, not another one that has the same name in such
        files.

        `get`: see `gguf_members`.
        """
        return True

    @staticmethod
    def gguf_members(get: Callable[..., Any], tensors: Collection[str]) -> dict[str, Any]:
        """Return members of config.json that do not follow from a single key of a GGUF file.

        `get(key, default, type)` returns metadata of the architecture. `tensors` are the names of
        tensors.
        """
        return {}

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        """Return the tensors of a checkpoint with the names and shapes of the modules. See
        `checkpoint`.
        """
        return tensors

    @classmethod
    def adapter_tensors(
        cls, config: Any, tensors: Sequence[StoredTensor]
    ) -> Sequence[StoredTensor]:
        """Return the weights of some linear layers of a checkpoint, converted in the same way."""
        return cls.checkpoint_tensors(config, tensors)

    @staticmethod
    def gguf_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        """Return the tensors of a GGUF file, which have the names of `gguf_names`, in the
        same way.
        """
        return tensors

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config: Any = config
        self.model = self.make_decoder()
        self.model.takes_images = config.takes_images
        self.model.turns_images = self.turns_images
        attention: list[Any] = self._keepers("kv_layout")
        # The decoder layers that `kv_layouts` describes, in order.
        self.kv_layers: list[int] = [module.layer for module in attention]
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
        """Return a norm of the residual stream, with the methods of `RMSNorm`."""
        return RMSNorm(self.config.hidden_size, self.config.norm_eps)

    def make_rotaries(self) -> Sequence[nn.Module]:
        """Return the rotary tables, which layers choose by index."""
        return [Rotary(self.config)]

    def embedding_scale(self) -> float | None:
        """The factor of embeddings."""
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
        """Return normalised hidden states [T, hidden] of input_ids and positions [T] int64."""
        hidden: torch.Tensor = self.model(input_ids, positions)
        return hidden

    def step_parts(self) -> DecoderParts:
        """Return the description of `forward` for kernels that compute a whole decode step."""
        parts: DecoderParts = part_of(self.model)
        if type(self).compute_logits is not CausalLM.compute_logits:
            return parts
        finishes = type(self).finish_logits is not CausalLM.finish_logits
        return parts._replace(head=self.lm_head, finish=self.finish_logits if finishes else None)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [N, vocab] float32 of hidden [N, hidden]."""
        return self.finish_logits(self.lm_head(hidden).float())

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Transform the logits [N, V] float32 of the head, which may be one rank's part."""
        return logits

    def kv_layouts(self, dtype: torch.dtype) -> list[KVLayout]:
        """Return what each attention layer keeps of a token, in order. Call this after loading."""
        return [module.kv_layout(dtype) for module in self._keepers("kv_layout")]

    def state_layouts(self, dtype: torch.dtype) -> list[StateLayout]:
        """Return what each recurrent layer keeps of a request, in order, and number these layers.

        A recurrent module has `state_layout(dtype)` and `layer`, its number among these modules.
        Its op finds the states by this number (`current_states`).
        """
        return [module.state_layout(dtype) for module in self._keepers("state_layout")]

    def _keepers(self, method: str) -> list[Any]:
        """The modules that keep something of a request."""
        return [module for module in self.modules() if hasattr(module, method)]

    def remarks(self) -> dict[str, str]:
        """Return remarks for the summary of the start, such as parts of the model that are left
        out.
        """
        return {}
