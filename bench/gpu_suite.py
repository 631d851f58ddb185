"""Checks and measures the GPU path: `python -m piecework.bench.gpu_suite`. It needs torch and
Triton, but no web stack.

Each part runs in its own process. If a part fails, even with a broken device, the others go on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
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
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from ..version import __version__
from .gpu_report import markdown, outcome

_RESULTS = Path(__file__).parent / "results"
_TESTS = Path(__file__).parents[1] / "tests"
_BUDGET_SECONDS = 520.0
_PART_SECONDS = 160.0
_ERROR_CHARACTERS = 1500
_MOST_WARNINGS = 10
_POLL_SECONDS = 0.05
_HARDWARE_TESTS = "hardware_tests"  # Tests with the marks `gpu` and `on_gpu`.
# Parts that run side by side, because they measure no time. Checks do not share theirs with
# compilers that use every core.
_BESIDE = (
    ("correctness", "correctness_models", "two_ranks"),
    ("inductor_pieces", _HARDWARE_TESTS),
)
_TEST_PROCESSES = 6  # Parallel tests, if pytest-xdist is installed.


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if every requested part succeeded or was left out, else 1, or 2 for an unknown
    part or a missing GPU.
    """
    arguments = _parser().parse_args(argv)
    if arguments.result is not None:
        return _run_part(arguments)
    names = arguments.parts.split(",") if arguments.parts else _all_parts(arguments)
    unknown = sorted(set(names) - {*_part_names(), _HARDWARE_TESTS})
    if unknown:
        print(
            f"--parts: there is no {', '.join(unknown)}; choose from "
            f"{', '.join([*_part_names(), _HARDWARE_TESTS])}",
            file=sys.stderr,
        )
        return 2
    if (obstacle := _obstacle(arguments.device)) is not None:
        print(obstacle, file=sys.stderr)
        return 2
    report = _run_suite(names, arguments)
    print(markdown(report))
    return 0 if all(part["ok"] for part in report["parts"].values()) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.bench.gpu_suite", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--device",
        default="cuda",
        choices=("cuda", "cpu"),
        help="device to measure; default: %(default)s",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="small shapes that take seconds on a CPU, to check the suite",
    )
    parser.add_argument("--parts", metavar="LIST", help="parts to run, in this order; default: all")
    parser.add_argument(
        "--output",
        type=Path,
        default=_RESULTS,
        metavar="FOLDER",
        help="folder for JSON and Markdown; default: bench/results",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=_BUDGET_SECONDS,
        metavar="SECONDS",
        help="maximum seconds of the whole suite; default: %(default)s",
    )
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser


def _part_names() -> list[str]:
    from .gpu_parts import PARTS

    return list(PARTS)


def _obstacle(device: str) -> str | None:
    """Return why no part can run, or None."""
    import torch

    if device != "cuda" or torch.cuda.is_available():
        return None
    return (
        f"torch {torch.__version__} finds no NVIDIA GPU: check nvidia-smi and the driver, and "
        "install a torch that was built for CUDA"
    )


def _all_parts(arguments: argparse.Namespace) -> list[str]:
    return (
        _part_names()
        if arguments.tiny or not _TESTS.is_dir()
        else [*_part_names(), _HARDWARE_TESTS]
    )


