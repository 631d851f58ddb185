"""One command that proves and measures the GPU path: `python -m piecework.bench.gpu_suite`; needs torch and Triton, no web stack.

Each part runs in a process of its own, so one that fails, even with a broken device, is reported and the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform as host
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import __version__
from .gpu_report import markdown, outcome

_RESULTS = Path(__file__).parent / "results"
_TESTS = Path(__file__).parents[1] / "tests"
_BUDGET_SECONDS = 520.0
_PART_SECONDS = 160.0
_ERROR_CHARACTERS = 1500
_HARDWARE_TESTS = "hardware_tests"
"""The part that is no measurement: the tests that are marked `gpu`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 where every part that was asked for is well, done or left out, else 1."""
    arguments = _parser().parse_args(argv)
    if arguments.result is not None:
        return _run_part(arguments)
    names = arguments.parts.split(",") if arguments.parts else _all_parts(arguments)
    unknown = sorted(set(names) - {*_part_names(), _HARDWARE_TESTS})
    if unknown:
        print(f"--parts: there is no {', '.join(unknown)}; choose from {', '.join([*_part_names(), _HARDWARE_TESTS])}", file=sys.stderr)
        return 2
    report = _run_suite(names, arguments)
    print(markdown(report))
    return 0 if all(part["ok"] for part in report["parts"].values()) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m piecework.bench.gpu_suite", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="what is measured; default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="shapes so small that a CPU is through in seconds: shows that the suite works")
    parser.add_argument("--parts", metavar="LIST", help="only these parts, in this order; default: all")
    parser.add_argument(
        "--output", type=Path, default=_RESULTS, metavar="FOLDER", help="where JSON and Markdown go; default: bench/results"
    )
    parser.add_argument(
        "--budget", type=float, default=_BUDGET_SECONDS, metavar="SECONDS", help="no part runs longer; default: %(default)s"
    )
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=_PART_SECONDS, help=argparse.SUPPRESS)
    return parser


def _part_names() -> list[str]:
    from .gpu_parts import PARTS

    return list(PARTS)


def _all_parts(arguments: argparse.Namespace) -> list[str]:
    return _part_names() if arguments.tiny or not _TESTS.is_dir() else [*_part_names(), _HARDWARE_TESTS]


def _run_suite(names: Sequence[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Every part, one after another; what is there is written after each, should the whole be cut short."""
    began = time.monotonic()
    report: dict[str, Any] = {"about": _about(arguments), "parts": {}}
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="piecework-suite-") as folder:
        for name in names:
            left = arguments.budget - (time.monotonic() - began)
            part = _in_process(name, arguments, Path(folder), min(left, _PART_SECONDS)) if left > 0 else _failed("no time was left", 0.0)
            report["parts"][name] = part
            print(f"{name}: {outcome(part)} ({part['seconds']:.0f} s)", file=sys.stderr, flush=True)
            report["about"]["seconds"] = time.monotonic() - began
            _write(report, arguments.output)
    return report


def _in_process(name: str, arguments: argparse.Namespace, folder: Path, seconds: float) -> dict[str, Any]:
    """One part in a process of its own, which is ended with all that it has started when its time is up."""
    result, began = folder / f"{name}.json", time.monotonic()
    log = folder / f"{name}.log"
    # The first of the starts must find nothing that another part has compiled.
    caches = folder / ("startup" if name.startswith("startup") else "others")
    environment = {**os.environ, "PIECEWORK_CACHE_DIR": str(caches / "pieces"), "TRITON_CACHE_DIR": str(caches / "kernels")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            _command(name, arguments, result, seconds),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=seconds)
            what = f"exit code {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code, what = -1, f"not done within {seconds:.0f} s"
    took, tail = time.monotonic() - began, log.read_text(errors="replace")[-_ERROR_CHARACTERS:]
    if name == _HARDWARE_TESTS:
        return {"ok": code == 0, "seconds": took, "result": {"summary": tail.strip().rpartition("\n")[2]}} | (
            {} if code == 0 else {"error": tail}
        )
    if code != 0 or not result.exists():
        return _failed(f"{what}\n{tail}", took)
    measured = json.loads(result.read_text())
    if "left_out" in measured:
        return {"ok": True, "seconds": took, "left_out": measured["left_out"]}
    return {"ok": measured.get("ok", True), "seconds": took, "result": measured}


def _command(name: str, arguments: argparse.Namespace, result: Path, seconds: float) -> list[str]:
    if name == _HARDWARE_TESTS:
        # Other tests need what a machine that only measures does not have.
        files = [str(path) for path in sorted(_TESTS.rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]
        return [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *files]
    own = ["--parts", name, "--device", arguments.device, "--result", str(result), "--seconds", str(seconds), *["--tiny"] * arguments.tiny]
    return [sys.executable, "-m", f"{__package__}.gpu_suite", *own]


def _failed(error: str, seconds: float) -> dict[str, Any]:
    return {"ok": False, "seconds": seconds, "error": error}


def _run_part(arguments: argparse.Namespace) -> int:
    """Inside the part's own process."""
    until = time.monotonic() + arguments.seconds
    from .gpu_engines import SCALES, LeftOut
    from .gpu_parts import PARTS

    scale = replace(SCALES["tiny" if arguments.tiny else "full"], until=until)
    try:
        measured = PARTS[arguments.parts](scale, arguments.result.parent / "models" / arguments.parts, arguments.device)
    except LeftOut as reason:
        measured = {"left_out": str(reason)}
    arguments.result.write_text(json.dumps(measured))
    return 0


def _about(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was measured on what."""
    import torch

    on_gpu = arguments.device == "cuda" and torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if on_gpu else f"{arguments.device} {host.machine()}",
        "scale": "tiny" if arguments.tiny else "full",
        "date": time.strftime("%Y-%m-%d"),
        "python": host.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "piecework": __version__,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _write(report: dict[str, Any], folder: Path) -> None:
    about = report["about"]
    words = re.findall(r"[a-z0-9]+", f"{about['device']} {'' if about['scale'] == 'full' else about['scale']} {about['date']}".lower())
    path = folder / "-".join(word for word in words if word != "nvidia")
    path.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(report) + "\n")


if __name__ == "__main__":
    sys.exit(main())
