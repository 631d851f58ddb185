"""What pieces gain and cost on this machine: steps, compile time by depth, warm starts, and time
until ready.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..compilation.cache import CompileCache
from ..compilation.piece_maker import PieceMaker
from ..kernels.cache_folder import kernels_folder
from ..kernels.cpu.machine.cores import choose_threads
from ..kernels.platform.detect import detect
from ..runtime.config.engine import EngineConfig
from ..runtime.config.resolve import resolve_steps
from ..runtime.core.batch import Batch
from ..runtime.engine.build import Engine, build_engine
from ..runtime.files.resolve import resolve_model_path
from ..runtime.graphs.compile_pieces import make_pieces
from ..runtime.graphs.pieces import piece_store
from ..runtime.layers.attention import register_attention
from ..runtime.loader.loader import empty_model, load_model
from .gpu_engines import decode_batch, fill_cache, prefill_batch
from .graph_faults import FAULTS, WITHOUT, watch
from .report import Report

_WARM_UPS = 3
_READY = (
    "import json, sys\nfrom piecework.runtime.config.engine import EngineConfig\nfrom "
    "piecework.runtime.engine.build import build_engine\n"
    "engine = build_engine(EngineConfig(**json.loads(sys.argv[1])), "
    "progress=False)\nprint('ready', flush=True)\nengine.startup.stop()"
)
_READY_SECONDS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphsSettings:
    """What is measured. Lengths are in tokens."""

    model_path: str = "smollm2-135m"
    dtype: str = "auto"
    compiler: str | None = None
    num_threads: int | None = None
    quantization: str = "auto"
    passes: str = "auto"
    parts: Sequence[str] = ("prefill", "decode", "compile", "ready")
    prefill: Sequence[int] = (16, 64, 256, 512)
    batch_sizes: Sequence[int] = (1, 8)
    context: int = 256
    layers: Sequence[int] = (8, 30, 60)  # Depths whose compile times are compared.
    repeats: int = 30  # Runs of each step.
    starts: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison, in seconds."""

    name: str
    first: float  # Least of all runs.
    second: float
    medians: tuple[float, float] | None = None  # None if there was one run.

    @property
    def ratio(self) -> float:
        return self.first / self.second


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of comparisons."""

    title: str
    columns: tuple[str, str]
    ratio: str  # Title of the column with first / second.
    rows: list[Row]

    def lines(self) -> Iterator[str]:
        yield f"| {self.title} | {self.columns[0]} | {self.columns[1]} | {self.ratio} |"
        yield "|---|---|---|---|"
        for row in self.rows:
            yield f"| {row.name} | {_time(row.first)} | {_time(row.second)} | {row.ratio:.2f} |"
        yield ""


def run(settings: GraphsSettings, report: Report) -> int:
    """Measure every part and print a table for each. Return 0. Raises `ValueError` for an error
    that the user can correct.
    """
    tables: list[Table] = []
    with _own_cache():
        for part in settings.parts:
            table = _PARTS[part](settings)
            tables.append(table)
            report.print(table.lines())
    machine = {"torch": torch.__version__, "threads": choose_threads(settings.num_threads).number}
    results = [
        asdict(table) | {"rows": [asdict(row) | {"ratio": row.ratio} for row in table.rows]}
        for table in tables
    ]
    report.write({"settings": asdict(settings), "machine": machine, "tables": results})
    return 0


@contextmanager
def _own_cache() -> Iterator[Path]:
    """Use an empty compile cache, and remove it at the end, so that no server gets pieces of a
    measurement.
    """
    before = dict(os.environ)
    # Keep the native kernels: building them is not part of a model's cost.
    os.environ.setdefault("PIECEWORK_KERNELS_DIR", str(kernels_folder()))
    with tempfile.TemporaryDirectory(prefix="piecework-bench-") as folder:
        os.environ["PIECEWORK_CACHE_DIR"] = folder
        try:
            yield Path(folder)
        finally:
            os.environ.clear()
            os.environ.update(before)


# Steps


def _prefill(settings: GraphsSettings) -> Table:
    def batches(engine: Engine) -> dict[str, Batch]:
        return {
            f"prefill of {tokens} tokens": prefill_batch(engine, tokens)
            for tokens in settings.prefill
        }

    return _compare_steps(settings, "forward of a step", batches)


def _decode(settings: GraphsSettings) -> Table:
    def batches(engine: Engine) -> dict[str, Batch]:
        return {
            f"decode of {size} at {settings.context} tokens each": decode_batch(
                engine, size, settings.context
            )
            for size in settings.batch_sizes
        }

    return _compare_steps(settings, "forward of a step", batches)


def _compare_steps(
    settings: GraphsSettings, title: str, batches: Callable[[Engine], dict[str, Batch]]
) -> Table:
    off = build_engine(_config(settings, disable_cuda_graph=True), progress=False)
    # Disable native decodes, so that decodes run in pieces too.
    in_pieces = _config(
        settings, piecewise_cuda_graph=True, cuda_graph_backend_decode="disabled", startup="full"
    )
    pieces = build_engine(in_pieces, progress=False)
    if not pieces.runner.info().graphs.distinct_pieces:
        raise ValueError(
            f"{settings.model_path} does not run in pieces here; `piecework explain` says why"
        )
    for engine in (off, pieces):
        fill_cache(engine)
    both = zip(batches(off).items(), batches(pieces).items(), strict=True)
    rows = [
        _interleaved(
            name,
            partial(off.runner.forward, first),
            partial(pieces.runner.forward, second),
            settings.repeats,
        )
        for (name, first), (_, second) in both
    ]
    for engine in (off, pieces):
        engine.startup.stop()
    return Table(title=title, columns=("graphs off", "in pieces"), ratio="times as fast", rows=rows)


@torch.inference_mode()
def _interleaved(
    name: str, first: Callable[[], object], second: Callable[[], object], repeats: int
) -> Row:
    """Measure both calls in turn, so that load of other programs affects both.

    The call that comes first changes every time.
    """
    times: dict[Callable[[], object], list[float]] = {first: [], second: []}
    for _ in range(_WARM_UPS):
        first()
        second()
    gc.disable()
    try:
        for number in range(repeats):
            for call in (first, second) if number % 2 else (second, first):
                began = time.perf_counter()
                call()
                times[call].append(time.perf_counter() - began)
    finally:
        gc.enable()
    medians = statistics.median(times[first]), statistics.median(times[second])
    return Row(name=name, first=min(times[first]), second=min(times[second]), medians=medians)


# Compiling


def _compile(settings: GraphsSettings) -> Table:
    """Measure tracing and compiling in a cold start, and loading in a warm start, by number of
    layers.

    All layers are equal, and their weights are not made.
    """
    config = _config(settings, piecewise_cuda_graph=True, chunked_prefill_size=2048)
    platform = detect(config.device)
    platform.set_up(config.num_threads)
    register_attention(platform.dispatch_key)
    dtype = platform.default_dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
    model = load_model(
        resolve_model_path(settings.model_path), dtype, platform.device(), False
    ).config
    steps = resolve_steps(config, model, platform)

    def seconds(depth: int, folder: Path) -> float:
        windows = (model.windows * depth)[:depth]
        changed = replace(model, num_layers=depth, windows=windows)
        module = empty_model(changed, dtype, platform.device())
        maker = replace(piece_store(PieceMaker, steps, platform), cache=CompileCache(folder))
        began = time.perf_counter()
        make_pieces(maker, module, changed, dtype)
        return time.perf_counter() - began

    rows = []
    with tempfile.TemporaryDirectory() as root:
        # Warm up: the first run also imports the compiler.
        seconds(2, Path(root) / "first")
        for depth in settings.layers:
            folder = Path(root) / str(depth)
            rows.append(
                Row(
                    name=f"{depth} layers",
                    first=seconds(depth, folder),
                    second=seconds(depth, folder),
                )
            )
    return Table(
        title="pieces of a model",
        columns=("cold: traced, compiled", "warm: loaded"),
        ratio="times as fast",
        rows=rows,
    )


# Ready


def _ready(settings: GraphsSettings) -> Table:
    """Measure the time from the start of the engine's process until it takes requests, with
    `--startup fast`, with an empty and a filled cache.
    """
    rows = []
    off, fast = (
        _config(settings, disable_cuda_graph=True),
        _config(settings, piecewise_cuda_graph=True),
    )
    times: dict[str, list[float]] = {"off": [], "cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as filled, tempfile.TemporaryDirectory() as cleared:
        _until_ready(replace(fast, startup="full"), filled)
        # Build the native kernels first, which `clear` keeps. They are not part of the comparison.
        _until_ready(off, cleared)
        for _ in range(settings.starts):
            CompileCache(Path(cleared)).clear()
            times["off"].append(_until_ready(off, cleared))
            times["cold"].append(_until_ready(fast, cleared))
            times["warm"].append(_until_ready(fast, filled))
    for name in ("cold", "warm"):
        medians = statistics.median(times[name]), statistics.median(times["off"])
        rows.append(
            Row(
                name=f"{name} cache",
                first=min(times[name]),
                second=min(times["off"]),
                medians=medians,
            )
        )
    return Table(
        title="until ready",
        columns=("--startup fast", "graphs off"),
        ratio="times as long",
        rows=rows,
    )


def _until_ready(config: EngineConfig, cache: str) -> float:
    command = [sys.executable, "-c", _READY, json.dumps(asdict(config))]
    began = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=os.environ | {"PIECEWORK_CACHE_DIR": cache}, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - began
        process.wait(_READY_SECONDS)
    if line != "ready\n" or process.returncode != 0:
        raise ValueError(
            f"the engine did not start (exit code {process.returncode}); its error stands above"
        )
    return seconds


# Faults


def _faults(settings: GraphsSettings) -> Table:
    """Measure the longest gap between two tokens of a stream while the compiler fails, and that of
    a server without pieces.
    """
    flags = {
        "--dtype": settings.dtype,
        "--num-threads": settings.num_threads,
        "--piecewise-cuda-graph-compiler": settings.compiler,
    }
    given = [
        str(word)
        for flag, value in flags.items()
        if value not in (None, "auto")
        for word in (flag, value)
    ]
    found = {name: watch(settings.model_path, fault, flags=given) for name, fault in FAULTS.items()}
    # Run as long as the longest run with a fault: more gaps have a longer maximum.
    without = watch(
        settings.model_path,
        WITHOUT,
        flags=given,
        seconds=max(sum(stream.gaps) for stream in found.values()),
    )
    rows = []
    for name, stream in found.items():
        medians = stream.median, without.median
        label = f"{name}: {stream.pieces} distinct pieces run"
        rows.append(Row(name=label, first=stream.longest, second=without.longest, medians=medians))
    return Table(
        title="compiling process",
        columns=("longest gap", "without pieces"),
        ratio="times as long",
        rows=rows,
    )


def _config(settings: GraphsSettings, **others: Any) -> EngineConfig:
    longest = max(*settings.prefill, settings.context + 1)
    return EngineConfig(
        model_path=settings.model_path,
        dtype=settings.dtype,
        num_threads=settings.num_threads,
        piecewise_cuda_graph_compiler=settings.compiler,
        quantization=settings.quantization,
        passes=settings.passes,
        max_total_tokens=max(longest, (settings.context + 16) * max(settings.batch_sizes)) + 256,
        **others,
    )


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


_PARTS: dict[str, Callable[[GraphsSettings], Table]] = {
    "prefill": _prefill,
    "decode": _decode,
    "compile": _compile,
    "ready": _ready,
    "faults": _faults,
}
