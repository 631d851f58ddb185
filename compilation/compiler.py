"""Piece compilers: a graph in, a file that any process of this machine can load out."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx

from ..kernels.platform import Platform
from . import torch_private
from .shapes import TensorSpec

logger = logging.getLogger(__name__)

PieceFunction = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""A piece that can run: inputs in order to outputs in order, for any number of tokens."""


class CompiledPiece(NamedTuple):
    """A piece that can run. `packed`: which of its inputs are weights that it takes as
    `Platform.pack_linear_weight` lays them out.
    """

    run: PieceFunction
    packed: tuple[int, ...] = ()


class PieceLoader(Protocol):
    """All of a compiler that a process needs that serves: what its pieces depend on, and how they
    are loaded.
    """

    name: str
    fuses: bool
    """Whether it fuses the ops of a piece, so that it is to see what they mean and not kernels."""

    def options(self) -> dict[str, Any]:
        """All that its output depends on, besides the piece, this project's source, torch and the
        machine.
        """
        ...

    def toolchain(self) -> str | None:
        """The compiler outside of torch that it calls; None where it calls none, or none is to be
        had here.
        """
        ...

    def obstacle(self) -> str | None:
        """Why it cannot compile anything on this machine; None: it can be tried."""
        ...

    def load(self, path: Path) -> PieceFunction:
        """What `PieceCompiler.compile` wrote, ready to run. Raises an exception of any kind where
        the file is not what was written.
        """
        ...


class PieceCompiler(PieceLoader, Protocol):
    """One way to make pieces fast."""

    suffix: str
    """Of the files that it writes."""

    def compile(self, graph: fx.Graph, example_inputs: Sequence[TensorSpec], path: Path) -> None:
        """Compile a piece into the file `path`. Raises `CompileError`."""
        ...


class EagerCompiler:
    """Leaves a piece as it was traced: torch's own kernels, called one after another."""

    name = "eager"
    fuses = False
    suffix = ".graph"

    def options(self) -> dict[str, Any]:
        return {}

    def toolchain(self) -> str | None:
        return None

    def obstacle(self) -> str | None:
        return None

    def compile(self, graph: fx.Graph, example_inputs: Sequence[TensorSpec], path: Path) -> None:
        path.write_bytes(pickle.dumps(bare_module(graph)))

    def load(self, path: Path) -> PieceFunction:
        return _of_sequence(pickle.loads(path.read_bytes()))


class InductorCompiler:
    """TorchInductor ahead of time: the whole piece in one shared library, C++ between its kernels.

    A package is loaded in milliseconds, without Inductor and without a C++ compiler, and one call
    of it spends less in Python than a single op does (docs/graphs.md has the measurements).
    """

    name = "inductor"
    fuses = True
    suffix = ".pt2"

    def __init__(self, *, keeps_bits: bool = False) -> None:
        """`keeps_bits`: fused ops round their results as they do when they run one by one."""
        self._settings = {"emulate_precision_casts": True} if keeps_bits else {}

    def options(self) -> dict[str, Any]:
        # A CPU kernel is compiled for a number of threads.
        return {
            "threads": torch.get_num_threads(),
            "settings": self._settings,
            "environment": torch_private.inductor_environment(),
            "changes": torch_private.inductor_changes(),
        }

    def toolchain(self) -> str | None:
        return torch_private.cpp_compiler()

    def obstacle(self) -> str | None:
        wanted = os.environ.get("CXX") or "g++"
        return (
            None
            if shutil.which(wanted)
            else f"there is no C++ compiler {wanted}: install it, or name another in $CXX"
        )

    def compile(self, graph: fx.Graph, example_inputs: Sequence[TensorSpec], path: Path) -> None:
        torch_private.compile_package(bare_module(graph), example_inputs, path, self._settings)

    def load(self, path: Path) -> PieceFunction:
        return torch_private.load_package(path)


_COMPILERS = (EagerCompiler.name, InductorCompiler.name)


def piece_compiler(name: str | None, platform: Platform) -> PieceCompiler:
    """The compiler of that name, or the platform's first choice; a name that the platform rules out
    gets one line in the log.
    """
    if name is not None and name not in _COMPILERS:
        raise ValueError(
            f"--piecewise-cuda-graph-compiler must be one of {', '.join(_COMPILERS)}, got {name}"
        )
    chosen = name or platform.piece_compilers[0]
    if chosen not in platform.piece_compilers:
        chosen = platform.piece_compilers[0]
        logger.warning(
            "--piecewise-cuda-graph-compiler %s is not to be had on %s: %s is used",
            name,
            platform.device_type,
            chosen,
        )
    if chosen == InductorCompiler.name:
        return InductorCompiler(keeps_bits=platform.pieces_keep_bits)
    return EagerCompiler()


def traced_function(graph: fx.Graph) -> PieceFunction:
    """A piece as it was traced, uncompiled."""
    return _of_sequence(bare_module(graph))


def _of_sequence(module: fx.GraphModule) -> PieceFunction:
    forward = module.forward
    return lambda inputs: forward(*inputs)


def bare_module(graph: fx.Graph) -> fx.GraphModule:
    """`graph` as a module, without what tracing left on its nodes: fake tensors, stacks,
    symbols.
    """
    bare = fx.Graph()
    inner: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        inner[node] = bare.node_copy(node, inner.__getitem__)
        inner[node].meta = {}
    return fx.GraphModule(torch.nn.Module(), bare)
