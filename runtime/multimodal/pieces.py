"""Runs a vision tower in pieces, so that steps run between them.

The code of transformers computes an image in one call. Here the call is a greenlet, which returns
to the engine whenever a piece is done and goes on later from there:

    cut_layers(model)                         # once
    pieces = Pieces(lambda: model(image), rows=64)
    while not pieces.is_done:
        pieces.advance()                      # at most 64 rows of a layer
    pieces.result

A layer of a tower multiplies each row by itself, and a query attends by itself. Blocks of rows
therefore give what the whole gives. Norms, activations and sums between layers are not cut.

A thread of its own would compute beside the steps, but on a CPU both need the same cores: a
decode would wait for threads that encode. Nor would ranks agree on when an image is encoded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar, cast

import torch
from greenlet import getcurrent, greenlet
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...kernels import ops
from ..layers.linear import Linear

T = TypeVar("T")

# The name of the attention below in transformers' interface.
ATTENTION = "piecework_pieces"
# Modules with several linear layers whose rows do not depend on each other. Their activations are
# cut with them.
_ROWWISE = ("mlp", "feed_forward")


class _Call(greenlet):  # type: ignore[misc]
    """The greenlet of a call. `rows` are those of a block."""

    rows: int | None = None


class Pieces(Generic[T]):
    """A call of a model whose layers are cut.

    `rows` are those of a piece; None: a piece is a whole layer.

    Attributes:
        result: What the call returned, when it is done.
    """

    def __init__(self, call: Callable[[], T], rows: int | None) -> None:
        self._call = _Call(call)
        self._call.rows = rows
        self.result: T | None = None

    @property
    def is_done(self) -> bool:
        return bool(self._call.dead)

    @torch.inference_mode()
    def advance(self) -> int:
        """Compute a piece. Return how many numbers it multiplied."""
        found = self._call.switch()
        if not self.is_done:
            return cast(int, found)
        self.result = found
        return 0


def cut_layers(model: nn.Module) -> int:
    """Let the layers of a model pause in calls by `Pieces`. Return its multiplications for a row
    that passes all of them.
    """
    total = 0
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if name.rpartition(".")[2] in _ROWWISE or isinstance(module, Linear):
            layers = [each for each in module.modules() if isinstance(each, Linear)]
            cost = sum(each.in_features * each.out_features for each in layers)
            _replace_forward(module, partial(_by_rows, module.forward, cost))
            inside = (*inside, f"{name}.")
        elif isinstance(module, nn.Conv2d | nn.Conv3d) and module.stride == module.kernel_size:
            cost = module.weight.numel()
            _replace_forward(module, partial(_by_patches, module.forward, module))
        else:
            continue
        total += cost
    return total


def _replace_forward(module: nn.Module, forward: Callable[..., torch.Tensor]) -> None:
    module.forward = forward


def _rows_of_piece() -> int | None:
    rows: int | None = getattr(getcurrent(), "rows", None)
    return rows


def _pause(cost: int) -> None:
    """Let the engine go on. Do nothing outside of a call by `Pieces`."""
    # No variable holds the greenlet, because a greenlet whose frames hold it is never freed.
    if isinstance(getcurrent(), _Call):
        getcurrent().parent.switch(cost)


def _by_rows(forward: Callable[..., torch.Tensor], cost: int, x: torch.Tensor) -> torch.Tensor:
    """Call `forward` with blocks of x [..., columns]. `cost` is that of a row."""
    flat = x.flatten(0, -2)
    found = []
    for block in torch.split(flat, _rows_of_piece() or len(flat)):
        found.append(forward(block))
        _pause(cost * len(block))
    return _joined(found, 0).view(*x.shape[:-1], -1)


def _by_patches(
    forward: Callable[..., torch.Tensor], layer: nn.Conv2d | nn.Conv3d, x: torch.Tensor
) -> torch.Tensor:
    """Call the convolution of patches with blocks of x [images or patches, colours, ...]."""
    rows, side = _rows_of_piece(), layer.kernel_size[0]
    dim, size = 0, rows or len(x)
    if rows is not None and x.shape[2:] != layer.kernel_size:
        # A block has one row of patches or more.
        dim, size = 2, side * max(1, rows * side // x.shape[-1])
        x = x[:, :, : x.shape[2] // side * side]
    found = []
    for block in torch.split(x, size, dim):
        found.append(forward(block))
        _pause(layer.out_channels * block.numel())
    return _joined(found, dim)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers does by torch's own attention, with blocks of query [B, H, L, D]."""
    length = query.shape[2]
    # A causal mask, and a bias, are those of all queries.
    is_causal = options.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    is_whole = is_causal or options.get("position_bias") is not None
    is_plain = not is_whole and attention_mask is None and len(query) == 1
    is_plain = is_plain and query.shape[1] == key.shape[1] and not options.get("dropout")
    size = length if is_whole else _rows_of_piece() or length
    found = []
    for begin in range(0, length, size):
        block = query[:, :, begin : begin + size]
        if is_plain:
            q, k, v = (each[0].transpose(0, 1) for each in (block, key, value))
            found.append(ops.attend_all(q, k, v, options["scaling"])[None])
        else:
            mask = attention_mask
            if mask is not None and mask.shape[-2] == length:
                mask = mask[..., begin : begin + size, :]
            found.append(sdpa_attention_forward(module, block, key, value, mask, **options)[0])
        _pause(2 * block.numel() * key.shape[2])
    return _joined(found, 1), None


def _joined(blocks: list[torch.Tensor], dim: int) -> torch.Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
