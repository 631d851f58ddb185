"""Programs that `python -m piecework.runtime.process.parent --no-job` runs: they end when what
started them does, and not before.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_IMPORTED = """
import time
from pathlib import Path
print("importing", flush=True)
while not Path("imported").exists():
    time.sleep(0.01)
"""
_PROGRAM = "import slowly_imported\nprint('imported', flush=True)\n"
_SECONDS = 60

Start = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Of a program in `tmp_path` whose import takes until there is a file `imported`; returned once
    it is on it.
    """
    (tmp_path / "slowly_imported.py").write_text(_IMPORTED)
    (tmp_path / "program.py").write_text(_PROGRAM)
    command = (sys.executable, "-m", "piecework.runtime.process.parent", "--no-job", "program")
    started: list[subprocess.Popen[bytes]] = []

    def _start() -> subprocess.Popen[bytes]:
        # Programs of `-m` are found in the folder that they start in.
        process = subprocess.Popen(
            command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout and process.stdout.readline() == b"importing\n"
        return process

    yield _start
    for process in started:
        with process:
            process.kill()


def test_one_that_is_still_imported_ends_when_its_input_does(start: Start) -> None:
    process = start()
    assert process.poll() is None
    assert process.stdin
    process.stdin.close()
    assert process.wait(_SECONDS) == 1


def test_one_outlives_the_thread_that_started_it(start: Start, tmp_path: Path) -> None:
    started: list[subprocess.Popen[bytes]] = []
    thread = threading.Thread(target=lambda: started.append(start()))
    thread.start()
    thread.join(_SECONDS)
    (tmp_path / "imported").touch()
    assert started[0].wait(_SECONDS) == 0
