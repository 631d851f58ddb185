"""Which passes a traced forward goes through, in which order, and how often each matched.

    config = PassConfig(("pack_linear", "lower_ops"))
    matches = config.manager(platform, fuses=True).run(graph, PassContext(weights))

Passes see the whole forward: what spans a split op can be matched, and pieces that no compiler
sees profit too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import fx

from ...kernels import ops
from ...kernels.platform import Platform
from .common.lower_ops import LowerOps
from .context import PassContext
from .cpu.pack_linear import PackLinear


class Pass(Protocol):
    """One kind of change to a traced forward."""

    @property
    def name(self) -> str: ...

    @property
    def key(self) -> str:
        """All that its result depends on, besides the graph and this project's source."""
        ...

    def __call__(self, graph: fx.Graph, context: PassContext) -> int:
        """Change `graph` in place; returns how many places were changed. Nodes keep the example
        values of what they give (`node.meta["example_value"]`), new ones have theirs.
        """
        ...


@dataclass(frozen=True, slots=True)
class PassConfig:
    """The passes by name, in order. Decided once, for it depends on the machine's memory, and told
    to every process that makes or loads pieces of the model.
    """

    names: tuple[str, ...] = ("lower_ops",)

    @classmethod
    def choose(cls, platform: Platform, weight_bytes: int) -> PassConfig:
        """What this machine takes, for a model of so many bytes of weights."""
        packs = platform.packs_linear(weight_bytes)
        return cls(("pack_linear", "lower_ops") if packs else ("lower_ops",))

    def manager(self, platform: Platform, *, fuses: bool) -> PassManager:
        """`fuses`: whether the compiler fuses the ops of a piece. If so it is to see what they mean
        rather than kernels; if not, those for which the device has no kernel.
        """
        passes: dict[str, Pass] = {}
        if (packed_linear := platform.packed_linear()) is not None:
            passes["pack_linear"] = PackLinear(packed_linear)
        passes["lower_ops"] = LowerOps(
            tuple(
                name
                for name in ops.TRACED
                if fuses or not ops.has_kernel(platform.device_type, name)
            )
        )
        return PassManager([passes[name] for name in self.names if name in passes])


DEFAULT_PASSES = PassConfig()
"""Those that need no more memory."""


class PassManager:
    """Runs passes one after another."""

    def __init__(self, passes: Sequence[Pass]) -> None:
        self._passes = passes
        self.key = [made.key for made in passes]
        """What plans and pieces depend on."""

    def run(self, graph: fx.Graph, context: PassContext) -> dict[str, int]:
        """Change `graph` in place; returns how often each pass matched, by its name."""
        matches = {found.name: found(graph, context) for found in self._passes}
        graph.lint()
        return matches
