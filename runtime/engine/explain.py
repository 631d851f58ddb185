"""Describes how a model's forward runs on this machine: its pieces, the captured sizes, their cost,
and the padding of lists of sizes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ...compilation.by_length import ForwardByLength
from ...compilation.piece_maker import PieceMaker
from ...compilation.piece_store import PiecesReport, PreparedForward
from ...compilation.piecewise import PiecewiseForward
from ...compilation.plan import DistinctPiece, Plan, Stretch
from ...compilation.sizes import SizesOption, choose_sizes, padding_share, parse_sizes
from ..config.engine import EngineConfig
from ..distributed.ranks import ALONE, Alone
from ..executor.model_runner import ModelRunner
from ..files.resolve import resolve_model_path
from ..graphs.compile_pieces import make_pieces
from ..graphs.lone_rank import LoneRank
from ..graphs.pieces import piece_store
from ..process.progress import progress_bar
from ..tokenizer.tokenizer import load_tokenizer

# The K of the auto:K lists that are compared with the default list.
_COMPARED = (4, 8, 16, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceRow:
    """One distinct piece.

    Attributes:
        calls: Number of calls in one forward.
        ops: The ops with their counts.
        before: The ops with their counts before the passes.
        seconds: Time to compile the piece, now or when it was stored.
        failed: Why the piece cannot be compiled and runs as traced; None if it is compiled.
    """

    number: int
    calls: int
    ops: str
    before: str
    num_inputs: int
    num_weights: int
    seconds: float
    num_bytes: int
    state: str
    failed: str | None


class ForwardRow(NamedTuple):
    """One forward.

    Attributes:
        tokens: The smallest number of tokens that this forward computes.
        adapters: Whether it adds the updates of adapters (LoRA).
        stretches: Its calls, in order.
        passes: Number of matches of each pass.
        passes_off: Why a pass did not run.
        sent_before, sent: Bytes that each rank sends per token, before and after the passes.
    """

    tokens: int
    adapters: bool
    stretches: list[Stretch]
    passes: dict[str, int]
    passes_off: dict[str, str]
    sent_before: float
    sent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """One size of a phase of steps without or with adapters (LoRA): the time of its capture, or why
    it has no graph (`failed`).
    """

    phase: str
    adapters: bool
    size: int
    seconds: float | None
    failed: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingRow:
    """The cost of a list of sizes.

    `share` is the share of padding in all computed tokens, `longer` the share of steps longer than
    the largest size.
    """

    name: str
    sizes: list[int]
    share: float
    longer: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How many steps had which number of tokens (`counts`), and the source of these counts."""

    source: str
    counts: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The output of `piecework explain`, for rank 0 of `tp_size`. Times are in seconds.

    `split_ops` counts the cuts of the forward at each op. `stretches`, `passes` and `passes_off`
    repeat those of the first of `forwards`. `pass_backends` names what computes the ops of a pass,
    for passes that have a choice.
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
    passes_off: dict[str, str]
    pass_backends: dict[str, str]
    tp_size: int
    forwards: list[ForwardRow]
    weight_bytes: int
    captures: list[Capture]
    num_graphs: int
    graph_bytes: int
    pads: bool
    lengths: Lengths | None
    padding: list[PaddingRow]

    def to_json(self) -> dict[str, Any]:
        def named(stretches: Sequence[Stretch]) -> list[dict[str, Any]]:
            return [stretch._asdict() for stretch in stretches]

        return asdict(self) | {
            "stretches": named(self.stretches),
            "forwards": [
                row._asdict() | {"stretches": named(row.stretches)} for row in self.forwards
            ],
        }


def explain(config: EngineConfig, lengths: Lengths | None = None) -> Explanation:
    """Load the model, split its forward, compile or load its pieces, and capture the sizes that a
    server would capture.

    `lengths` are those of prompts, each computed alone. If it is None, the lengths of steps that
    servers of this model have recorded on this machine are used. Raise `ValueError` with a remedy,
    or `TraceError` if the model cannot run in pieces.
    """
    if (
        config.disable_cuda_graph
        or config.disable_piecewise_cuda_graph
        or config.cuda_graph_backend_prefill not in (None, "piecewise")
    ):
        raise ValueError(
            "explain shows a model in pieces: leave out the flags that switch them off"
        )
    ranks = ALONE if config.tp_size == 1 else LoneRank(config.tp_size)
    try:
        return _explain(config, lengths, ranks)
    finally:
        ranks.close()


