"""A small model whose layers are alike, with an attention-like split op between them.

T tokens, H hidden size. `toy::attend` writes, for each token, the mean of the values so far,
weighted by keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from piecework.compilation.core.split_ops import register_split_op

HIDDEN, VOCABULARY = 8, 32
_LIBRARY = torch.library.Library("toy", "FRAGMENT")


class Attention:
    """What the split op reads besides its arguments, and what it was called with."""

    scale = 1.0
    layers: list[int] = []  # noqa: RUF012
    fail_in_layer: int | None = None


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layer: int
) -> None:
    if layer == Attention.fail_in_layer:
        raise RuntimeError(f"attention failed in layer {layer}")
    Attention.layers.append(layer)
    weight = (q * k).sum(-1, keepdim=True).sigmoid()
    steps = torch.arange(1, len(v) + 1, dtype=v.dtype, device=v.device)[:, None]
    out.copy_((weight * v).cumsum(0) / steps * (Attention.scale + layer))


def _attend_fresh(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
    out = torch.empty_like(q)
    _attend(q, k, v, out, layer)
    return out


_LIBRARY.define("attend(Tensor q, Tensor k, Tensor v, Tensor(a!) out, int layer) -> ()")
_LIBRARY.define("attend_fresh(Tensor q, Tensor k, Tensor v, int layer) -> Tensor")
_LIBRARY.define("pair(Tensor x) -> (Tensor, Tensor)")
_LIBRARY.impl("attend", lambda q, k, v, out, layer: None, "Meta")
_LIBRARY.impl("attend_fresh", lambda q, k, v, layer: torch.empty_like(q), "Meta")
_LIBRARY.impl("pair", lambda x: (x.clone(), x.clone()), "Meta")
_LIBRARY.impl("attend", register_split_op("toy::attend", _attend), "CPU")
_LIBRARY.impl("attend_fresh", register_split_op("toy::attend_fresh", _attend_fresh), "CPU")
_LIBRARY.impl("pair", register_split_op("toy::pair", lambda x: (x.clone(), x.clone())), "CPU")


class Norm(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN) + 0.5)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(
            x.dtype
        ) * self.weight


class Layer(nn.Module):
    def __init__(self, number: int, eps: float, fresh: bool) -> None:
        super().__init__()
        self.number, self.fresh = number, fresh
        self.norm = Norm(eps)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).split(HIDDEN, -1)
        q, k = q * angle, k * angle
        if self.fresh:
            mixed = torch.ops.toy.attend_fresh(q, k, v, self.number)
        else:
            mixed = torch.empty_like(q)
            torch.ops.toy.attend(q, k, v, mixed, self.number)
        return x + self.out(mixed)


class ToyModel(nn.Module):
    """`epsilons`: one a layer. `fresh`: the split op returns a new tensor instead of filling one of
    the caller's.
    """

    def __init__(
        self,
        num_layers: int = 4,
        *,
        epsilons: list[float] | None = None,
        fresh: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(
            Layer(number, eps, fresh)
            for number, eps in zip(
                range(num_layers), epsilons or itertools.repeat(1e-5), strict=False
            )
        )
        self.norm = Norm(1e-5)
        self.register_buffer("angles", torch.linspace(0.5, 1.5, 512))
        self.requires_grad_(False)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x, angle = self.embedding(input_ids), self.angles[positions].unsqueeze(-1)
        for layer in self.layers:
            x = layer(x, angle)
        return self.norm(x)


def step(num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and positions [T] of a made-up step."""
    generator = torch.Generator().manual_seed(seed * 1000 + num_tokens)
    return torch.randint(VOCABULARY, (num_tokens,), generator=generator), torch.randint(
        512, (num_tokens,), generator=generator
    )


@contextmanager
def attention(**settings: object) -> Iterator[None]:
    """Attention with other settings inside the block."""
    before = {name: getattr(Attention, name) for name in settings}
    for name, value in settings.items():
        setattr(Attention, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(Attention, name, value)
