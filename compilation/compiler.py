"""Piece compilers. They turn a graph into a file that any process of this machine can load."""

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

from ..kernels.platform.compilation import Compilation
from . import torch_private
from .shapes import TensorSpec

logger = logging.getLogger(__name__)

# Runs a piece at any number of tokens. Takes its inputs and returns its outputs, in order.
PieceFunction = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


class CompiledPiece(NamedTuple):
    """A piece that can run.

    `packed` are the indices of inputs that are weights in the layout of
    `Platform.pack_linear_weight`.
    """

    run: PieceFunction
    packed: tuple[int, ...] = ()


class PieceLoader(Protocol):
    """The part of a compiler that a serving process needs: its settings, and how to load a piece.

    `fuses` says that it fuses the ops of a piece. Passes then leave it plain torch instead of
    kernels.
    """

    name: str
    fuses: bool

    def options(self) -> dict[str, Any]:
        """Return all that its output depends on, besides the piece, torch, the machine and the
        source of this project.
        """
        ...

    def toolchain(self) -> str | None:
        """Return the version of the external compiler that it calls.

        Return None if it calls none, or if none is installed.
        """
        ...

    def obstacle(self) -> str | None:
        """Return why it cannot compile on this machine, or None if it can be tried."""
        ...

    def load(self, path: Path) -> PieceFunction:
        """Load a file that `PieceCompiler.compile` wrote.

        If the file is damaged, any exception may be raised.
        """
        ...


class PieceCompiler(PieceLoader, Protocol):
    """Compiles pieces. Its files end in `suffix`."""

    suffix: str

    def compile(self, graph: fx.Graph, example_inputs: Sequence[TensorSpec], path: Path) -> None:
        """Compile a piece into the file `path`. Raise `CompileError` if that fails."""
        ...


class EagerCompiler:
    """Keeps a piece as it was traced: torch's own kernels, called one after another."""

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
    """Compiles a piece ahead of time by TorchInductor, into a shared library that calls its
    kernels.

    A package loads in milliseconds, without Inductor and without a C++ compiler. A call spends less
    time in Python than a single op (docs/graphs.md has the measurements).
    """

    name = "inductor"
    fuses = True
    suffix = ".pt2"

    def __init__(self, *, keeps_bits: bool = False) -> None:
        """If `keeps_bits` is set, fused ops round as the same ops do one by one."""
        self._settings = {"emulate_precision_casts": True} if keeps_bits else {}

    def options(self) -> dict[str, Any]:
        # CPU kernels are compiled for a number of threads.
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
            else f"there is no C++ compiler {wanted}: install it, or set $CXX to another one"
        )

    def compile(self, graph: fx.Graph, example_inputs: Sequence[TensorSpec], path: Path) -> None:
        torch_private.compile_package(bare_module(graph), example_inputs, path, self._settings)

    def load(self, path: Path) -> PieceFunction:
        return torch_private.load_package(path)


_COMPILERS = (EagerCompiler.name, InductorCompiler.name)


def piece_compiler(name: str | None, platform: Compilation) -> PieceCompiler:
    """Return the compiler of that name, or the default of the platform.

    If the platform does not support the name, log a warning and return the default.
    """
    if name is not None and name not in _COMPILERS:
        raise ValueError(
            f"--piecewise-cuda-graph-compiler must be one of {', '.join(_COMPILERS)}, got {name}"
        )
    chosen = name or platform.piece_compilers[0]
    if chosen not in platform.piece_compilers:
        chosen = platform.piece_compilers[0]
        logger.warning(
            "--piecewise-cuda-graph-compiler %s is not available on %s: %s is used",
            name,
            platform.device_type,
            chosen,
        )
    if chosen == InductorCompiler.name:
        return InductorCompiler(keeps_bits=platform.pieces_keep_bits)
    return EagerCompiler()


def traced_function(graph: fx.Graph) -> PieceFunction:
    """Return a function that runs a piece as it was traced."""
    return _of_sequence(bare_module(graph))


def _of_sequence(module: fx.GraphModule) -> PieceFunction:
    forward = module.forward
    return lambda inputs: forward(*inputs)


def bare_module(graph: fx.Graph) -> fx.GraphModule:
    """Return `graph` as a module, without the fake tensors, stacks and symbols of the trace."""
    bare = fx.Graph()
    inner: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        inner[node] = bare.node_copy(node, inner.__getitem__)
        inner[node].meta = {}
    return fx.GraphModule(torch.nn.Module(), bare)
