"""From a model's forward to one that runs in pieces: trace once, cut, compile each distinct piece once, or load what others made."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from torch import fx, nn

from .. import __version__
from ..kernels.platform import Platform
from .cache import CompileCache, entry_key
from .compiler import CompiledPiece, PieceCompiler, traced_function
from .errors import CompileError
from .passes.pack_linear import PackedGraph, pack_linear
from .piecewise import PiecewiseForward
from .plan import DistinctPiece, Plan, make_plan
from .split import split
from .split_ops import registered
from .torch_private import trace

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Told how many of how many distinct pieces are ready."""


@dataclass(slots=True)
class InstallReport:
    """What an installation did, by piece number.

    `compile_seconds`: pieces that it compiled; `loaded`: those that the cache had, and the seconds that they once took;
    `failed`: those left as traced, and why; `num_bytes`: of compiled code.
    """

    trace_seconds: float = 0.0
    load_seconds: float = 0.0
    compile_seconds: dict[int, float] = field(default_factory=dict)
    loaded: dict[int, float] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    num_bytes: dict[int, int] = field(default_factory=dict)

    @property
    def traced(self) -> bool:
        return self.trace_seconds > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Installer:
    """How forwards become pieces on this machine: with which compiler, kept in which cache."""

    platform: Platform
    compiler: PieceCompiler
    cache: CompileCache
    max_tokens: int
    progress: Progress = lambda done, total: None

    def install(
        self, module: nn.Module, inputs: Sequence[torch.Tensor], *, model_key: str | None = None
    ) -> tuple[PiecewiseForward, InstallReport]:
        """`module`'s forward in pieces. `inputs` [T, ...]: an example of what it takes, T at least 2.

        `model_key`: text in which two models differ if their forwards do (architecture, sizes, dtype). With it the cut
        forward itself is kept, and the next start does not trace. Raises `TraceError`; a piece that cannot be compiled
        is left as traced, with a line in the log.
        """
        if model_key is not None and (stored := self.load(module, model_key)) is not None:
            return stored
        report = InstallReport()
        tensors = named_tensors(module)
        workshop = _Workshop(self, tensors, report)
        plan, graphs, tensors = self._trace(module, list(inputs), tensors, report)
        pieces = [workshop.make(number, plan, graph) for number, graph in enumerate(graphs)]
        if model_key is not None and plan.is_portable:
            self._keep_plan(plan, model_key)
        return PiecewiseForward(plan, pieces, tensors, self.platform.pack_linear_weight), report

    def load(self, module: nn.Module, model_key: str) -> tuple[PiecewiseForward, InstallReport] | None:
        """What `install` gives if the cache holds all of it, else None; neither traces nor compiles."""
        report, tensors = InstallReport(), named_tensors(module)
        plan = self._known_plan(model_key, tensors)
        pieces = None if plan is None else _Workshop(self, tensors, report).load_all(plan)
        if plan is None or pieces is None:
            return None
        return PiecewiseForward(plan, pieces, tensors, self.platform.pack_linear_weight), report

    def versions(self) -> dict[str, str]:
        """What everything in the cache depends on."""
        return {"piecework": __version__, "torch": torch.__version__, "dtype": str(torch.get_default_dtype())}

    def _trace(
        self, module: nn.Module, inputs: list[torch.Tensor], tensors: dict[str, torch.Tensor], report: InstallReport
    ) -> tuple[Plan, list[fx.Graph], dict[str, torch.Tensor]]:
        """The plan, the graphs of its pieces, and all tensors that it names, those of no parameter too."""
        began = time.perf_counter()
        cut = split(trace(module.forward, inputs, self.max_tokens), inputs)
        plan, graphs = make_plan(cut, inputs, {id(tensor): name for name, tensor in tensors.items()})
        found = {name: cut.tensors[number] for number, name in plan.weights.items()}
        report.trace_seconds = time.perf_counter() - began
        return plan, graphs, found

    def _known_plan(self, model_key: str, tensors: Mapping[str, torch.Tensor]) -> Plan | None:
        path = self.cache.get(self._plan_key(model_key))
        if path is None:
            return None
        try:
            plan = Plan.from_json(json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return plan if plan.fits(tensors) else None

    def _keep_plan(self, plan: Plan, model_key: str) -> None:
        about = {"kind": "plan", "model": model_key, "pieces": len(plan.pieces), "torch": torch.__version__}
        try:
            with self.cache.work_folder() as folder:
                (folder / "plan.json").write_text(json.dumps(plan.to_json()))
                self.cache.put(self._plan_key(model_key), folder / "plan.json", about)
        except OSError as error:
            logger.warning("the cut forward is not kept for the next start: %s", error)

    def _plan_key(self, model_key: str) -> str:
        made_by = {"source": source_hash(), "split_ops": registered(), "max_tokens": self.max_tokens}
        return entry_key(self.versions() | made_by | {"model": model_key, "device": self.platform.device_type})


class _Workshop:
    """Makes single pieces ready: from the cache, compiled into it, or as traced."""

    def __init__(self, installer: Installer, tensors: Mapping[str, torch.Tensor], report: InstallReport) -> None:
        self._platform, self._compiler, self._cache = installer.platform, installer.compiler, installer.cache
        self._progress, self._versions = installer.progress, installer.versions()
        self._report = report
        self._packed_linear = installer.platform.packed_linear(
            sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors.values()}.values())
        )

    def load_all(self, plan: Plan) -> list[CompiledPiece] | None:
        """Every piece from the cache; None if one is not there."""
        began = time.perf_counter()
        pieces = []
        for number, piece in enumerate(plan.pieces):
            loaded = self._load(number, self._key(piece))
            if loaded is None:
                return None
            pieces.append(loaded)
        self._report.load_seconds = time.perf_counter() - began
        self._progress(len(pieces), len(pieces))
        return pieces

    def make(self, number: int, plan: Plan, graph: fx.Graph) -> CompiledPiece:
        """A piece from the cache, or compiled into it, or as traced."""
        try:
            key = self._key(plan.pieces[number])
            loaded = self._load(number, key)
            if loaded is None:
                with self._cache.lock(key):
                    loaded = self._load(number, key) or self._compile(number, plan.pieces[number], graph, key)
            return loaded
        except Exception as error:
            self._report.failed[number] = str(error).partition("\n")[0]
            logger.warning(
                "piece %d of %d is not compiled and runs as it was traced (%s); --piecewise-cuda-graph-compiler eager spares the attempt",
                number,
                len(plan.pieces),
                self._report.failed[number],
            )
            return CompiledPiece(traced_function(graph))
        finally:
            self._progress(number + 1, len(plan.pieces))

    def _compile(self, number: int, piece: DistinctPiece, graph: fx.Graph, key: str) -> CompiledPiece:
        began = time.perf_counter()
        changed = self._with_passes(graph, piece)
        with self._cache.work_folder() as folder:
            file = folder / f"piece{self._compiler.suffix}"
            try:
                self._compiler.compile(changed.graph, piece.inputs, file)
            except CompileError:
                if not changed.packed:
                    raise
                changed = PackedGraph(graph, ())
                self._compiler.compile(graph, piece.inputs, file)
            seconds = self._report.compile_seconds[number] = time.perf_counter() - began
            self._report.num_bytes[number] = file.stat().st_size
            about = {"kind": "piece", "piece": piece.key, "compiler": self._compiler.name, "ops": piece.ops, "packed": changed.packed}
            path = self._cache.put(key, file, about | {"seconds": seconds, "torch": torch.__version__})
        return CompiledPiece(self._compiler.load(path), changed.packed)

    def _with_passes(self, graph: fx.Graph, piece: DistinctPiece) -> PackedGraph:
        if self._packed_linear is None:
            return PackedGraph(graph, ())
        return pack_linear(graph, piece.inputs, self._packed_linear)

    def _load(self, number: int, key: str) -> CompiledPiece | None:
        entry = self._cache.find(key)
        if entry is None:
            return None
        try:
            piece = CompiledPiece(self._compiler.load(self._cache.folder / entry.content), tuple(entry.about["packed"]))
        except Exception as error:
            logger.warning("the compile cache's %s cannot be loaded and is made anew: %s", entry.content, error)
            return None
        self._report.loaded[number] = float(entry.about.get("seconds", 0.0))
        self._report.num_bytes[number] = entry.num_bytes
        return piece

    def _key(self, piece: DistinctPiece) -> str:
        compiler = {"name": self._compiler.name, "options": self._compiler.options(), "packed_linear": self._packed_linear is not None}
        return entry_key(self._versions | {"piece": piece.key, "compiler": compiler, "machine": self._platform.identity()})


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """A model's parameters and buffers by name; a shared one under each of its names."""
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}


@cache
def source_hash() -> str:
    """Of the code that decides how a model's forward looks: all floors below the server."""
    root = Path(__file__).parents[1]
    files = sorted(path for floor in ("kernels", "compilation", "runtime") for path in (root / floor).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
