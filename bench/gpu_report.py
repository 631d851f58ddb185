"""The GPU suite's report in Markdown: figures with their floors, and failures with their
reasons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .gpu_goals import goals

_MIB = 2**20


def markdown(report: Mapping[str, Any]) -> str:
    """Return the page of one run."""
    about, parts = report["about"], report["parts"]
    results = {
        name: part["result"] for name, part in parts.items() if part["ok"] and "result" in part
    }
    title = f"# {about['device']}, {about['date']}"
    software = ", ".join(
        f"{name} {about[name]}"
        for name in ("python", "torch", "cuda", "triton", "piecework")
        if about[name]
    )
    took = f" {about['seconds']:.0f} s in all." if "seconds" in about else ""
    lines = [title, "", f"{software}. Shapes: {about['scale']}.{took}", ""]
    lines += _goals(results) if about["scale"] == "full" else []
    lines += _overview(parts)
    lines += _floors(results)
    lines += _checks(parts)
    lines += _sizes(results, "prefill", "tokens", "flops", "matmul_flops_per_second", "matrix rate")
    lines += _sizes(results, "decode", "batch", "bytes", "copy_bytes_per_second", "copy rate")
    lines += _attention(results)
    lines += _ops(results)
    lines += _quantized(results)
    lines += _load(results)
    lines += _startup(results)
    lines += _diffusion(results)
    if "hardware_tests" in parts:
        lines += [
            "## Tests on hardware",
            "",
            parts["hardware_tests"].get("result", {}).get("summary", "not run"),
            "",
        ]
    return "\n".join([*lines, *_warnings(parts), *_errors(parts)]).rstrip()


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    return [
        "| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows)
    ] + [""]


def _diffusion(results: Mapping[str, Any]) -> list[str]:
    """Return the table of diffusion. The first step includes compilation."""
    rows = [
        [
            name.removeprefix("diffusion_"),
            f"{row['first_ms'] / 1e3:.2f}",
            f"{row['step_ms']:.1f}",
            f"{row['total_ms'] / 1e3:.2f}",
        ]
        for name, row in results.items()
        if name.startswith("diffusion_")
    ]
    head = ["transformer of FLUX.1", "first step (s)", "step (ms)", "20 steps (s)"]
    return ["## Diffusion", "", *_table(head, rows)] if rows else []


def outcome(part: Mapping[str, Any]) -> str:
    """Describe the outcome of a part."""
    if "left_out" in part:
        return f"left out: {part['left_out']}"
    return "done" if part["ok"] else "FAILED"


def _goals(results: Mapping[str, Any]) -> list[str]:
    rows = [goal.cells() for goal in goals(results)]
    return ["## Goals", "", *_table(["figure", "goal", "measured", "met"], rows)] if rows else []


def _overview(parts: Mapping[str, Any]) -> list[str]:
    rows = [
        [name, outcome(part) if part["ok"] else f"**{outcome(part)}**", f"{part['seconds']:.0f}"]
        for name, part in parts.items()
    ]
    return ["## Parts", "", *_table(["part", "outcome", "seconds"], rows)]


def _floors(results: Mapping[str, Any]) -> list[str]:
    if "floors" not in results:
        return []
    copy, matmul = (
        results["floors"]["copy_bytes_per_second"],
        results["floors"]["matmul_flops_per_second"],
    )
    return [
        "## Floors",
        "",
        f"A copy moves {copy / 1e12:.3g} TB/s, read and written; a bfloat16 matrix product does "
        f"{matmul / 1e12:.3g} TFLOP/s.",
        "",
    ]


def _checks(parts: Mapping[str, Any]) -> list[str]:
    results = [part.get("result", {}) for part in parts.values()]
    checks = [check for result in results for check in result.get("checks", ())]
    if not checks:
        return []
    wrong = [check for check in checks if not check["ok"]]
    lines = ["## Correctness", "", f"{len(checks) - len(wrong)} of {len(checks)} checks hold.", ""]
    return lines + (
        _table(["failed check", "what"], [[check["name"], check["detail"]] for check in wrong])
        if wrong
        else []
    )


def _sizes(
    results: Mapping[str, Any], phase: str, size: str, cost: str, floor: str, floor_name: str
) -> list[str]:
    """Return milliseconds by size and mode, the gain over no graphs, and the share of the floor."""
    modes = {
        name.removeprefix(f"{phase}_"): result
        for name, result in results.items()
        if name.startswith(f"{phase}_")
    }
    if not modes:
        return []
    sizes = [row[size] for row in next(iter(modes.values()))["rows"]]
    times = {mode: {row[size]: row for row in result["rows"]} for mode, result in modes.items()}
    rate = results.get("floors", {}).get(floor)
    rows = []
    for number in sizes:
        off = times.get("off", {}).get(number)
        cells: list[object] = [number]
        for by_size in times.values():
            row = by_size[number]
            cells.append(
                f"{row['ms']:.3f}{_speed_up(row, off)}{_share(row, cost, rate)}{_mark(row, off)}"
            )
        rows.append(cells)
    note = (
        f"Milliseconds (times as fast as without graphs; share of the measured {floor_name}). "
        "*: no graph ran this size."
    )
    graphs = [
        [
            mode,
            result["distinct_pieces"],
            result["graphs"],
            f"{result['graph_bytes'] / _MIB:.0f}",
            f"{result['capture_seconds']:.1f}",
            _failed_sizes(result),
        ]
        for mode, result in modes.items()
        if result["graphs"] or result["failed_sizes"]
    ]
    head = ["mode", "distinct pieces", "graphs", "MiB"]
    return [
        f"## {phase.capitalize()}", "", note, "", *_table([size, *times], rows),
        *(_table([*head, "capture, s", "sizes that failed"], graphs) if graphs else []),
    ]  # fmt: skip


def _failed_sizes(result: Mapping[str, Any]) -> str:
    return (
        ", ".join(f"{size}: {reason}" for size, reason in result["failed_sizes"].items()) or "none"
    )


def _speed_up(row: Mapping[str, Any], off: Mapping[str, Any] | None) -> str:
    return f" ({off['ms'] / row['ms']:.2f}x)" if off is not None and off is not row else ""


def _share(row: Mapping[str, Any], cost: str, rate: float | None) -> str:
    return f" {row[cost] / rate / row['ms'] * 1e5:.0f}%" if rate else ""


def _mark(row: Mapping[str, Any], off: Mapping[str, Any] | None) -> str:
    return "" if row["replayed"] or row is off else " *"


def _attention(results: Mapping[str, Any]) -> list[str]:
    """Return milliseconds of one layer, with a column per backend."""
    if "attention" not in results:
        return []
    measured = results["attention"]
    backends = list(dict.fromkeys(name for row in measured["rows"].values() for name in row))
    rows = [
        [step, *(f"{row[name]:.3f}" if name in row else "" for name in backends)]
        for step, row in measured["rows"].items()
    ]
    errors = [f"- {what}: {error}" for what, error in measured["errors"].items()]
    return [
        "## Attention of one layer (ms)",
        "",
        *_table(["step", *backends], rows),
        *errors,
        *[""] * bool(errors),
    ]


def _ops(results: Mapping[str, Any]) -> list[str]:
    """Return microseconds of one call, with a column per version."""
    if "ops" not in results:
        return []
    measured, rate = results["ops"], results.get("floors", {}).get("copy_bytes_per_second")
    versions = list(dict.fromkeys(name for row in measured["rows"] for name in row["microseconds"]))
    rows = []
    for row in measured["rows"]:
        cells = {
            name: f"{time:.2f}" + (f" {row['bytes'] / rate / time * 1e8:.0f}%" if rate else "")
            for name, time in row["microseconds"].items()
        }
        rows.append([row["op"], row["tokens"], *(cells.get(name, "") for name in versions)])
    note = (
        "Microseconds of one call among many (share of the measured copy rate; small tensors "
        "stay in the cache, which is faster)."
    )
    errors = [f"- {what}: {error}" for what, error in measured["errors"].items()]
    return [
        "## Ops between matrix products",
        "",
        note,
        "",
        *_table(["op", "tokens", *versions], rows),
        *errors,
        *[""] * bool(errors),
    ]


def _quantized(results: Mapping[str, Any]) -> list[str]:
    """Return microseconds of products, with a column per version, and of fused ops."""
    if "quantized" not in results:
        return []
    measured, rate = results["quantized"], results.get("floors", {}).get("copy_bytes_per_second")
    versions = list(dict.fromkeys(name for row in measured["products"] for name in row["times"]))
    rows = []
    for row in measured["products"]:
        cells = {
            name: f"{time:.2f} ({row['plain'] / time:.2f}x)"
            + (f" {row['bytes'] / rate / time * 1e6:.0%}" if rate else "")
            for name, time in row["times"].items()
        }
        about = [row["layer"], row["tokens"], row["kind"]]
        rows.append([*about, *(cells.get(name, "") for name in versions)])
    fused = [
        [row["what"], row["tokens"], f"{row['fused']:.2f}", f"{row['apart']:.2f}",
         f"{row['apart'] / row['fused']:.2f}x"]
        for row in measured["fusions"]
    ]  # fmt: skip
    note = (
        "Microseconds of one call among many (times as fast as 16 bits; share of the measured copy "
        "rate that reading the weight takes)."
    )
    return [
        "## Quantised products",
        "",
        note,
        "",
        *_table(["layer", "tokens", "numbers", *versions], rows),
        "## Fused ops (us)",
        "",
        *_table(["op", "tokens", "fused", "apart", "gain"], fused),
        *(f"- {what}: {error}" for what, error in measured["errors"].items()),
        *[""] * bool(measured["errors"]),
    ]


_PEERS = {"transformers": "transformers' continuous batching", "vllm": "vLLM"}


def _load(results: Mapping[str, Any]) -> list[str]:
    loads = {
        name.removeprefix("load_"): result
        for name, result in results.items()
        if name.startswith("load_")
    }
    if not loads:
        return []
    head = [
        "mode",
        "requests/s",
        "output tokens/s",
        "steps",
        "replays",
        "overlapped",
        "prompt cached",
    ]
    lines = [
        "## Load in the shape of GSM8K",
        "",
        *_table(head, [[mode, *_load_row(result)] for mode, result in loads.items()]),
    ]
    for mode in _PEERS:
        lines += [_peer_note(loads[mode]), ""] if mode in loads else []
    own = next((mode for mode in ("graphs", "no_overlap", "off") if mode in loads), None)
    others = {
        "off": "Piecework without graphs",
        "no_overlap": "Piecework with steps that do not overlap",
    } | _PEERS
    if own == "graphs" and not loads[own]["overlapped_steps"]:
        del others["no_overlap"]
    for mode, what in others.items():
        if own and mode in loads and mode != own:
            gain = loads[own]["output_tokens_per_second"] / loads[mode]["output_tokens_per_second"]
            lines += [f"Output tokens/s of `{own}`: {gain:.2f}x of {what}.", ""]
    return lines


def _load_row(result: Mapping[str, Any]) -> list[object]:
    """Return the row of a load.

    Peers lack some of the engine's figures. If a load was stopped before a request finished, there
    is no rate of requests.
    """
    share = result.get("cached_share")
    return [
        f"{result['requests_per_second']:.2f}" if result["requests_per_second"] else "",
        f"{result['output_tokens_per_second']:.0f}",
        *(result.get(name, "") for name in ("steps", "replays", "overlapped_steps")),
        "" if share is None else f"{share:.0%}",
    ]


def _peer_note(result: Mapping[str, Any]) -> str:
    """Describe the settings of a peer, and the share of the load that it finished."""
    chosen = [f"attention {result['attention']}"] if "attention" in result else []
    chosen += [f"{name}: {'yes' if on else 'no'}" for name, on in result["settings"].items()]
    note = ", ".join([result["peer"], *chosen]) + "."
    if result["finished"] == result["requests"]:
        return note
    return (
        f"{note} Cut short after {result['seconds']:.0f} s, when {result['finished']} of "
        f"{result['requests']} requests were finished: "
        "the rate of tokens is of all that came until then."
    )


def _startup(results: Mapping[str, Any]) -> list[str]:
    starts = {
        name.removeprefix("startup_"): result
        for name, result in results.items()
        if name.startswith("startup_")
    }
    if not starts:
        return []
    head = [
        "compile cache",
        "ready, s",
        "all graphs, s",
        "phases, s",
        "sizes (prefill + decode)",
        "graphs",
        "MiB",
    ]
    head += ["KV tokens", "free, GiB", "sizes that failed"]
    rows = [
        [
            mode, f"{r['ready_seconds']:.1f}", f"{r['all_graphs_seconds']:.1f}",
            ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in r["phases"].items()),
            f"{r['prefill_sizes']} + {r['decode_sizes']}", r["graphs"],
            f"{r['graph_bytes'] / _MIB:.0f}",
            r["kv_tokens"], f"{r['memory']['free'] / 2**30:.1f}", _failed_sizes(r),
        ]
        for mode, r in starts.items()
    ]  # fmt: skip
    return ["## Start-up", "", *_table(head, rows)]


def _warnings(parts: Mapping[str, Any]) -> list[str]:
    """Return the engines' warnings, for example a size without its graph."""
    lines = [
        f"- {name}: {line}" for name, part in parts.items() for line in part.get("warnings", [])
    ]
    return ["## Warnings", "", *lines, ""] if lines else []


def _errors(parts: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, part in parts.items():
        if "error" in part:
            lines += [f"## {name} failed", "", "```", part["error"].strip(), "```", ""]
    return lines
