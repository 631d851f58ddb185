"""Measures what compiling a diffusion transformer costs and gives: `python -m
piecework.lab.diffusion_compile`.

For each number of blocks, a Wan-shaped pipeline with random weights runs eagerly, compiled whole,
and compiled by its repeated blocks. A cold first step is taken in a process of its own with an
empty cache; steady steps are taken in turn in one process, the least of many.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..runtime.core.image_params import DiffusionParams
from ..runtime.diffusion.clock import Clock
from ..runtime.diffusion.config import DiffusionConfig
from ..runtime.diffusion.model import DiffusionModel

MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "full": {"enable_torch_compile": True},
    "regional": {"enable_torch_compile": True, "regional_compile": True},
}
TOTAL_STEPS = 20
"""The last column: the cold first step and this many in all."""


class Prepared:
    """A loaded pipeline and a state whose first step can be taken again and again."""

    def __init__(self, folder: str, mode: str, side: int, frames: int) -> None:
        self.model = DiffusionModel(
            DiffusionConfig(model_path=folder, num_threads=1, **MODES[mode])
        )
        asked = DiffusionParams(
            prompt="a red fox",
            width=side,
            height=side,
            num_frames=frames,
            num_inference_steps=TOTAL_STEPS,
            guidance_scale=1.0,
        )
        clock = Clock(self.model.platform)
        self.state = self.model.validate(asked, clock)
        self.model.prepare(self.state, clock)

    def step(self) -> float:
        """Seconds of one forward of the transformer, and of what surrounds it in a step."""
        import torch

        start = time.perf_counter()
        with torch.no_grad():
            self.model.predict([self.state])
        self.model.platform.synchronize()
        return time.perf_counter() - start


def measure_cold(folder: str, mode: str, side: int, frames: int) -> dict[str, Any]:
    prepared = Prepared(folder, mode, side, frames)
    first = prepared.step()
    compiled = prepared.model.compiled
    return {"first": first, "report": None if compiled is None else compiled.report()}


def measure_steady(folder: str, side: int, frames: int, rounds: int) -> dict[str, float]:
    prepared = {mode: Prepared(folder, mode, side, frames) for mode in MODES}
    steps: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(rounds + 1):
        for mode, each in prepared.items():
            seconds = each.step()
            if number:
                steps[mode].append(seconds)
    return {mode: min(taken) for mode, taken in steps.items()}


def measure(blocks: int, arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """One row for each mode."""
    pipeline = str(folder / f"wan-{blocks}")
    size = [
        "--blocks",
        str(blocks),
        "--heads",
        str(arguments.heads),
        "--head-dim",
        str(arguments.head_dim),
    ]
    subprocess.run(
        [sys.executable, "-m", "piecework.lab.diffusion_tiny", "wan", pipeline, *size],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    shape = [str(arguments.side), str(arguments.frames)]
    cache = str(folder / f"cache-{blocks}")
    # Each mode's cold step finds nothing of the others': their graphs differ, and eager builds
    # none.
    cold = {
        mode: _in_a_process(["cold", pipeline, mode, *shape], f"{cache}-{mode}") for mode in MODES
    }
    # What takes longest to compile is found again here.
    steady = _in_a_process(["steady", pipeline, *shape, str(arguments.rounds)], f"{cache}-full")
    return [
        {
            "blocks": blocks,
            "mode": mode,
            "first_s": cold[mode]["first"],
            "step_ms": steady[mode] * 1000,
            "total_s": cold[mode]["first"] + (TOTAL_STEPS - 1) * steady[mode],
            "compile": cold[mode]["report"],
        }
        for mode in MODES
    ]


def _in_a_process(job: Sequence[str], cache: str) -> Any:
    environment = {
        name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"
    } | {"PIECEWORK_CACHE_DIR": cache}
    done = subprocess.run(
        [sys.executable, "-m", "piecework.lab.diffusion_compile", "--job", json.dumps(list(job))],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def _run_job(job: Sequence[str]) -> dict[str, Any]:
    match list(job):
        case ["cold", folder, mode, side, frames]:
            return measure_cold(folder, mode, int(side), int(frames))
        case ["steady", folder, side, frames, rounds]:
            return dict(measure_steady(folder, int(side), int(frames), int(rounds)))
    raise ValueError(f"no such job: {job}")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| blocks | compiled | cold first step | steady step | 20 steps, cold |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['blocks']} | {row['mode']} | {row['first_s']:.2f} s | {row['step_ms']:.1f} ms | "
        f"{row['total_s']:.2f} s |"
        for row in rows
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.diffusion_compile", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--blocks", default="12,24,40", metavar="LIST", help="numbers of blocks; default: 12,24,40"
    )
    for name, default, text in (
        ("heads", 8, "attention heads"),
        ("head-dim", 32, "dimensions of a head"),
        ("side", 192, "width and height in pixels"),
        ("frames", 5, "frames"),
        ("rounds", 20, "steady steps of each mode"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{text}; default: {default}"
        )
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.job:
        print(json.dumps(_run_job(json.loads(arguments.job))))
        return 0
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for blocks in arguments.blocks.split(","):
            rows += measure(int(blocks), arguments, Path(folder))
            print(table(rows[-len(MODES) :]), flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
