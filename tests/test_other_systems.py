"""On systems that lack what Linux has: it works without, or one clear line says what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import make_tiny_model

from piecework.kernels.cpu.native import instruction_sets, openmp

_WITHOUT = """
# psutil takes `resource` for granted where it finds Linux.
import builtins, io, os, select, signal, socket, sys, psutil
sys.modules.update(dict.fromkeys(["fcntl", "resource", "termios", "pwd", "grp"]))
for module, names in {
    os: "sched_getaffinity sched_setaffinity nice fork memfd_create getuid geteuid setsid killpg",
    signal: "pthread_sigmask SIGKILL SIGHUP",
    socket: "AF_UNIX",
    select: "PIPE_BUF poll",
}.items():
    for name in names.split():
        delattr(module, name)

given = io.open

def open_here(path, *arguments, **options):
    asks = sys._getframe(1).f_code.co_filename
    if str(path).startswith(("/proc", "/sys")) and "psutil" not in asks:
        raise FileNotFoundError(2, "No such file or directory", str(path))
    return given(path, *arguments, **options)

builtins.open = io.open = open_here
"""


def run_without(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _WITHOUT + code, *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        cwd="/",
    )


def test_the_engine_runs_without_affinity_masks_file_locks_and_resource_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path / "cache"))
    model = make_tiny_model(tmp_path / "model")
    # Without them it would compile kernels that no other test has.
    for file in (instruction_sets._CPUINFO, openmp._MAPS):
        if file.exists():
            (tmp_path / file.name).write_text(file.read_text())
    done = run_without(
        "from pathlib import Path\n"
        "from piecework.kernels.cpu.native import instruction_sets, openmp\n"
        "instruction_sets._CPUINFO = Path(sys.argv[2]) / 'cpuinfo'\n"
        "openmp._MAPS = Path(sys.argv[2]) / 'maps'\n"
        "import piecework\n"
        "llm = piecework.LLM(sys.argv[1], max_total_tokens=512, piecewise_cuda_graph=True, "
        "piecewise_cuda_graph_compiler='eager')\n"
        "(result,) = llm.generate(['The quick'], piecework.SamplingParams(max_new_tokens=4, "
        "ignore_eos=True))\n"
        "print(len(result.token_ids))\n"
        "from piecework.kernels.cpu.platform import CpuPlatform\n"
        "use = CpuPlatform().memory_use()\n"
        "assert 0 < use.allocated <= use.peak_allocated\n",
        str(model),
        str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["4"]


def test_the_command_line_tells_of_itself() -> None:
    done = run_without(
        "sys.argv = ['piecework', '--help']\nfrom piecework.cli.main import main\nsys.exit(main())"
    )
    assert (done.returncode, done.stderr) == (0, "") and "serve" in done.stdout


def test_the_native_kernels_are_built_without_file_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIECEWORK_KERNELS_DIR", str(tmp_path))
    done = run_without(
        "from pathlib import Path\n"
        "from piecework.kernels.cpu.native import build, parts\n"
        "parts.SOURCES = Path(sys.argv[1])\n"
        "print(build.load_variant(build.VARIANTS[-1]).answer())\n",
        str(_answer(tmp_path / "sources")),
    )
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr


def test_a_server_where_signals_cannot_be_held_back_is_refused_in_one_line() -> None:
    done = run_without(
        "sys.argv = ['piecework', 'serve']\nfrom piecework.cli.main import main\nsys.exit(main())"
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert "Linux or macOS" in line and "piecework.LLM" in line


def _answer(folder: Path) -> Path:
    folder.mkdir()
    (folder / "answer.cpp").write_text('extern "C" int answer() { return 42; }')
    return folder
