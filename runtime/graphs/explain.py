"""What becomes of a model's forward on this machine: its pieces, their sizes, what they cost, and
what padding would waste.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...compilation.explain import PieceRow, Stretch, picture, piece_rows, stretches
from ...compilation.passes.manager import PassConfig
from ...compilation.piece_store import PiecesReport, weight_bytes
from ...compilation.piecewise import PiecewiseForward
from ...compilation.sizes import SizesOption, choose_sizes, padding_share, parse_sizes
from ..config import EngineConfig
from ..executor.model_runner import ModelRunner
from ..loader.resolve import resolve_model_path
from ..progress import progress_bar
from ..tokenizer.tokenizer import load_tokenizer
from .compile_pieces import make_pieces, piece_maker

_COMPARED = (4, 8, 16, 32)
"""K of the auto:K lists that are shown beside the default one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """One size of a phase. `seconds`: what capturing it took; `failed`: why there is no graph of
    it.
    """

    phase: str
    size: int
    seconds: float | None
    failed: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingRow:
    """What a list of sizes costs. `share`: padding in all tokens that are computed; `longer`: share
    of steps above the largest size.
    """

    name: str
    sizes: list[int]
    share: float
    longer: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Numbers of tokens of steps: how often each came, and where that is known from."""

    source: str
    counts: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """All that `piecework explain` tells. Seconds and bytes; `split_ops`: how often the forward is
    cut at each; `passes`: how often each pass matched the traced forward.
    """

    model_path: str
    architecture: str
    dtype: str
    device: str
    compiler: str
    trace_seconds: float
    load_seconds: float
    pieces: list[PieceRow]
    stretches: list[Stretch]
    split_ops: dict[str, int]
    passes: dict[str, int]
    weight_bytes: int
    captures: list[Capture]
    num_graphs: int
    graph_bytes: int
    pads: bool
    lengths: Lengths | None
    padding: list[PaddingRow]
    svg: str

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self) | {"stretches": [stretch._asdict() for stretch in self.stretches]}
        del fields["svg"]
        return fields


def explain(config: EngineConfig, lengths: Lengths | None = None) -> Explanation:
    """Load the model, cut its forward, compile or load its pieces, and capture the sizes that a
    server would capture.

    `lengths`: of prompts, each computed by itself; None: those of the steps that servers of this
    model have had on this machine. Raises `ValueError` with a remedy, and `TraceError` where the
    model cannot run in pieces.
    """
    runner = ModelRunner(_in_pieces(config))
    forward, report, compiler = _make_pieces(runner)
    captures = _capture(runner, forward)
    if lengths is None and runner.seen_lengths.counts:
        lengths = Lengths(
            source="the steps that servers of this model have had on this machine",
            counts=dict(runner.seen_lengths.counts),
        )
    info = runner.info()
    return Explanation(
        model_path=config.model_path,
        architecture=info.architecture,
        dtype=info.dtype,
        device=info.device,
        compiler=compiler,
        trace_seconds=report.trace_seconds,
        load_seconds=report.load_seconds,
        pieces=piece_rows(forward.plan, report),
        stretches=stretches(forward.plan),
        split_ops=dict(Counter(step.op for step in forward.plan.steps if step.op is not None)),
        passes=forward.plan.passes,
        weight_bytes=info.weight_bytes,
        captures=captures,
        num_graphs=info.graphs.num_graphs,
        graph_bytes=info.graphs.graph_bytes,
        pads=runner.platform.padding_limit > 1.0,
        lengths=lengths,
        padding=[] if lengths is None else padding_rows(runner.config, lengths.counts),
        svg=picture(forward.plan),
    )


def lengths_of_file(path: str) -> Lengths:
    """A JSON object of lengths and counts, as the server keeps it, or lengths one after another.
    Raises `ValueError`.
    """
    try:
        text = Path(path).read_text()
        counts = (
            Counter({int(length): int(count) for length, count in json.loads(text).items()})
            if text.lstrip().startswith("{")
            else None
        )
        if counts is None:
            counts = Counter(int(word) for word in text.replace(",", " ").split())
    except OSError as error:
        raise ValueError(f"--lengths {path}: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError):
        raise ValueError(
            f"--lengths {path}: whole numbers are needed, or a JSON object of lengths and counts"
        ) from None
    if not counts or min(counts) < 1 or min(counts.values()) < 1:
        raise ValueError(f"--lengths {path}: numbers of at least 1 are needed")
    return Lengths(source=path, counts=dict(counts))


def lengths_of_prompts(config: EngineConfig, name: str, prompts: Sequence[str]) -> Lengths:
    """The prompts' numbers of tokens, by the model's tokenizer. Raises `ValueError`."""
    tokenizer = load_tokenizer(resolve_model_path(config.model_path), config.tokenizer_path)
    counts = Counter(len(tokenizer.encode(prompt)) for prompt in prompts)
    return Lengths(source=f"{len(prompts)} prompts of {name}", counts=dict(counts))


def padding_rows(config: EngineConfig, lengths: Mapping[int, int]) -> list[PaddingRow]:
    """The list that `config` asks for, the default one, and some of the best, on steps cut into
    chunks as the scheduler does it.
    """
    chunk = config.chunked_prefill_size
    assert chunk is not None
    cap = min(chunk, config.piecewise_cuda_graph_max_tokens or chunk)
    steps = _chunked(lengths, chunk)
    options = {
        "default": SizesOption(),
        **{f"auto:{count}": SizesOption(auto=count) for count in _COMPARED},
    }
    if config.piecewise_cuda_graph_tokens is not None:
        options = {
            config.piecewise_cuda_graph_tokens: parse_sizes(config.piecewise_cuda_graph_tokens)
        } | options
    return [
        _padding_row(name, choose_sizes(option, cap, steps), steps)
        for name, option in options.items()
    ]


def _padding_row(name: str, sizes: list[int], steps: Mapping[int, int]) -> PaddingRow:
    longer = sum(count for length, count in steps.items() if not sizes or length > sizes[-1])
    return PaddingRow(
        name=name,
        sizes=sizes,
        share=padding_share(sizes, steps),
        longer=longer / sum(steps.values()),
    )


def _chunked(lengths: Mapping[int, int], chunk: int) -> Counter[int]:
    steps = Counter[int]()
    for length, count in lengths.items():
        whole, rest = divmod(length, chunk)
        steps[chunk] += whole * count
        steps[rest] += count
    del steps[0]
    return +steps


def _in_pieces(config: EngineConfig) -> EngineConfig:
    """The settings with pieces switched on. Raises `ValueError` where they were switched off."""
    if (
        config.disable_cuda_graph
        or config.disable_piecewise_cuda_graph
        or config.cuda_graph_backend_prefill not in (None, "piecewise")
    ):
        raise ValueError(
            "explain shows a model in pieces: leave out the flags that switch them off"
        )
    return replace(config, piecewise_cuda_graph=True)


def _make_pieces(runner: ModelRunner) -> tuple[PiecewiseForward, PiecesReport, str]:
    with progress_bar(desc="compiling pieces", unit=" pieces", leave=False) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        try:
            passes = PassConfig.choose(runner.platform, weight_bytes(runner.model))
            maker = piece_maker(runner.config, runner.platform, passes=passes, progress=progress)
        except OSError as error:
            raise ValueError(f"the compile cache cannot be used: {error}") from None
        return *make_pieces(
            maker, runner.model, runner.model_config, runner.dtype, runner.linear_kinds
        ), maker.compiler.name


def _capture(runner: ModelRunner, forward: PiecewiseForward) -> list[Capture]:
    runner.graphs.use(forward)
    total = runner.graphs.num_pending
    with progress_bar(
        shown=total > 0, desc="capturing graphs", total=total, unit=" sizes", leave=False
    ) as bar:
        while runner.graphs.capture_next():
            bar.update()
    found = {"prefill": runner.graphs.prefill, "decode": runner.graphs.decode}
    graphs = {
        phase: part.graphs
        for phase, part in found.items()
        if part is not None and part.graphs is not None
    }
    return [
        Capture(
            phase=phase,
            size=size,
            seconds=part.stats.capture_seconds.get(size),
            failed=part.stats.disabled.get(size),
        )
        for phase, part in graphs.items()
        for size in part.sizes
    ]
