"""Whisper (arXiv:2212.04356): an encoder of spectrograms and a decoder of text.

N windows, B sequences, T tokens of a sequence, S positions of the encoder, H heads, D head size, C
width. Parameters have the names of checkpoints, except fused projections.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels.attention import KVLayout
from ..core.forward_context import layer_begins
from ..layers.activation import ACTIVATIONS
from ..layers.attention import attention
from ..layers.linear import Embedding, FusedLinear, Linear, weight
from ..layers.norm import LayerNorm
from .folder import WhisperSizes

_EPS = 1e-5


class Positions(nn.Module):
    """A table with a row for each position."""

    def __init__(self, number: int, size: int) -> None:
        super().__init__()
        self.weight = weight(number, size)


class SelfAttention(nn.Module):
    """The projections of attention within one side."""

    def __init__(self, size: int) -> None:
        super().__init__()
        parts = dict.fromkeys(("q_proj", "k_proj", "v_proj"), size)
        self.qkv = FusedLinear(size, parts, bias=True)
        self.out_proj = Linear(size, size, bias=True)


class CrossAttention(nn.Module):
    """The projections of the decoder's attention to the encoder's states."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.q_proj = Linear(size, size, bias=True)
        self.kv = FusedLinear(size, dict.fromkeys(("k_proj", "v_proj"), size), bias=True)
        self.out_proj = Linear(size, size, bias=True)


class FeedForward(nn.Module):
    """The end of a layer, which the encoder and the decoder share."""

    def __init__(self, size: int, inner: int, activation: str) -> None:
        super().__init__()
        self.fc1 = Linear(size, inner, bias=True)
        self.fc2 = Linear(inner, size, bias=True)
        self.final_layer_norm = LayerNorm(size, eps=_EPS, bias=True)
        self.self_attn = SelfAttention(size)
        self.self_attn_layer_norm = LayerNorm(size, eps=_EPS, bias=True)
        self._activation = ACTIVATIONS[activation]

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self._activation(self.fc1(self.final_layer_norm(x)))
        result: torch.Tensor = x + self.fc2(inner)
        return result


class EncoderLayer(FeedForward):
    """Attention of all positions of a window to one another, and the feed-forward part."""

    def __init__(self, sizes: WhisperSizes, layer: int) -> None:
        super().__init__(sizes.d_model, sizes.encoder_ffn_dim, sizes.activation_function)
        self.layer, self.head_dim = layer, sizes.d_model // sizes.encoder_attention_heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.self_attn.qkv(self.self_attn_layer_norm(x)).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.tensor_split(3, dim=1)
        seen = attention(q, k, v, self.layer)
        return self.feed_forward(x + self.self_attn.out_proj(seen))


class Encoder(nn.Module):
    """Maps spectrograms [N, mels, 2 S] to states [N * S, C]."""

    def __init__(self, sizes: WhisperSizes) -> None:
        super().__init__()
        size = sizes.d_model
        self.conv1 = nn.Conv1d(sizes.num_mel_bins, size, 3, padding=1).requires_grad_(False)
        self.conv2 = nn.Conv1d(size, size, 3, stride=2, padding=1).requires_grad_(False)
        self.embed_positions = Positions(sizes.max_source_positions, size)
        self.layers = nn.ModuleList(
            EncoderLayer(sizes, layer) for layer in range(sizes.encoder_layers)
        )
        self.layer_norm = LayerNorm(sizes.d_model, eps=_EPS, bias=True)

    def forward(self, spectrograms: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.conv2(F.gelu(self.conv1(spectrograms)))).transpose(1, 2)
        x = (x + self.embed_positions.weight).flatten(0, 1)
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.layer_norm(x)
        return result


class LayerCache(NamedTuple):
    """The keys and values of a decoder layer: [B, H, positions, D] of the text and [B, H, S, D] of
    the audio.
    """

    text_k: torch.Tensor
    text_v: torch.Tensor
    audio_k: torch.Tensor
    audio_v: torch.Tensor


class TextStep(NamedTuple):
    """The tokens of a step: T of each of the first B sequences.

    Attributes:
        positions: [B] position of the first token of each sequence. All are 0 if T > 1.
        longest: Positions to attend to, of the longest sequence.
        mask: [B, 1, 1, longest] added to the scores of single tokens, or None if all have the same
            length.
        watch: Called with a layer's number and [B, H, T, S] weights of its cross-attention.
    """

    positions: torch.Tensor
    longest: int
    mask: torch.Tensor | None = None
    watch: Callable[[int, torch.Tensor], None] | None = None


