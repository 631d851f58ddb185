"""Piecework and other servers on this machine, in turn: the same loads, the start and the
memory.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from .client import Client, RequestFailed, ServerUnusable, resolve
from .datasets import Question, load_gsm8k
from .quality import mean_logprob
from .report import Report
from .server_process import MIB, PORT, first_token, resident_bytes, running_server
from .serving import ServingResult, ServingSettings, measure
from .target import Target
from .workloads import Workload

_SEEDS = 1000
_MISSING = "-"


class Load(NamedTuple):
    """A workload, and the figure that compares servers in it."""

    workload: Workload
    num_prompts: int
    concurrency: int
    figure: str


def _random(tokens: int, output: int) -> Workload:
    return Workload(random_input_len=tokens, random_output_len=output)


_OUT, _IN = "output_throughput", "prompt_throughput"
LOADS = {
    "single": Load(_random(128, 128), 6, 1, _OUT),
    "batch8": Load(_random(256, 64), 32, 8, _OUT),
    "batch32": Load(_random(256, 64), 64, 32, _OUT),
    "prefill": Load(_random(1024, 1), 24, 4, _IN),
    "prefix": Load(
        Workload(
            dataset="shared-prefix", prefix_len=640, random_input_len=96, random_output_len=32
        ),
        48,
        8,
        _OUT,
    ),
    "long": Load(_random(8000, 1), 3, 1, _IN),
}
# Loads that fit the context of every model.
USUAL_LOADS = tuple(name for name in LOADS if name != "long")
CLIENTS = (1, 2, 4, 8, 16, 32, 64)  # Numbers of clients in a scaling run.


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersSettings:
    """The servers and loads."""

    # Label and command. `PORT` is replaced by a free port; without it, the port is appended.
    servers: Sequence[tuple[str, str]] = ()
    model_path: str = "smollm2-135m"
    vocab_size: int = 49152
    loads: Sequence[str] = USUAL_LOADS
    scaling: bool = False
    rounds: int = 1
    answers: int = 0  # Number of GSM8K's answers for the mean log-probability.
    data_path: str | None = None
    seed: int = 0
    markdown: str | None = None
    plot: str | None = None


@dataclass(slots=True, kw_only=True)
class Measured:
    """The figures of one server, up to its failure."""

    ready: float | None = None  # Seconds from the start to the first token.
    resident: int | None = None  # Bytes of all processes after the loads.
    logprob: float | None = None  # Also None if the server does not send it.
    results: dict[str, ServingResult] = field(default_factory=dict)
    scaling: dict[int, ServingResult] = field(default_factory=dict)
    failure: str | None = None  # Why figures are missing.


def run(settings: PeersSettings, report: Report) -> int:
    """Measure every server and report. Return 1 if a request or a server failed, else 0.

    Raises `ValueError` for an error that the user can correct, if nothing was measured.
    """
    if settings.plot is not None and not settings.scaling:
        raise ValueError("--plot shows a scaling run: give --scaling too")
    own = [sys.executable, "-m", "piecework", "serve", "--model-path", settings.model_path]
    questions = load_gsm8k(settings.data_path)[: settings.answers] if settings.answers else []
    commands = {
        "piecework": shlex.join([*own, "--port", PORT, "--log-level", "warning"]),
        **dict(settings.servers),
    }
    # Measure all servers in each round, so that a slow minute of the machine affects all of them.
    rounds: list[dict[str, Measured]] = []
    everything: list[Measured] = []
    for number in range(settings.rounds):
        rounds.append({})
        for label, command in commands.items():
            found = _measured(label, command, settings, questions, number)
            rounds[-1][label] = found
            everything.append(found)
        if all(found.ready is None for found in everything):
            raise ValueError(everything[0].failure)
    measured = {label: best_of([found[label] for found in rounds]) for label in commands}
    lines = table(measured, settings.loads, settings.answers)
    if settings.scaling:
        lines += ["", *scaling_table(measured)]
    report.print(lines)
    if settings.markdown is not None:
        Path(settings.markdown).write_text("\n".join(lines) + "\n")
    report.write(
        {
            **asdict(settings),
            "commands": commands,
            "servers": {label: _as_dict(found) for label, found in measured.items()},
        }
    )
    if settings.plot is not None:
        _plot(measured, settings.plot)
    failures = [found.failure for found in everything if found.failure is not None]
    for failure in failures:
        print(f"piecework bench peers: {failure}", file=sys.stderr)
    failed = sum(
        result.failures.total
        for found in everything
        for result in [*found.results.values(), *found.scaling.values()]
    )
    return 1 if failed or failures else 0


def best_of(rounds: Sequence[Measured]) -> Measured:
    """Return the best figure of a server's rounds for each load, the start and the memory."""
    return Measured(
        ready=min((found.ready for found in rounds if found.ready is not None), default=None),
        resident=min(
            (found.resident for found in rounds if found.resident is not None), default=None
        ),
        logprob=next((found.logprob for found in rounds if found.logprob is not None), None),
        results={
            name: max(
                (found.results[name] for found in rounds if name in found.results),
                key=lambda result: _rate(result, name),
            )
            for name in LOADS
            if any(name in found.results for found in rounds)
        },
        scaling={
            n: max(
                (found.scaling[n] for found in rounds if n in found.scaling),
                key=lambda result: float(result.as_dict()[_OUT]),
            )
            for n in CLIENTS
            if any(n in found.scaling for found in rounds)
        },
        failure=next((found.failure for found in rounds if found.failure), None),
    )