def _run_suite(names: Sequence[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Run every part. The report is written after each part, in case the suite is interrupted."""
    until = time.monotonic() + arguments.budget
    report: dict[str, Any] = {"about": _about(arguments), "parts": {}}
    arguments.output.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="piecework-suite-") as folder,
        contextlib.ExitStack() as started,
    ):

        def start(turn: Sequence[str]) -> list[_PartProcess]:
            return [
                started.enter_context(_PartProcess(name, arguments, Path(folder))) for name in turn
            ]

        turns = _turns(names)
        coming = start(turns[0])
        for following in [*turns[1:], []]:
            running = coming
            for process in running:
                process.begin(min(until - time.monotonic(), _PART_SECONDS))
            coming = start(following)
            while running:
                for process in [one for one in running if one.is_over()]:
                    running.remove(process)
                    part = process.outcome()
                    found = report["parts"] | {process.name: part}
                    report["parts"] = {name: found[name] for name in names if name in found}
                    print(
                        f"{process.name}: {outcome(part)} ({part['seconds']:.0f} s)",
                        file=sys.stderr,
                        flush=True,
                    )
                    report["about"]["seconds"] = arguments.budget - (until - time.monotonic())
                    _write(report, arguments.output)
                time.sleep(_POLL_SECONDS)
    return report


def _turns(names: Sequence[str]) -> list[list[str]]:
    """Return the groups of parts that run at the same time.

    Parts that measure no time form groups (`_BESIDE`). Every other part runs alone.
    """
    turns: list[list[str]] = []
    for name in names:
        group = next((group for group in _BESIDE if name in group), (name,))
        turn = [other for other in names if other in group]
        if turn not in turns:
            turns.append(turn)
    return turns


class _PartProcess:
    """One part in its own process, which is killed with its children when its time is up.

    The process is started before its turn. It imports what it needs, which takes longer than many
    parts, and waits.
    """

    def __init__(self, name: str, arguments: argparse.Namespace, folder: Path) -> None:
        self.name = name
        self._result, self._log = folder / f"{name}.json", folder / f"{name}.log"
        self._seconds = self._began = 0.0
        # The first measured start must not find pieces that another part has compiled.
        caches = folder / ("startup" if name.startswith("startup") else "others")
        environment = {
            **os.environ,
            "PIECEWORK_CACHE_DIR": str(caches / "pieces"),
            "TRITON_CACHE_DIR": str(caches / "kernels"),
        }
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                _command(name, arguments, self._result),
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def begin(self, seconds: float) -> None:
        """Let the part run for `seconds`. If these are not above 0, it does not run."""
        self._began, self._seconds = time.monotonic(), seconds
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            if seconds > 0:
                stdin.write(f"{seconds}\n".encode())

    def is_over(self) -> bool:
        """Whether the part is done, or its time is up."""
        return self._process.poll() is not None or time.monotonic() >= self._began + self._seconds

    def outcome(self) -> dict[str, Any]:
        """Return the result of a part that is over, with its warnings.

        A warning may say that a figure belongs to another kernel than its name says.
        """
        if self._seconds <= 0:
            return _failed("no time was left", 0.0)
        part, log = self._done(), self._log.read_text(errors="replace")
        # Match inside lines too, because a line may begin with a progress bar.
        warnings = dict.fromkeys(re.findall(r"(?:WARNING|ERROR) [\w.]+: .+", log))
        return part | ({"warnings": list(warnings)[:_MOST_WARNINGS]} if warnings else {})

    def _done(self) -> dict[str, Any]:
        took, code = time.monotonic() - self._began, self._process.poll()
        what = f"not done within {self._seconds:.0f} s" if code is None else f"exit code {code}"
        self.__exit__()
        tail = self._log.read_text(errors="replace")[-_ERROR_CHARACTERS:]
        if self.name == _HARDWARE_TESTS:
            return {
                "ok": code == 0,
                "seconds": took,
                "result": {"summary": tail.strip().rpartition("\n")[2]},
            } | ({} if code == 0 else {"error": f"{what}\n{tail}"})
        if code != 0 or not self._result.exists():
            return _failed(f"{what}\n{tail}", took)
        measured = json.loads(self._result.read_text())
        if "left_out" in measured:
            return {"ok": True, "seconds": took, "left_out": measured["left_out"]}
        return {"ok": measured.get("ok", True), "seconds": took, "result": measured}


def _command(name: str, arguments: argparse.Namespace, result: Path) -> list[str]:
    own = [
        "--parts",
        name,
        "--device",
        arguments.device,
        "--result",
        str(result),
        *["--tiny"] * arguments.tiny,
    ]
    return [sys.executable, "-m", f"{__package__}.gpu_suite", *own]


def _test_command() -> list[str]:
    """Return the command of the hardware tests. Other test files need packages that may be
    missing.
    """
    files = [
        str(path)
        for path in sorted(_TESTS.rglob("test_*.py"))
        if re.search(r"pytest\.mark\.(gpu|on_gpu)\b", path.read_text(encoding="utf-8"))
    ]
    side_by_side = ["-n", str(_TEST_PROCESSES)] if find_spec("xdist") else []
    flags = [
        "-q",
        "-m",
        "gpu or on_gpu",
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
        *side_by_side,
    ]
    return [sys.executable, "-m", "pytest", *flags, *files]


def _failed(error: str, seconds: float) -> dict[str, Any]:
    return {"ok": False, "seconds": seconds, "error": error}


def _run_part(arguments: argparse.Namespace) -> int:
    """Run one part in its own process: import, wait for a line with its seconds, and measure."""
    if arguments.parts == _HARDWARE_TESTS:
        command = _test_command()
        if sys.stdin.readline():
            os.execv(command[0], command)
        return 1
    from .gpu_engines import SCALES, LeftOut
    from .gpu_parts import PARTS

    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    if not (seconds := sys.stdin.readline()):
        return 1
    scale = replace(
        SCALES["tiny" if arguments.tiny else "full"], until=time.monotonic() + float(seconds)
    )
    try:
        measured = PARTS[arguments.parts](
            scale, arguments.result.parent / "models" / arguments.parts, arguments.device
        )
    except LeftOut as reason:
        measured = {"left_out": str(reason)}
    arguments.result.write_text(json.dumps(measured))
    return 0


def _about(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return device, versions and date."""
    import torch

    on_gpu = arguments.device == "cuda" and torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name()
        if on_gpu
        else f"{arguments.device} {host.machine()}",
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
    scale = "" if about["scale"] == "full" else about["scale"]
    words = re.findall(r"[a-z0-9]+", f"{about['device']} {scale} {about['date']}".lower())
    path = folder / "-".join(word for word in words if word != "nvidia")
    path.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(report) + "\n")


if __name__ == "__main__":
    sys.exit(main())
