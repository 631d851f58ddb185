"""The share of the machine's speed that each part of a model reaches. Peaks are measured in the
same run.

A part that moves b bytes and makes n operations takes at least max(b / bandwidth, n / peak): the
roofline of S. Williams et al., doi:10.1145/1498765.1498785. Its share of the floor is this time
divided by the measured time.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from ..kernels.attention import AttentionMetadata, KVLayout
from ..kernels.cpu.native.linear import layout_name
from ..kernels.cpu.native.linear_struct import Layout
from ..kernels.cpu.native.peaks import Peaks, measure_peaks
from ..runtime.config.engine import EngineConfig
from ..runtime.core.batch import Batch
from ..runtime.core.forward_context import PagedAttention
from ..runtime.engine.build import Engine, build_engine
from ..runtime.layers.attention import attention
from ..runtime.layers.linear import Linear
from ..runtime.layers.moe import ExpertLinear, SparseMoE
from .gpu_engines import decode_batch, fill_cache, prefill_batch
from .report import Report

_INTEGERS = (Layout.BF16,)  # Layouts that are never multiplied as integers.
_WARM_UPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineSettings:
    """What is measured. Lengths are in tokens."""

    model_path: str = "smollm2-135m"
    quantization: str = "auto"
    compiler: str | None = None
    num_threads: int | None = None
    batch_sizes: Sequence[int] = (1, 8, 32)
    prompt: int = 1024
    context: int = 256
    rounds: int = 10  # Calls of each part; the fastest counts.
    plot: str | None = None


class Work(NamedTuple):
    """The least work of a part of a step. `numbers` names the entry of `Peaks.operations` that
    limits it.
    """

    bytes: float
    operations: float
    numbers: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One part of one step. The floor is the nearer of the read bandwidth and the peak of
    operations.
    """

    part: str
    step: str
    seconds: float  # Fastest call.
    work: Work
    of_bandwidth: float
    of_peak: float

    @property
    def of_floor(self) -> float:
        return max(self.of_bandwidth, self.of_peak)


def run(settings: RooflineSettings, report: Report) -> int:
    """Measure and print a table. Return 0. Raises `ValueError` for an error that the user can
    correct.
    """
    engine = build_engine(_config(settings), progress=False)
    try:
        peaks = measure_peaks()
        if peaks is None:
            raise ValueError("roofline measures the CPU's kernels, and there are none here")
        fill_cache(engine)
        with torch.inference_mode():
            rows = [
                row
                for name, batch in _steps(engine, settings)
                for row in _measure(engine, name, batch, peaks, settings.rounds)
            ]
    finally:
        engine.startup.stop()
    report.print(_lines(peaks, rows))
    report.write(
        {
            "settings": asdict(settings),
            "threads": torch.get_num_threads(),
            "peaks": peaks._asdict(),
            "rows": [asdict(row) | {"of_floor": row.of_floor} for row in rows],
        }
    )
    if settings.plot is not None:
        _plot(peaks, rows, settings.plot)
    return 0


def _config(settings: RooflineSettings) -> EngineConfig:
    tokens = (settings.context + 16) * max(settings.batch_sizes)
    longest = max(settings.prompt, settings.context) + 1
    return EngineConfig(
        device="cpu",
        model_path=settings.model_path,
        quantization=settings.quantization,
        piecewise_cuda_graph_compiler=settings.compiler,
        num_threads=settings.num_threads,
        piecewise_cuda_graph=True,
        startup="full",
        context_length=longest,
        chunked_prefill_size=settings.prompt,
        max_running_requests=max(settings.batch_sizes),
        max_total_tokens=max(longest, tokens) + 256,
    )


def _steps(engine: Engine, settings: RooflineSettings) -> Iterator[tuple[str, Batch]]:
    for size in settings.batch_sizes:
        yield f"decode of {size}", decode_batch(engine, size, settings.context)
    yield f"prompt of {settings.prompt:,}", prefill_batch(engine, settings.prompt)


