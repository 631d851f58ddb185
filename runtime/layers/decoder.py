"""A decoder made of the layers that a model gives it.

Shapes: T tokens. Layers carry a residual stream. A layer returns a summand and the stream; the next
norm adds the two and normalises the sum in one op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ...kernels.step_parts import DecoderParts, LayerParts, NoParts, part_of
from ..config.model import ModelConfig
from .images import add_to_images, embed_images
from .linear import Embedding
from .norm import RMSNorm
from .rotary import Rotations


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each applied to the normalised residual stream (Llama).

    A layer of another structure is a class in the file of its model with the same `forward`.

    Attributes:
        attention: A module of x [T, hidden] and rotations: attention or another mixer. It is
            registered under `name`.
        mlp: A module of x [T, hidden].
        norm: Makes a norm with the methods of `RMSNorm`. None stands for `RMSNorm` itself.
    """

    def __init__(
        self,
        config: ModelConfig,
        attention: nn.Module,
        mlp: nn.Module,
        name: str = "self_attn",
        *,
        norm: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__()
        make_norm = norm or partial(RMSNorm, config.hidden_size, config.norm_eps)
        self.input_layernorm = make_norm()
        self.add_module(name, attention)
        self.mixer = name
        self.post_attention_layernorm = make_norm()
        self.mlp = mlp

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotations: Rotations
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (summand, stream it is added to). If `residual` is None, x is the stream."""
        x, residual = (
            (self.input_layernorm(x), x)
            if residual is None
            else self.input_layernorm.add(x, residual)
        )
        x = getattr(self, self.mixer)(x, rotations)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual

    def step_parts(self) -> LayerParts:
        return LayerParts(
            part_of(getattr(self, self.mixer)),
            part_of(self.mlp),
            before_attention=part_of(self.input_layernorm),
            before_feed_forward=part_of(self.post_attention_layernorm),
        )


class ParallelLayer(nn.Module):
    """Attention and feed-forward computed from the same normalised residual stream (GPT-J)."""

    def __init__(self, norm: nn.Module, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm: Any = norm
        self.self_attn = attention
        self.mlp = mlp

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotations: Rotations
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DecoderLayer.forward`."""
        x, residual = (
            (self.input_layernorm(x), x)
            if residual is None
            else self.input_layernorm.add(x, residual)
        )
        return self.self_attn(x, rotations) + self.mlp(x), residual


class MixerLayer(nn.Module):
    """One mixer of x [T, hidden] and rotations on the normalised residual stream, without a
    feed-forward (Mamba).
    """

    def __init__(self, config: ModelConfig, mixer: nn.Module) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = mixer

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotations: Rotations
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DecoderLayer.forward`."""
        x, residual = (self.norm(x), x) if residual is None else self.norm.add(x, residual)
        return self.mixer(x, rotations), residual


class Decoder(nn.Module):
    """Maps token ids to hidden states.

    `rotaries` are the modules that map positions to rotations, such as `Rotary`. Layers choose one
    by its index. `forward` appends the inputs of `kept_layers` to each token's hidden state; there,
    the number of layers stands for the input of the final norm.

    Attributes:
        takes_images: Whether rows may be positions of images, which `StepImages` changes.
        turns_images: Whether images have rotations of their own (M-RoPE).
        deep_stages: Number of first layers after which `StepImages` adds to such rows.
    """

    takes_images = turns_images = False
    deep_stages = 0

    def __init__(
        self,
        config: ModelConfig,
        layers: Iterable[nn.Module],
        norm: nn.Module,
        rotaries: Sequence[nn.Module],
        *,
        embedding_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.rotaries = nn.ModuleList(rotaries)
        self.embedding_scale = embedding_scale
        self.kept_layers = config.kept_layers

    def embed(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the input [T, hidden] of the first layer."""
        x: torch.Tensor = self.embed_tokens(input_ids)
        return x if self.embedding_scale is None else x * self.embedding_scale

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x, residual = self.embed(input_ids, positions), None
        rotations = [rotary(positions) for rotary in self.rotaries]
        if self.takes_images:
            embed_images(x, rotations, turned=self.turns_images)
        kept = []
        for number, layer in enumerate(self.layers):
            if number in self.kept_layers:
                kept.append(x if residual is None else x + residual)
            x, residual = layer(x, residual, rotations)
            if self.takes_images and number < self.deep_stages:
                add_to_images(x, number + 1)
        assert residual is not None
        hidden, residual = self.norm.add(x, residual)  # type: ignore[operator]
        if len(self.layers) in self.kept_layers:
            kept.append(residual)
        return torch.cat((hidden, *kept), dim=-1) if kept else hidden

    def step_parts(self) -> DecoderParts:
        if type(self).embed is not Decoder.embed:
            raise NoParts("embeddings with more than a factor")
        embedding = self.embed_tokens
        if embedding.kind is None and embedding.weight.dtype != torch.bfloat16:
            raise NoParts("an embedding whose rows are no numbers")
        return DecoderParts(
            embedding,
            0 if embedding.held_rows is None else embedding.held_rows.begin,
            1.0 if self.embedding_scale is None else self.embedding_scale,
            [part_of(layer) for layer in self.layers],
            part_of(self.norm),
            [part_of(rotary) for rotary in self.rotaries],
            kept_layers=self.kept_layers,
        )