def _explain(config: EngineConfig, lengths: Lengths | None, ranks: Alone) -> Explanation:
    """Explain the part of the model that rank 0 of `ranks` has."""
    runner = ModelRunner(replace(config, piecewise_cuda_graph=True), ranks=ranks)
    try:
        maker = piece_store(PieceMaker, runner.config, runner.platform)
    except OSError as error:
        raise ValueError(f"the compile cache cannot be used: {error}") from None
    prepared = [
        make_pieces(
            maker,
            runner.model,
            runner.model_config,
            runner.dtype,
            runner.linear_kinds,
            ranks=config.tp_size,
            adapters=kind.adapters,
        )
        for kind in runner.graphs.kinds
    ]
    forwards: list[ForwardRow] = []
    pieces: list[PieceRow] = []
    for kind, (forward, report) in zip(runner.graphs.kinds, prepared, strict=True):
        forwards += _forward_rows(forward, len(pieces), adapters=kind.adapters is not None)
        pieces += _piece_rows(forward, report, len(pieces))
    short = prepared[0].forward.parts[0].plan
    captures = _capture(runner, prepared)
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
        compiler=maker.compiler.name,
        trace_seconds=sum(made.report.trace_seconds for made in prepared),
        load_seconds=sum(made.report.load_seconds for made in prepared),
        pieces=pieces,
        stretches=forwards[0].stretches,
        split_ops=dict(Counter(step.op for step in short.steps if step.op is not None)),
        passes=forwards[0].passes,
        passes_off=forwards[0].passes_off,
        pass_backends=_pass_backends(runner, config.tp_size),
        tp_size=config.tp_size,
        forwards=forwards,
        weight_bytes=info.weight_bytes,
        captures=captures,
        num_graphs=info.graphs.num_graphs,
        graph_bytes=info.graphs.graph_bytes,
        pads=runner.platform.padding_limit > 1.0,
        lengths=lengths,
        padding=[] if lengths is None else padding_rows(runner.config, lengths.counts),
    )


def _pass_backends(runner: ModelRunner, ranks: int) -> dict[str, str]:
    if ranks == 1:
        return {}
    obstacle = runner.platform.allreduce_norm_obstacle(ranks)
    backend = runner.platform.allreduce_norm_backend
    separate = f"separate kernels, because {obstacle}"
    return {"allreduce_norm": backend if obstacle is None else separate}


def _forward_rows(
    forward: PiecewiseForward | ForwardByLength, number: int, *, adapters: bool
) -> list[ForwardRow]:
    """Describe a forward for short and long steps. `number` is that of its first piece."""

    def row(plan: Plan, tokens: int, first: int = number) -> ForwardRow:
        stretches = [
            stretch if stretch.piece is None else stretch._replace(piece=first + stretch.piece)
            for stretch in plan.stretches()
        ]
        return ForwardRow(tokens, adapters, stretches, plan.passes, plan.passes_off, *plan.sent)

    if isinstance(forward, PiecewiseForward):
        return [row(forward.plan, 1)]
    short, long = forward.short.plan, forward.long.plan
    return [row(short, 1), row(long, forward.tokens, number + len(short.pieces))]


def _piece_rows(
    forward: PiecewiseForward | ForwardByLength, report: PiecesReport, offset: int
) -> list[PieceRow]:
    rows: list[PieceRow] = []
    for part in forward.parts:
        first, calls = len(rows), part.plan.calls()
        rows += [
            _piece_row(piece, calls[number], report, first + number, offset)
            for number, piece in enumerate(part.plan.pieces)
        ]
    return rows