def _measure(engine: Engine, step: str, batch: Batch, peaks: Peaks, rounds: int) -> Iterator[Row]:
    """Measure every product, attention, and the whole step with head and sampling."""
    total = list[Work]()
    for part, linears, seconds in _time_products(engine, batch, rounds):
        work = _of_linear(linears[0], _rows(linears[0], engine, batch), peaks)
        total += [work] * len(linears)
        yield _row(part, step, seconds / len(linears), work, peaks)
    total += [
        _of_experts(module, batch.num_tokens, peaks)
        for module in engine.runner.model.modules()
        if isinstance(module, SparseMoE)
    ]
    layouts = engine.runner.pool.layouts
    works = [_of_attention(layout, batch.metadata, peaks) for layout in layouts]
    seconds = _least(rounds, _attend(engine, layouts, batch))
    yield _row("attention, all layers", step, seconds, _sum(works), peaks)
    seconds = _least(rounds, lambda: engine.runner.execute(batch.scheduled, None).read())
    yield _row("whole step", step, seconds, _sum([*total, *works]), peaks)


def _time_products(
    engine: Engine, batch: Batch, rounds: int
) -> Iterator[tuple[str, list[Linear], float]]:
    """Yield groups of linear layers with the same name, shape and format, and the seconds of each
    group.

    Experts are excluded. The layers run in the model's order, so that weights come from memory, as
    in a step.
    """
    found = defaultdict[str, list[Linear]](list)
    order = list[tuple[str, Linear]]()
    for name, module in engine.runner.model.named_modules():
        if isinstance(module, Linear) and not isinstance(module, ExpertLinear):
            kind = "" if module.layout is None else f" {layout_name(module.layout)}"
            shape = f"{module.out_features:,} x {module.in_features:,}"
            part = f"{name.rpartition('.')[2]} {shape}{kind}"
            found[part].append(module)
            order.append((part, module))
    inputs = {
        part: torch.randn(_rows(linears[0], engine, batch), linears[0].in_features).to(
            engine.runner.dtype
        )
        for part, linears in found.items()
    }
    least = dict.fromkeys(found, float("inf"))
    for _ in range(_WARM_UPS + rounds):
        seconds = dict.fromkeys(found, 0.0)
        for part, linear in order:
            began = time.perf_counter()
            linear(inputs[part])
            seconds[part] += time.perf_counter() - began
        least = {part: min(least[part], seconds[part]) for part in found}
    for part, linears in found.items():
        yield part, linears, least[part]


def _rows(linear: Linear, engine: Engine, batch: Batch) -> int:
    """Return the number of rows that a layer multiplies. The head multiplies the last token of each
    request.
    """
    is_head = linear is engine.runner.model.lm_head
    return len(batch.samplers) if is_head else batch.num_tokens


def _numbers(linear: Linear, peaks: Peaks) -> str:
    """Return the fastest kind of numbers that can multiply a weight of this format."""
    able = [
        kind
        for kind in peaks.operations
        if kind != "int8" or (linear.layout is not None and linear.layout not in _INTEGERS)
    ]
    return max(able, key=peaks.operations.__getitem__)


def _weight_bytes(module: torch.nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in module.parameters())


def _of_linear(linear: Linear, tokens: int, peaks: Peaks) -> Work:
    rows, columns = linear.out_features, linear.in_features
    moved = _weight_bytes(linear) + 2 * tokens * (rows + columns)
    return Work(moved, 2 * tokens * rows * columns, _numbers(linear, peaks))


def _of_experts(mixture: SparseMoE, tokens: int, peaks: Peaks) -> Work:
    """Return the work of a mixture whose tokens choose evenly. Each chosen expert is read once."""
    experts, chosen = mixture.experts, mixture.gate.routing.top_k
    read = 1 - (1 - chosen / mixture.gate.routing.num_experts) ** tokens
    each = [
        linear.out_features // experts.num_experts * linear.in_features
        for linear in (experts.gate_up_proj, experts.down_proj)
    ]
    numbers = _numbers(experts.gate_up_proj, peaks)
    return Work(_weight_bytes(experts) * read, 2 * tokens * chosen * sum(each), numbers)


def _of_attention(layout: KVLayout, metadata: AttentionMetadata, peaks: Peaks) -> Work:
    """Return the work of attention. Keys and values are read once per request.

    Tokens outside a window are neither read nor multiplied. Prompts in bfloat16 may use its dot
    products; decodes use FMAs.
    """
    moved = operations = 0
    each = 2 * layout.num_heads * (layout.key_size + layout.value_size)
    for new, length in zip(metadata.query_lens, metadata.seq_lens, strict=True):
        window = layout.window or length
        moved += min(length, window + new) * layout.token_bytes
        seen = sum(min(place, window) for place in range(length - new + 1, length + 1))
        operations += each * seen
    kinds = ["float32"]
    if layout.dtype == torch.bfloat16 and max(metadata.query_lens) > 1:
        kinds.append("bfloat16")
    return Work(moved, operations, max(kinds, key=lambda kind: peaks.operations.get(kind, 0.0)))


