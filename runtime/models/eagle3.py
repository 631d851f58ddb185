"""EAGLE-3 (arXiv:2503.01840): a layer that reads hidden states of three layers of the model."""

from __future__ import annotations

from typing import Any

import torch

from ..layers.decoder import DecoderLayer
from ..layers.linear import Embedding, FusedLinear, Linear
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.rotary import Rotary
from ..layers.self_attention import SelfAttention
from .causal_lm import CausalLM
from .draft_head import DraftHead

ARCHITECTURES = ("LlamaForCausalLMEagle3",)
STATES = 3  # Layers of the model whose hidden states the head reads.


class MidLayer(DecoderLayer):
    """A layer of Llama whose attention reads the token's embedding beside the state."""

    def __init__(self, config: Any) -> None:
        size, biased = config.hidden_size, config.attention_bias
        attention = SelfAttention(config, 0, qkv_bias=biased, o_bias=biased)
        parts = attention.qkv_proj.parts
        attention.qkv_proj = FusedLinear(2 * size, parts, bias=biased)
        mlp = GatedMLP(
            size, config.intermediate_size, bias=config.mlp_bias, activation=config.activation
        )
        super().__init__(config, attention, mlp)
        self.hidden_norm = RMSNorm(size, config.norm_eps)


class Eagle3(DraftHead):
    """The head. Modules are named as in the published checkpoints.

    Attributes:
        targets: [draft vocabulary] int64, the model's number of each token of the head's
            vocabulary. None: the vocabularies are the same.
    """

    def __init__(
        self, config: Any, model: CausalLM, draft_vocab: int, *, own_embedding: bool, own_head: bool
    ) -> None:
        super().__init__()
        size = config.hidden_size
        self.first_column = model.config.hidden_size
        self.vocab_size = model.config.vocab_size
        self.fc = Linear(STATES * self.first_column, size)
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(size, config.norm_eps)
        self.rotary = Rotary(config)
        if own_embedding:
            self.embed_tokens = Embedding(config.vocab_size, size)
        if own_head:
            self.lm_head = Linear(size, draft_vocab)
        # The model's own parts. A tuple hides them from this module's parameters.
        self._shared: tuple[Any, Any] = (model.model.embed_tokens, model.lm_head)
        self.targets: torch.Tensor | None = None

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return one state for the hidden states [T, 3 * hidden] of three layers."""
        state: torch.Tensor = self.fc(hidden)
        return state

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        layer: Any = self.midlayer
        embed = getattr(self, "embed_tokens", self._shared[0])
        both = [layer.input_layernorm(embed(input_ids)), layer.hidden_norm(hidden)]
        attended = layer.self_attn(torch.cat(both, dim=-1), [self.rotary(positions)])
        x, residual = layer.post_attention_layernorm.add(attended, hidden)
        summed: torch.Tensor = layer.mlp(x) + residual
        return summed

    def compute_logits(self, state: torch.Tensor) -> torch.Tensor:
        head = getattr(self, "lm_head", self._shared[1])
        logits: torch.Tensor = head(self.norm(state)).float()
        if self.targets is None:
            return logits
        # Tokens that the head does not know cannot be drafted.
        whole = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        return whole.index_copy_(1, self.targets, logits)
