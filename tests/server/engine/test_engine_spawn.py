"""Engine processes that wait for their job: they end with the block that started them, and without
a word on Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tiny_models import make_tiny_model

from piecework.server.engine.spawn import (
    DIFFUSION_PIPELINE,
    LANGUAGE_MODEL,
    POOLING_MODEL,
    spawn,
    spawned,
)


def test_a_process_that_nobody_gave_a_job_ends_with_the_block() -> None:
    with spawned((sys.executable, "-c", "import time; time.sleep(100)")) as process:
        assert process.poll() is None
    assert process.returncode == -signal.SIGKILL


def test_signals_are_held_back_until_the_process_ignores_them() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    count = "len({signal.SIGINT, signal.SIGTERM} & signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    process = spawn((sys.executable, "-c", f"import signal; raise SystemExit({count})"))
    assert process.wait(60) == 2
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.parametrize(
    "command",
    [
        LANGUAGE_MODEL,
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (POOLING_MODEL, DIFFUSION_PIPELINE)
        ),
    ],
    ids=["text", "vectors", "images"],
)
def test_without_a_job_it_ends_when_its_parent_does(command: tuple[str, ...]) -> None:
    process = spawn(command)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", num_hidden_layers=1)


def serve(model: Path, port: int) -> subprocess.Popen[str]:
    """In a process group of its own, as a terminal starts it."""
    command = [
        sys.executable,
        "-m",
        "piecework",
        "serve",
        "--model-path",
        str(model),
        "--port",
        str(port),
        "--disable-cuda-graph",
    ]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def nobody_is_left(group: int) -> bool:
    """Within the time that it takes to collect who has ended."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_a_start_that_fails_leaves_no_process(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = serve(model, taken.getsockname()[1])
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and "is in use" in err and "Traceback" not in err
    assert nobody_is_left(process.pid)


@pytest.mark.parametrize(
    ("number", "seconds"),
    [
        *((signal.SIGINT, 0.2), (signal.SIGTERM, 0.4)),
        pytest.param(signal.SIGINT, 0.0, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 0.8, marks=pytest.mark.slow),
    ],
)
def test_a_signal_while_it_starts_ends_all_without_a_traceback(
    model: Path, number: signal.Signals, seconds: float
) -> None:
    """Whatever the processes import just then."""
    process = serve(model, 0)
    while not psutil.Process(process.pid).children():
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(seconds)
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (0, 128 + number) and "Traceback" not in err
    assert nobody_is_left(process.pid)