def _piece_row(
    piece: DistinctPiece, calls: int, report: PiecesReport, number: int, offset: int
) -> PieceRow:
    """Describe a piece by its `number` in the report, to which `offset` is added."""
    weights = sum(spec.weight for spec in piece.inputs)
    if number in report.failed:
        state = "as traced"
    else:
        state = "from the cache" if number in report.loaded else "compiled"
    return PieceRow(
        number=offset + number,
        calls=calls,
        ops=_counted(piece.ops),
        before=_counted(piece.before),
        num_inputs=len(piece.inputs) - weights,
        num_weights=weights,
        seconds=report.compile_seconds.get(number, report.loaded.get(number, 0.0)),
        num_bytes=report.num_bytes.get(number, 0),
        state=state,
        failed=report.failed.get(number),
    )


def _counted(ops: Sequence[str]) -> str:
    counts = Counter(ops).items()
    return ", ".join(name if count == 1 else f"{name} x {count}" for name, count in counts)


def lengths_of_file(path: str) -> Lengths:
    """Read lengths from a file: a JSON object of lengths and counts, as the server stores it, or
    numbers separated by spaces or commas. Raise `ValueError` if it is neither.
    """
    try:
        text = Path(path).read_text()
        if text.lstrip().startswith("{"):
            counts = Counter({int(length): int(n) for length, n in json.loads(text).items()})
        else:
            counts = Counter(int(word) for word in text.replace(",", " ").split())
    except OSError as error:
        raise ValueError(f"--lengths {path}: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError):
        raise ValueError(
            f"--lengths {path}: write whole numbers, or a JSON object of lengths and counts"
        ) from None
    if not counts or min(counts) < 1 or min(counts.values()) < 1:
        raise ValueError(f"--lengths {path}: lengths and counts must be at least 1")
    return Lengths(source=path, counts=dict(counts))


def lengths_of_prompts(config: EngineConfig, name: str, prompts: Sequence[str]) -> Lengths:
    """Count the tokens of prompts. Raise `ValueError` if the tokenizer cannot be loaded."""
    tokenizer = load_tokenizer(
        resolve_model_path(config.model_path),
        config.tokenizer_path,
        gguf_pre_tokenizer=config.gguf_pre_tokenizer,
    )
    counts = Counter(len(tokenizer.encode(prompt)) for prompt in prompts)
    return Lengths(source=f"{len(prompts)} prompts of {name}", counts=dict(counts))


def padding_rows(config: EngineConfig, lengths: Mapping[int, int]) -> list[PaddingRow]:
    """Compare lists of sizes: that of `config`, the default, and some auto:K lists.

    Prompts are split into chunks as the scheduler does it.
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
    total = sum(steps.values())
    rows = []
    for name, option in options.items():
        sizes = choose_sizes(option, cap, steps)
        longer = sum(count for length, count in steps.items() if not sizes or length > sizes[-1])
        share = padding_share(sizes, steps)
        rows.append(PaddingRow(name=name, sizes=sizes, share=share, longer=longer / total))
    return rows


def _chunked(lengths: Mapping[int, int], chunk: int) -> Counter[int]:
    steps = Counter[int]()
    for length, count in lengths.items():
        whole, rest = divmod(length, chunk)
        steps[chunk] += whole * count
        steps[rest] += count
    del steps[0]
    return +steps


def _capture(runner: ModelRunner, prepared: Sequence[PreparedForward]) -> list[Capture]:
    runner.graphs.use(*(made.forward for made in prepared))
    total = runner.graphs.num_pending
    with progress_bar(
        shown=total > 0, desc="capturing graphs", total=total, unit=" sizes", leave=False
    ) as bar:
        while runner.graphs.capture_next():
            bar.update()
    return [
        Capture(
            phase=phase,
            adapters=kind.adapters is not None,
            size=size,
            seconds=part.graphs.stats.capture_seconds.get(size),
            failed=part.graphs.stats.disabled.get(size),
        )
        for kind in runner.graphs.kinds
        for phase, part in (("prefill", kind.prefill), ("decode", kind.decode))
        if part is not None and part.graphs is not None
        for size in part.graphs.sizes
    ]
