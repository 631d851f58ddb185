"""What a decoder is made of, as kernels that compute a whole step read it: they know no module.

A module that such kernels may compute has a method `step_parts` beside the `forward` that it
describes. Linear layers are told as they are.

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
    """Nothing describes a module, or what describes it is not all that it computes."""


class NormParts(NamedTuple):
    """RMSNorm with a weight [N]. `spans_heads`: of all heads of queries, or of keys, together."""

    weight: torch.Tensor
    eps: float
    spans_heads: bool = False


class AttentionParts(NamedTuple):
    """`rotary`: by which of the model's tables heads are turned; None: by none. `interleaved`: as
    `SelfAttention` has it.
    """

    qkv: Any
    output: Any
    q_norm: NormParts | None
    k_norm: NormParts | None
    rotary: int | None
    interleaved: bool


class FeedForwardParts(NamedTuple):
    """down(activation(gate(x)) * up(x)), gate and up as one linear layer; `activation`: by
    transformers' name.
    """

    gate_up: Any
    down: Any
    activation: str


class MixtureParts(NamedTuple):
    """A `Router`, a `FusedMoE`, and a feed-forward layer of all tokens, whose result is multiplied
    by the sigmoid of `shared_gate`, a linear layer with one row, where there are such.
    """

    router: Any
    experts: Any
    shared: FeedForwardParts | None = None
    shared_gate: Any = None


class LayerParts(NamedTuple):
    """x + after(half(before(x))) * multiplier for both halves; norms that are None do nothing."""

    attention: AttentionParts
    feed_forward: FeedForwardParts | MixtureParts
    before_attention: NormParts | None = None
    after_attention: NormParts | None = None
    before_feed_forward: NormParts | None = None
    after_feed_forward: NormParts | None = None
    multiplier: float = 1.0


class DecoderParts(NamedTuple):
    """`embedding` (`runtime/layers/linear.py`): of a rank the rows from `first_token` on. `tables`:
    cos and signed_sin [positions, 1, R] of each. `head`: the linear layer that gives logits;
    `finish`: what is done to them [N, V] float32 then.
    """

    embedding: Any
    first_token: int
    embedding_scale: float
    layers: Sequence[LayerParts]
    norm: NormParts
    tables: Sequence[tuple[torch.Tensor, torch.Tensor]]
    head: Any = None
    finish: Callable[[torch.Tensor], torch.Tensor] | None = None


def part_of(module: Any) -> Any:
    """What describes a module. Raises `NoParts`, also where its class computes otherwise than the
    one that is described.
    """
    for each in type(module).__mro__:
        if "step_parts" in vars(each):
            return module.step_parts()
        if "forward" in vars(each):
            break
    raise NoParts(type(module).__name__)


def part_or_none(module: Any) -> Any:
    """The same of a module that may be None."""
    return None if module is None else part_of(module)


class Choosing(IntEnum):
    """What is done to a row of logits: `argmax`, `sample_plain`, or `softmax` and then
    `sample_filtered`.
    """

    LIKELIEST = 0
    PLAIN = 1
    FILTERED = 2


DRAW = np.dtype(
    [
        *(("seed", np.uint64), ("top_k", np.int64)),
        *((name, np.float32) for name in ("temperature", "top_p", "min_p")),
        ("choosing", np.int32),
    ],
    align=True,
)
"""How a row's token is chosen: the numbers that its `Choosing` takes (`kernels/ops.py`), the random
ones made of `seed` and the position of the token.
"""


class StepCall(Protocol):
    """A step of a model over given tensors, whose contents are read whenever it is computed: the
    next step of the same requests may be written to where they are. Keys and values go to their
    slots.
    """

    def hidden(self) -> torch.Tensor:
        """Hidden states [T, hidden]."""
        ...

    def logits(self) -> torch.Tensor | None:
        """Logits [N, V] float32 of its rows, a tensor of its own. None, and nothing is done, of
        models whose head is not known.
        """
        ...

    def tokens(self) -> list[int] | None:
        """The tokens [N] behind its rows, -1 where logits are not finite; None likewise."""
        ...


class StepKernels(Protocol):
    """A model's forward without its ops, for steps of up to `max_tokens` tokens.

    `keeps_bits`: whether a step has the bits that the model's ops give one by one.
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
    ) -> StepCall:
        """A step of input_ids, positions [T]. `rows` [N] of it are followed by tokens, which are
        chosen as `draws` [N] tell, of `DRAW`; None: the likeliest are. All of these and the
        metadata's tables and slots are int64 and contiguous, for their addresses are kept: who
        has others makes such of them.
        """
        ...