def _measured(
    label: str,
    command: str,
    settings: PeersSettings,
    questions: Sequence[Question],
    number: int,
) -> Measured:
    """Measure one server. If it fails, its figures so far are kept."""
    found = Measured()
    try:
        uvloop.run(_measure(found, label, command, settings, questions, number))
    except (ServerUnusable, RequestFailed) as error:
        found.failure = str(error) if found.ready is None else f"the server {label} failed: {error}"
    return found


async def _measure(
    found: Measured,
    label: str,
    command: str,
    settings: PeersSettings,
    questions: Sequence[Question],
    number: int,
) -> None:
    with running_server(label, command) as (process, port):
        # Some servers reset reused connections.
        target = Target(base_url=f"http://127.0.0.1:{port}", keep_alive=False)
        began = time.perf_counter()
        target = await first_token(label, target, process)
        found.ready = time.perf_counter() - began
        # Each load has its own prompts, because a server's prefix cache answers repeated ones.
        seed = _SEEDS * (settings.seed + number)
        for place, name in enumerate(LOADS):
            if name in settings.loads:
                print(f"{label}: {name}", file=sys.stderr)
                found.results[name] = await _put(LOADS[name], target, settings, seed + place)
        for clients in CLIENTS if settings.scaling else ():
            print(f"{label}: {clients} at a time", file=sys.stderr)
            load = Load(_random(128, 64), max(4, 2 * clients), clients, _OUT)
            found.scaling[clients] = await _put(load, target, settings, seed + len(LOADS) + clients)
        # Check that the server answers: a process that has just died still has memory.
        await resolve(target)
        found.resident = resident_bytes(process.pid)
        if questions:
            print(f"{label}: answers", file=sys.stderr)
            async with Client(target) as client:
                found.logprob = await mean_logprob(client, questions)


async def _put(load: Load, target: Target, settings: PeersSettings, seed: int) -> ServingResult:
    asked = ServingSettings(
        num_prompts=load.num_prompts,
        max_concurrency=load.concurrency,
        num_warmups=2,
        ignore_eos=True,
        seed=seed,
    )
    fields = asdict(load.workload) | {"vocab_size": settings.vocab_size}
    return await measure(target, asked, Workload(**fields))