def _attend(
    engine: Engine, layouts: Sequence[KVLayout], batch: Batch
) -> Callable[[], list[torch.Tensor]]:
    runner = engine.runner
    paged = PagedAttention(
        backend=runner.platform.make_attention_backend(runner.attention_backend), pool=runner.pool
    )

    def random(heads: int, size: int) -> torch.Tensor:
        return torch.randn(batch.num_tokens, heads, size).to(runner.dtype)

    inputs = [
        (
            random(layout.num_heads, layout.key_size),
            random(layout.num_kv_heads, layout.key_size),
            random(layout.num_kv_heads, layout.value_size),
        )
        for layout in layouts
    ]

    def attend() -> list[torch.Tensor]:
        with paged.step(batch.metadata):
            return [attention(*given, layer) for layer, given in enumerate(inputs)]

    return attend


def _sum(works: Sequence[Work]) -> Work:
    """Return the sum of works, with the kind of numbers of the largest one."""
    largest = max(works, key=lambda work: work.operations)
    return Work(
        sum(work.bytes for work in works), sum(work.operations for work in works), largest.numbers
    )


def _row(part: str, step: str, seconds: float, work: Work, peaks: Peaks) -> Row:
    return Row(
        part=part,
        step=step,
        seconds=seconds,
        work=work,
        of_bandwidth=work.bytes / max(peaks.read, peaks.triad) / seconds,
        of_peak=work.operations / peaks.operations[work.numbers] / seconds,
    )


def _least(rounds: int, call: Callable[[], Any]) -> float:
    best = float("inf")
    for number in range(_WARM_UPS + rounds):
        began = time.perf_counter()
        call()
        if number >= _WARM_UPS:
            best = min(best, time.perf_counter() - began)
    return best


# Reporting


def _lines(peaks: Peaks, rows: Sequence[Row]) -> Iterator[str]:
    rates = ", ".join(f"{kind} {rate / 1e9:,.0f}" for kind, rate in peaks.operations.items())
    yield (
        f"{torch.get_num_threads()} threads: {peaks.triad / 1e9:.1f} GB/s by a triad, "
        f"{peaks.read / 1e9:.1f} GB/s read; GFLOP/s: {rates}"
    )
    yield ""
    yield "| step | part | time | GB/s | GFLOP/s | of bandwidth | of peak | of the floor |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        moved, made = row.work.bytes / row.seconds / 1e9, row.work.operations / row.seconds / 1e9
        peak = f"{row.of_peak:.2f} {row.work.numbers}"
        yield (
            f"| {row.step} | {row.part} | {_time(row.seconds)} | {moved:.1f} | {made:,.0f} "
            f"| {row.of_bandwidth:.2f} | {peak} | {row.of_floor:.2f} |"
        )


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def _plot(peaks: Peaks, rows: Sequence[Row], path: str) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'piecework[plot]'") from None
    figure, axes = pyplot.subplots(figsize=(9, 5))
    steps = list(dict.fromkeys(row.step for row in rows))
    dense = [row.work.operations / row.work.bytes for row in rows]
    ends = [min(dense) / 2, max(dense) * 2]
    bandwidth = max(peaks.read, peaks.triad)
    for kind, peak in peaks.operations.items():
        knee = peak / bandwidth
        points = sorted({ends[0], min(max(knee, ends[0]), ends[1]), ends[1]})
        roof = [min(peak, bandwidth * point) / 1e9 for point in points]
        axes.plot(points, roof, color="gray", linewidth=1)
        axes.annotate(kind, (points[-1], roof[-1]), ha="right", va="bottom")
    for step in steps:
        chosen = [row for row in rows if row.step == step]
        axes.scatter(
            [row.work.operations / row.work.bytes for row in chosen],
            [row.work.operations / row.seconds / 1e9 for row in chosen],
            [60 if row.part == "whole step" else 18 for row in chosen],
            label=step,
        )
    axes.set(
        xscale="log", yscale="log", xlabel="operations a byte", ylabel="thousand million a second"
    )
    axes.legend(title="large: the whole step")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
