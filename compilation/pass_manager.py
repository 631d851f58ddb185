"""Chooses the passes for a platform, runs them in order and counts their matches.

    manager = PassManager(PassConfig.parse("auto"), platform, fuses=True)
    matches = manager.run(graph, PassContext(weights))

Passes see the whole forward, so they can match ops on both sides of a split op. They also apply to
pieces that no compiler compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

from torch import fx

from ..kernels import ops
from ..kernels.platform.compilation import Compilation
from .passes.common import norm_quant, norm_rotary, silu_quant
from .passes.common.allreduce_norm import AllreduceNorm
from .passes.common.async_tp import AsyncTp
from .passes.common.attention_quant import AttentionQuant
from .passes.common.in_place import InPlace
from .passes.common.lower import Lower
from .passes.common.noop import Noop
from .passes.common.sequence_parallel import SequenceParallel
from .passes.config import PassConfig
from .passes.context import PassContext
from .passes.cpu.pack_linear import PackLinear
from .passes.npu.split_norm_rotary import SplitNormRotary
from .passes.pattern import Fusion, Pattern


class Pass(Protocol):
    """One kind of change to a traced forward."""

    @property
    def name(self) -> str: ...

    @property
    def key(self) -> str:
        """All that the result depends on, besides the graph and the source of this project."""
        ...

    def __call__(self, graph: fx.Graph, context: PassContext) -> int:
        """Change `graph` in place and return the number of changes.

        Every node, also a new one, must have its example value (`node.meta["example_value"]`).
        """
        ...


class Target(NamedTuple):
    """What passes are chosen for.

    Attributes:
        fuses: Whether the compiler fuses the ops of a piece. It then gets plain torch ops instead
            of kernels.
        ranks: Number of ranks over which the model is split.
        long: Whether the forward is for long steps.
        asked: Whether the user has requested the pass.
    """

    platform: Compilation
    fuses: bool
    ranks: int
    long: bool
    asked: bool


_FUSIONS: Mapping[str, tuple[Pattern, ...]] = {
    "norm_quant": norm_quant.PATTERNS,
    "silu_quant": silu_quant.PATTERNS,
    "norm_rotary": norm_rotary.PATTERNS,
}
# Ops whose kernel, if the device has one, is faster than what compilers make of their definition.
_KEPT = {pattern.op for patterns in _FUSIONS.values() for pattern in patterns} | {
    "quantize_static",
    "quantize_dynamic",
    "quantize_fp4",
}
_ALONE = "there is one rank only"


def _fusion(name: str, target: Target) -> Pass | str:
    if target.asked:
        return Fusion(name, _FUSIONS[name])
    platform = target.platform
    patterns = tuple(pattern for pattern in _FUSIONS[name] if pattern.applies(platform))
    device = platform.device_type
    return Fusion(name, patterns, device) if patterns else f"{device} has no kernel"


def _attention_quant(target: Target) -> Pass | str:
    obstacle = None if target.asked else target.platform.quantized_attention_obstacle()
    return AttentionQuant() if obstacle is None else obstacle


def _split_norm_rotary(target: Target) -> Pass | str:
    op = target.platform.split_norm_rotary()
    return op if isinstance(op, str) else SplitNormRotary(op)


def _sequence_parallel(target: Target) -> Pass | str:
    if target.ranks == 1:
        return _ALONE
    obstacle = None if target.asked else target.platform.sequence_parallel_obstacle()
    if obstacle is None and not target.long:
        obstacle = "it is for long steps, which have another forward"
    return SequenceParallel(target.ranks) if obstacle is None else obstacle


def _async_tp(target: Target) -> Pass | str:
    if target.ranks == 1:
        return _ALONE
    obstacle = None if target.asked else target.platform.async_tp_obstacle()
    return AsyncTp(target.platform.reduces_products) if obstacle is None else obstacle


def _allreduce_norm(target: Target) -> Pass | str:
    if target.ranks == 1:
        return _ALONE
    if target.asked:
        return AllreduceNorm()
    obstacle = target.platform.allreduce_norm_obstacle(target.ranks)
    return obstacle or AllreduceNorm(target.platform.allreduce_norm_dtypes())


def _pack_linear(target: Target) -> Pass | str:
    op = target.platform.packed_linear()
    if op is None:
        return f"{target.platform.device_type} has no kernel"
    return PackLinear(op) if target.asked else "weights would take twice their memory"


def _lower(target: Target) -> Pass | str:
    if target.fuses and target.platform.pieces_keep_bits:
        return "ops must give the same bits with and without a compiler"
    device = target.platform.device_type
    return Lower(
        tuple(
            name
            for name in ops.TRACED
            if name not in ops.PRODUCTS
            and ((target.fuses and name not in _KEPT) or not ops.has_kernel(device, name))
        ),
        device,
    )


# Maps the name of each pass to a function that makes it, or returns why the platform does not use
# it.
_MAKERS: Mapping[str, Callable[[Target], Pass | str]] = {
    "noop": lambda target: Noop(),
    **{name: partial(_fusion, name) for name in _FUSIONS},
    "attention_quant": _attention_quant,
    "split_norm_rotary": _split_norm_rotary,
    "sequence_parallel": _sequence_parallel,
    "async_tp": _async_tp,
    "allreduce_norm": _allreduce_norm,
    "pack_linear": _pack_linear,
    "lower": _lower,
    "in_place": lambda target: (
        "the compiler reuses memory itself" if target.fuses and not target.asked else InPlace()
    ),
}


class PassManager:
    """Runs the passes of `config` that suit the platform, in the order of its fields.

    Attributes:
        off: The other passes, with the reasons.
        unit: The changed forward supports numbers of tokens that are a multiple of `unit`, at least
            twice `unit` if `unit` is more than 1.
        key: Everything that plans and pieces depend on.
    """

    def __init__(
        self,
        config: PassConfig,
        platform: Compilation,
        *,
        fuses: bool,
        ranks: int = 1,
        long: bool = False,
    ) -> None:
        self._passes: list[Pass] = []
        self.off: dict[str, str] = {}
        for name, wish in config.wishes.items():
            target = Target(platform, fuses, ranks, long, asked=wish is True)
            made = "by --passes" if wish is False else _MAKERS[name](target)
            if isinstance(made, AsyncTp) and not made.reduces and "sequence_parallel" in self.off:
                made = "sequence_parallel, which inserts the collectives that it fuses, is off"
            if isinstance(made, str):
                self.off[name] = made
            else:
                self._passes.append(made)
        splits = any(isinstance(made, SequenceParallel) for made in self._passes)
        self.unit = ranks if splits else 1
        self.key = [made.key for made in self._passes]

    def run(self, graph: fx.Graph, context: PassContext) -> dict[str, int]:
        """Change `graph` in place. Return the number of matches of each pass, by name."""
        matches = {found.name: found(graph, context) for found in self._passes}
        graph.lint()
        return matches