def table(measured: dict[str, Measured], loads: Sequence[str], answers: int = 0) -> list[str]:
    """Return a Markdown table: a row per server, and Piecework's ratio to the best peer."""
    quality = [f"log-probability, {answers} answers"] if answers else []
    units = {_OUT: "out tok/s", _IN: "in tok/s"}
    heads = [
        "server",
        "ready",
        *(f"{name}: {units[LOADS[name].figure]}" for name in loads),
        "memory",
        *quality,
    ]
    lines = [_row(heads), _row(["---"] * len(heads))]
    for label, found in measured.items():
        told = ["" if found.logprob is None else f"{found.logprob:.4f}" for _ in quality]
        cells = [
            _cell(found.ready, "{:.1f} s"),
            *(_cell(_figure(found, name), "{:,.1f}") for name in loads),
            _cell(found.resident and found.resident / MIB, "{:,.0f} MiB"),
        ]
        lines.append(_row([label, *cells, *told]))
    own, *peers = measured.values()
    if peers:
        ratios = [
            _ratio(own.ready, [peer.ready for peer in peers], min),
            *(
                _ratio(_figure(own, name), [_figure(peer, name) for peer in peers], max)
                for name in loads
            ),
            _ratio(own.resident, [peer.resident for peer in peers], min),
        ]
        cells = [_cell(ratio, "{:.2f}x") for ratio in ratios]
        lines.append(_row(["piecework / best peer", *cells, *("" for _ in quality)]))
    return lines


def _ratio(
    own: float | None, peers: Sequence[float | None], best: Callable[[list[float]], float]
) -> float | None:
    there = [peer for peer in peers if peer]
    return own / best(there) if own is not None and there else None


def _cell(figure: float | None, form: str) -> str:
    return _MISSING if figure is None else form.format(figure)


def scaling_table(measured: dict[str, Measured]) -> list[str]:
    """Return a Markdown table: output tokens per second and median time to first token, by number
    of clients.
    """
    heads = [
        "at a time",
        *(f"{label}: {what}" for label in measured for what in ("out tok/s", "TTFT")),
    ]
    lines = [_row(heads), _row(["---"] * len(heads))]
    for clients in CLIENTS:
        cells = [str(clients)]
        for found in measured.values():
            result = found.scaling.get(clients)
            if result is None or not result.completed:
                cells += [_MISSING, _MISSING]
                continue
            figures = result.as_dict()
            cells += [f"{figures[_OUT]:,.1f}", f"{figures['ttft_ms']['median']:,.0f} ms"]
        lines.append(_row(cells))
    return lines


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _figure(found: Measured, name: str) -> float | None:
    result = found.results.get(name)
    return _rate(result, name) if result is not None and result.completed else None


def _rate(result: ServingResult, name: str) -> float:
    return float(result.as_dict()[LOADS[name].figure])


def _as_dict(found: Measured) -> dict[str, Any]:
    return {
        "ready_s": found.ready,
        "resident_bytes": found.resident,
        "mean_logprob": found.logprob,
        "failure": found.failure,
        "loads": {name: result.as_dict() for name, result in found.results.items()},
        "scaling": {str(clients): result.as_dict() for clients, result in found.scaling.items()},
    }


def _plot(measured: dict[str, Measured], path: str) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'piecework[plot]'") from None
    figure, (throughput, latency) = pyplot.subplots(1, 2, figsize=(10, 4))
    for label, found in measured.items():
        told = {n: result.as_dict() for n, result in found.scaling.items() if result.completed}
        throughput.plot(list(told), [row[_OUT] for row in told.values()], marker="o", label=label)
        waits = [row["ttft_ms"]["median"] for row in told.values()]
        latency.plot(list(told), waits, marker="o", label=label)
    for axes, title in (
        (throughput, "output tokens a second"),
        (latency, "median time to first token, ms"),
    ):
        axes.set(
            xscale="log",
            xlabel="requests at a time",
            title=title,
            ylim=(0, None),
            xticks=CLIENTS,
            xticklabels=CLIENTS,
        )
        axes.minorticks_off()
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
