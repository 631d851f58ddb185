"""The duration of a run: SGLang's performance report, and a table for the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .clock import Clock, Stage

_MIB = 2**20


def performance_report(
    clock: Clock, total_ms: float, meta: Mapping[str, Any], *, request_id: str
) -> dict[str, Any]:
    """Return the members of SGLang's `--perf-dump-path`, for tools that read such files. Durations
    are in ms, memory in MiB.
    """
    memory = {
        f"after_{stage}": {
            "allocated_mb": use.allocated / _MIB,
            "peak_allocated_mb": use.peak_allocated / _MIB,
            "reserved_mb": use.reserved / _MIB,
            "peak_reserved_mb": use.peak_reserved / _MIB,
        }
        for stage, use in clock.memory.items()
    }
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "request_id": request_id,
        "commit_hash": "N/A",
        "tag": "piecework",
        "total_duration_ms": total_ms,
        "steps": [
            {"name": str(stage), "duration_ms": duration}
            for stage, duration in clock.stages.items()
        ],
        "denoise_steps_ms": [
            {"step": step, "duration_ms": duration} for step, duration in enumerate(clock.steps)
        ],
        "memory_checkpoints": memory,
        "meta": dict(meta),
    }


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Write the report. Raise `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")


def table(clock: Clock, total_ms: float) -> str:
    """Return a table of the seconds of each stage, and of a step."""
    names = {
        Stage.INPUT_VALIDATION: "input validation",
        Stage.TEXT_ENCODING: "text encoding",
        Stage.LATENT_PREPARATION: "latent preparation",
        Stage.TIMESTEP_PREPARATION: "timestep preparation",
        Stage.DENOISING: "denoising",
        Stage.DECODING: "decoding",
    }
    rows = [
        f"  {names[stage]:<21} {duration / 1000:9.3f} "
        f"s{_steps(clock) if stage is Stage.DENOISING else ''}"
        for stage, duration in clock.stages.items()
    ]
    return "\n".join([*rows, f"  {'total':<21} {total_ms / 1000:9.3f} s"])


def _steps(clock: Clock) -> str:
    if not clock.steps:
        return ""
    rest = clock.steps[1:] or clock.steps
    return (
        f"   {len(clock.steps)} steps, the first {clock.steps[0]:,.1f} ms, then "
        f"{sum(rest) / len(rest):,.1f} ms a step"
    )