class DecoderLayer(FeedForward):
    """Attention to the text so far and to the audio, and the feed-forward part."""

    def __init__(self, sizes: WhisperSizes, layer: int) -> None:
        super().__init__(sizes.d_model, sizes.decoder_ffn_dim, sizes.activation_function)
        self.layer, self.head_dim = layer, sizes.d_model // sizes.decoder_attention_heads
        self.scale = self.head_dim**-0.5
        self.encoder_attn = CrossAttention(sizes.d_model)
        self.encoder_attn_layer_norm = LayerNorm(sizes.d_model, eps=_EPS, bias=True)

    def hear(self, states: torch.Tensor, audio_k: torch.Tensor, audio_v: torch.Tensor) -> None:
        """Write the keys and values of one window's states [S, C] into [H, S, D]."""
        heads = self.encoder_attn.kv(states).unflatten(-1, (2, -1, self.head_dim))
        audio_k.copy_(heads[:, 0].transpose(0, 1))
        audio_v.copy_(heads[:, 1].transpose(0, 1))

    def forward(self, x: torch.Tensor, cache: LayerCache, step: TextStep) -> torch.Tensor:
        """x: [B * T, C]."""
        layer_begins()
        batch = step.positions.shape[0]
        x = x + self.self_attn.out_proj(self._read_text(x, cache, step, batch))
        q = self.encoder_attn.q_proj(self.encoder_attn_layer_norm(x))
        q = q.view(batch, -1, x.shape[-1] // self.head_dim, self.head_dim).transpose(1, 2)
        keys, values = cache.audio_k[:batch], cache.audio_v[:batch]
        weights = (q * self.scale) @ keys.transpose(2, 3)
        # On a CPU two products are faster than one fused call, because there are few queries.
        weights = weights.softmax(-1, dtype=torch.float32)
        if step.watch is not None:
            step.watch(self.layer, weights)
        seen = (weights.to(x.dtype) @ values).transpose(1, 2).reshape(x.shape)
        return self.feed_forward(x + self.encoder_attn.out_proj(seen))

    def _read_text(
        self, x: torch.Tensor, cache: LayerCache, step: TextStep, batch: int
    ) -> torch.Tensor:
        """Store the step's keys and values. Return the attention [B * T, C]."""
        qkv = self.self_attn.qkv(self.self_attn_layer_norm(x))
        heads = qkv.view(batch, -1, 3, x.shape[-1] // self.head_dim, self.head_dim)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        tokens = q.shape[2]
        if tokens > 1:
            cache.text_k[:batch, :, :tokens].copy_(k)
            cache.text_v[:batch, :, :tokens].copy_(v)
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        else:
            rows = torch.arange(batch, device=x.device)
            cache.text_k[rows, :, step.positions] = k[:, :, 0]
            cache.text_v[rows, :, step.positions] = v[:, :, 0]
            keys = cache.text_k[:batch, :, : step.longest]
            scores = (q * self.scale) @ keys.transpose(2, 3)
            if step.mask is not None:
                scores = scores + step.mask
            weights = scores.softmax(-1, dtype=torch.float32).to(x.dtype)
            seen = weights @ cache.text_v[:batch, :, : step.longest]
        return seen.transpose(1, 2).reshape(x.shape)


class Decoder(nn.Module):
    """Maps token ids [B, T] to states [B * T, C]."""

    def __init__(self, sizes: WhisperSizes) -> None:
        super().__init__()
        self.embed_tokens = Embedding(sizes.vocab_size, sizes.d_model)
        self.embed_positions = Positions(sizes.max_target_positions, sizes.d_model)
        self.layers = nn.ModuleList(
            DecoderLayer(sizes, layer) for layer in range(sizes.decoder_layers)
        )
        self.layer_norm = LayerNorm(sizes.d_model, eps=_EPS, bias=True)

    def forward(self, ids: torch.Tensor, caches: list[LayerCache], step: TextStep) -> torch.Tensor:
        places = step.positions[:, None] + torch.arange(ids.shape[1], device=ids.device)
        x = self.embed_tokens(ids.flatten()) + self.embed_positions.weight[places.flatten()]
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, step)
        result: torch.Tensor = self.layer_norm(x)
        return result


class Whisper(nn.Module):
    """The whole model. `model` has the name that checkpoints use."""

    def __init__(self, sizes: WhisperSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.model = nn.ModuleDict({"encoder": Encoder(sizes), "decoder": Decoder(sizes)})
        self.proj_out = Linear(sizes.d_model, sizes.vocab_size)
        self.tied_weights = {"proj_out.weight": "model.decoder.embed_tokens.weight"}

    def encoder_layouts(self, dtype: torch.dtype) -> list[KVLayout]:
        """Return the layout of each encoder layer's attention, which keeps nothing."""
        heads, size = self.sizes.encoder_attention_heads, self.sizes.d_model
        layout = replace(KVLayout.of_heads(heads, heads, size // heads, dtype), causal=False)
        return [layout] * self.sizes.encoder_layers

    def encode(self, spectrograms: torch.Tensor) -> torch.Tensor:
        """Return states [N * S, C] of [N, mels, 2 S]."""
        states: torch.Tensor = self.model["encoder"](spectrograms)
        return states

    def hear(self, states: torch.Tensor, caches: list[LayerCache], slot: int) -> None:
        """Write the keys and values of a window's states [S, C] into the caches of a slot."""
        decoder: Any = self.model["decoder"]
        for layer, cache in zip(decoder.layers, caches, strict=True):
            layer.hear(states, cache.audio_k[slot], cache.audio_v[slot])

    def decode(self, ids: torch.Tensor, caches: list[LayerCache], step: TextStep) -> torch.Tensor:
        """Return states [B * T, C] of token ids [B, T]."""
        states: torch.Tensor = self.model["decoder"](ids, caches, step)
        return states

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return float32 [..., vocab]."""
        result: torch.Tensor = self.proj_out(states).float()
        return result
