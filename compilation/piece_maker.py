"""Turns a model's forward into pieces: trace it, run the passes, split it, compile and store each
distinct piece. For processes that do not serve.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from .compiler import CompiledPiece, EagerCompiler, PieceCompiler, traced_function
from .core.errors import CompileError, NotStoredError
from .passes.context import PassContext
from .passes.cpu.pack_linear import unpacked
from .piece_store import PiecesReport, PieceStore, PreparedForward, SingleForward, named_tensors
from .piecewise import PiecewiseForward
from .plan import DistinctPiece, Plan, make_plan
from .sent import bytes_sent
from .split import piece_ops, split
from .torch_private import trace

logger = logging.getLogger(__name__)

# Takes the number of pieces that are ready, and the number of all distinct pieces.
Progress = Callable[[int, int], None]

# Errors of compilers and of the operating system about limits of the machine.
_OUT_OF_MACHINE = re.compile(
    "no space left|disk quota|out of memory|allocate memory|memory exhausted|bad_alloc|"
    "killed signal|terminated signal|terminated abruptly|start new thread|resource temporarily|"
    "too many open files|input/output error|read-only file system|permission denied|"
    "file size limit|file too large",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceMaker(PieceStore):
    """Makes pieces on this machine with a compiler, and stores them in a cache."""

    compiler: PieceCompiler
    progress: Progress = lambda done, total: None

    def make(
        self, module: nn.Module, inputs: Sequence[torch.Tensor], *, model_key: str | None = None
    ) -> PreparedForward:
        """Return the forward of `module` in pieces. `inputs` [T, ...] are an example, T at least 2.

        `model_key` is a text that differs between models whose forwards differ (architecture,
        sizes, dtype). With it, the split forward is stored, and the next start does not trace. A
        piece that cannot be compiled runs as traced, and that is stored too. Raise `TraceError` if
        the forward cannot be traced.
        """
        if model_key is not None:
            with contextlib.suppress(NotStoredError):
                stored = run(self.load(module, model_key))
                total = sum(len(part.plan.pieces) for part in stored.forward.parts)
                self.progress(total, total)
                return stored
        short = self._make_one(module, inputs, model_key)
        if (maker := self.of_long_steps()) is None:
            return PreparedForward(*short)
        return self.joined(short, maker._make_one(module, inputs, model_key))

    def _make_one(
        self, module: nn.Module, inputs: Sequence[torch.Tensor], model_key: str | None
    ) -> SingleForward:
        began, report = time.perf_counter(), PiecesReport()
        # A trace marks its inputs, and a tensor keeps the marks of an earlier trace.
        inputs = [tensor.clone() for tensor in inputs]
        passes = self.pass_manager()
        traced = trace(module.forward, inputs, self.max_tokens, passes.unit)
        weights = PassContext(frozenset(traced.weights(inputs)))
        before = piece_ops(traced.graph)
        sent = bytes_sent(traced.graph, traced.shapes, self.ranks)
        matches = passes.run(traced.graph, weights)
        traced.shapes.check_guards()
        cut = split(traced, inputs)
        names = {id(tensor): name for name, tensor in named_tensors(module).items()}
        plan, graphs = make_plan(
            cut,
            inputs,
            names,
            matches,
            passes.off,
            before,
            passes.unit,
            (sent, bytes_sent(traced.graph, traced.shapes, self.ranks)),
        )
        report.trace_seconds = time.perf_counter() - began
        pieces = [self._make(number, plan, graph, report) for number, graph in enumerate(graphs)]
        if model_key is not None and plan.is_portable:
            about = {
                "kind": "plan",
                "model": model_key,
                "pieces": len(plan.pieces),
                "torch": torch.__version__,
            }
            try:
                with self.cache.work_folder() as folder:
                    (folder / "plan.json").write_text(json.dumps(plan.to_json()))
                    self.cache.put(self.plan_key(model_key), folder / "plan.json", about)
            except OSError as error:
                logger.warning("the split forward cannot be stored for the next start: %s", error)
        tensors = {name: cut.tensors[number] for number, name in plan.weights.items()}
        pack = self.platform.pack_linear_weight
        return SingleForward(PiecewiseForward(plan, pieces, tensors, pack), report)

    def _make(
        self, number: int, plan: Plan, graph: fx.Graph, report: PiecesReport
    ) -> CompiledPiece:
        """Load a piece from the cache, or compile and store it. If that fails, use it as traced."""
        try:
            key = self.piece_key(plan.pieces[number])
            loaded = self.load_piece(number, key, report)
            if loaded is None:
                with self.cache.lock(key):
                    loaded = self.load_piece(number, key, report) or self._compile(
                        number, plan.pieces[number], graph, key, report
                    )
            return loaded
        except Exception as error:
            report.failed[number] = str(error).partition("\n")[0]
            logger.debug("piece %d of %d is not compiled", number, len(plan.pieces), exc_info=error)
            plain, _ = unpacked(graph)
            # Store the failure, with the piece as traced. The next start then needs neither a trace
            # nor another attempt.
            piece = plan.pieces[number]
            about = self._about(piece) | {
                "packed": (),
                "failed": str(error).partition("\n")[0],
                "transient": is_transient(error),
            }
            with contextlib.suppress(Exception), self.cache.work_folder() as folder:
                file = folder / f"piece{EagerCompiler.suffix}"
                EagerCompiler().compile(plain, piece.inputs, file)
                self.cache.put(self.piece_key(piece), file, about)
            return CompiledPiece(traced_function(plain))
        finally:
            self.progress(number + 1, len(plan.pieces))

    def _compile(
        self, number: int, piece: DistinctPiece, graph: fx.Graph, key: str, report: PiecesReport
    ) -> CompiledPiece:
        began = time.perf_counter()
        plain, packed = unpacked(graph)
        with self.cache.work_folder() as folder:
            file = folder / f"piece{self.compiler.suffix}"
            try:
                self.compiler.compile(graph, piece.inputs, file)
            except CompileError:
                if not packed:
                    raise
                packed = ()
                self.compiler.compile(plain, piece.inputs, file)
            seconds = report.compile_seconds[number] = time.perf_counter() - began
            report.num_bytes[number] = file.stat().st_size
            path = self.cache.put(
                key, file, self._about(piece) | {"packed": packed, "seconds": seconds}
            )
        return CompiledPiece(self.compiler.load(path), packed)

    def _about(self, piece: DistinctPiece) -> dict[str, Any]:
        made_with = {
            "compiler": self.compiler.name,
            "toolchain": self.compiler.toolchain(),
            "torch": torch.__version__,
        }
        return {"kind": "piece", "piece": piece.key, "ops": piece.ops} | made_with


def run(portions: Generator[bool, None, PreparedForward]) -> PreparedForward:
    """Do all portions of a work and return its result."""
    while True:
        try:
            next(portions)
        except StopIteration as done:
            prepared: PreparedForward = done.value
            return prepared


def is_transient(error: BaseException | None) -> bool:
    """Whether the machine caused the error (memory, disk, a killed process), not the compiler.

    Then another attempt may succeed.
    """
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        error = error.__cause__ or error.__context__
    return any(
        isinstance(error, MemoryError) or _OUT_OF_MACHINE.search(str(error)) for error in seen
    )
