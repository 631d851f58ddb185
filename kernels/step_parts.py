"""Descriptions of the parts of a decoder, for kernels that compute a whole step without the
modules.

A module that such kernels may compute has a method `step_parts` beside the `forward` that it
describes. Linear layers are passed as they are.

    norm = part_of(layer.input_layernorm)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from .attention import AttentionMetadata


class NoParts(Exception):
    """A module has no description, or its description does not cover all that it computes."""


class NormParts(NamedTuple):
    """RMSNorm with a weight [N]. `spans_heads`: it normalises all heads of queries, or of keys,
    together.
    """

    weight: torch.Tensor
    eps: float
    spans_heads: bool = False


class AttentionParts(NamedTuple):
    """Attention. `rotary` is the index of the model's table that rotates heads, or None.
    `interleaved`: see `SelfAttention`.
    """

    qkv: Any
    output: Any
    q_norm: NormParts | None
    k_norm: NormParts | None
    rotary: int | None
    interleaved: bool


class FeedForwardParts(NamedTuple):
    """down(activation(gate(x)) * up(x)) with gate and up as one linear layer. `activation` is
    transformers' name.
    """

    gate_up: Any
    down: Any
    activation: str


class MixtureParts(NamedTuple):
    """A `Router` and a `FusedMoE`, and optionally a feed-forward layer for all tokens. Its result
    is multiplied by the sigmoid of `shared_gate`, a linear layer with one row, if there is one.
    """

    router: Any
    experts: Any
    shared: FeedForwardParts | None = None
    shared_gate: Any = None


class LayerParts(NamedTuple):
    """x + after(half(before(x))) * multiplier for both halves. Norms that are None do nothing."""

    attention: AttentionParts
    feed_forward: FeedForwardParts | MixtureParts
    before_attention: NormParts | None = None
    after_attention: NormParts | None = None
    before_feed_forward: NormParts | None = None
    after_feed_forward: NormParts | None = None
    multiplier: float = 1.0


class DecoderParts(NamedTuple):
    """A whole decoder.

    Attributes:
        embedding: See `runtime/layers/linear.py`. A rank has the rows from `first_token` on.
        tables: cos and signed_sin [positions, 1, R] of each rotary table.
        head: The linear layer that computes logits.
        finish: Applied to the logits [N, V] float32.
        kept_layers: Layers whose inputs follow each hidden state, in order. The number of layers
            stands for the input of `norm`.
    """

    embedding: Any
    first_token: int
    embedding_scale: float
    layers: Sequence[LayerParts]
    norm: NormParts
    tables: Sequence[tuple[torch.Tensor, torch.Tensor]]
    head: Any = None
    finish: Callable[[torch.Tensor], torch.Tensor] | None = None
    kept_layers: Sequence[int] = ()


def part_of(module: Any) -> Any:
    """Return the description of a module. Raise `NoParts` if it has none, or if a subclass
    overrides the `forward` that is described.
    """
    for each in type(module).__mro__:
        if "step_parts" in vars(each):
            return module.step_parts()
        if "forward" in vars(each):
            break
    raise NoParts(type(module).__name__)


def part_or_none(module: Any) -> Any:
    """Return the description of a module, or None for None."""
    return None if module is None else part_of(module)


class Choosing(IntEnum):
    """How a token is chosen from a row of logits: by `argmax`, by `sample_plain`, or by `softmax`
    and `sample_filtered`.
    """

    LIKELIEST = 0
    PLAIN = 1
    FILTERED = 2


# How a row's token is chosen: the parameters of its `Choosing` (`kernels/ops.py`). Random numbers
# are made from `seed` and the position of the token.
DRAW = np.dtype(
    [
        *(("seed", np.uint64), ("top_k", np.int64)),
        *((name, np.float32) for name in ("temperature", "top_p", "min_p")),
        ("choosing", np.int32),
    ],
    align=True,
)


class StepCall(Protocol):
    """A step of a model over given tensors.

    Their contents are read at each computation, so the next step of the same requests may be
    written into them. Keys and values go to their slots.
    """

    def hidden(self) -> torch.Tensor:
        """Return hidden states [T, hidden], each followed by the inputs of `kept_layers`."""
        ...

    def logits(self) -> torch.Tensor | None:
        """Return logits [N, V] float32 of its rows, as a new tensor. If the model's head is not
        known, do nothing and return None.
        """
        ...

    def tokens(self) -> list[int] | None:
        """Return tokens [N] for its rows, -1 where logits are not finite. None: see `logits`."""
        ...


class StepKernels(Protocol):
    """A model's forward without its ops, for steps of up to `max_tokens` tokens.

    `keeps_bits`: whether a step gives the same bits as the model's ops one by one.
    """

    max_tokens: int
    keeps_bits: bool

    def call(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        rows: torch.Tensor | None = None,
        draws: npt.NDArray[np.void] | None = None,
        adapters: torch.Tensor | None = None,
        turns: torch.Tensor | None = None,
    ) -> StepCall:
        """Return a step of input_ids, positions [T].

        `turns` [T] are the positions by which the model rotates, or None for `positions`.
        `adapters` [T] int32 has the slot of each token's adapter, or -1 (`kernels.lora`). A token
        is chosen for each of `rows` [N] by `draws` [N] of `DRAW`, or the likeliest token if draws
        is None. All other tensors, including the tables and slots of `metadata`, must be int64. All
        must be contiguous, because the call keeps their addresses. Convert them before calling.
        """
        ...
