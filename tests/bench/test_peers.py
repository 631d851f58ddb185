"""`piecework bench peers`: real servers started, loaded and stopped one after the other, and
compared.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import scripted_server
from tiny_models import make_tiny_model

from piecework.bench import peers
from piecework.bench.peers import Load, Measured, best_of, table
from piecework.bench.report import Failures
from piecework.bench.serving import ServingResult
from piecework.bench.workloads import Workload
from piecework.cli.main import build_parser, main


def command(model: Path) -> str:
    """A second server of Piecework as the peer."""
    flags = [
        "--model-path",
        str(model),
        "--dtype",
        "float32",
        "--max-total-tokens",
        "4096",
        "--num-threads",
        "1",
    ]
    return shlex.join(
        [
            sys.executable,
            "-m",
            "piecework",
            "serve",
            *flags,
            "--disable-cuda-graph",
            "--port",
            peers.PORT,
        ]
    )


@pytest.mark.slow
def test_two_servers_are_measured_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = Workload(random_input_len=20, random_output_len=5)
    monkeypatch.setitem(peers.LOADS, "batch8", Load(workload, 6, 3, "output_throughput"))
    monkeypatch.setattr(peers, "CLIENTS", (1, 2))
    model, drawn = make_tiny_model(tmp_path / "model"), tmp_path / "scaling.png"
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "2 + 2?", "answer": "It is 4.\\n#### 4"}\n' * 3)
    before = set(psutil.Process().children(recursive=True))
    flags = [
        "--model-path",
        str(model),
        "--vocab-size",
        "400",
        "--loads",
        "batch8",
        "--rounds",
        "2",
        "--answers",
        "2",
        "--data-path",
        str(questions),
        "--server",
        f"other={command(model)}",
    ]
    written = [
        "--markdown",
        str(tmp_path / "table.md"),
        "--json",
        str(tmp_path / "peers.json"),
        "--scaling",
        "--plot",
        str(drawn),
    ]
    assert main(["bench", "peers", *flags, *written]) == 0
    text = capsys.readouterr().out
    assert (tmp_path / "table.md").read_text() == text
    assert "| piecework / best peer |" in text
    found = json.loads((tmp_path / "peers.json").read_text())["servers"]
    assert list(found) == ["piecework", "other"]
    for server in found.values():
        assert (
            server["loads"]["batch8"]["completed"] == 6
            and server["loads"]["batch8"]["output_tokens"] == 30
        )
        assert server["resident_bytes"] > 100 * 2**20 and server["mean_logprob"] < 0
        assert [row["completed"] for row in server["scaling"].values()] == [4, 4]
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--server", "other"], "NAME=COMMAND"),
        (["--loads", "single,double"], "is not a list of single,batch8"),
        (["--plot", "a.png"], "give --scaling too"),
    ],
)
def test_bad_flags(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["bench", "peers", *flags])
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == 2
    assert said in capsys.readouterr().err


def test_a_server_that_ends_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        peers, "sys", type("System", (), {"executable": "false", "stderr": sys.stderr})
    )
    assert main(["bench", "peers", "--loads", "single"]) == 2
    assert "the server piecework ended" in capsys.readouterr().err


def test_a_server_that_dies_keeps_its_figures_and_so_do_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = Load(Workload(random_input_len=5, random_output_len=2), 2, 1, "output_throughput")
    monkeypatch.setitem(peers.LOADS, "single", load)
    monkeypatch.setitem(peers.LOADS, "batch8", load)
    # One request until it is ready, and four of each load, of which two warm it up.
    servers = {
        "piecework": scripted_server.command(),
        "whole": scripted_server.command(),
        "dies": scripted_server.command(6),
        "dies late": scripted_server.command(8),
        "lingers": scripted_server.command(8, lingers=True),
        "never": "false",
    }
    written = tmp_path / "peers.json"
    flags = ["--vocab-size", "400", "--loads", "single,batch8", "--json", str(written)]
    for label, command in servers.items():
        flags += ["--server", f"{label}={command}"]
    assert main(["bench", "peers", *flags]) == 1
    out, err = capsys.readouterr()
    rows = {cells[1].strip(): cells[2:-1] for cells in (row.split("|") for row in out.splitlines())}
    assert [cell.strip() == "-" for cell in rows["dies"]] == [False, False, True, True]
    assert [cell.strip() == "-" for cell in rows["dies late"]] == [False, False, False, True]
    assert [cell.strip() == "-" for cell in rows["lingers"]] == [False, False, False, True]
    assert {cell.strip() for cell in rows["never"]} == {"-"}
    assert "-" not in {cell.strip() for cell in [*rows["whole"], *rows["piecework / best peer"]]}
    assert "the server dies failed" in err and "the server never ended" in err
    failures = [found["failure"] for found in json.loads(written.read_text())["servers"].values()]
    assert [failure is None for failure in failures] == [True, True, *[False] * 4]


@pytest.mark.parametrize("interrupts", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_measurement_that_is_ended_ends_its_server(interrupts: signal.Handlers) -> None:
    """Also in the background of a script, where Ctrl-C is ignored."""
    asleep = shlex.join([sys.executable, "-c", "import time; time.sleep(600)"])
    flags = ["--loads", "single", "--server", f"piecework={asleep}"]
    measurement = psutil.Popen(
        [sys.executable, "-m", "piecework", "bench", "peers", *flags],
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, interrupts),
    )
    try:
        while not (servers := measurement.children()):
            time.sleep(0.05)
        # The measurement has to hear of its server's start before it can end it.
        time.sleep(0.5)
        measurement.terminate()
        said = measurement.communicate(timeout=60)[1]
        assert (measurement.returncode, said) == (130, b"")
        assert not psutil.wait_procs(servers, timeout=0)[1]
    finally:
        for each in [*measurement.children(), measurement] if measurement.is_running() else []:
            each.kill()


def measured(rate: float, ready: float, resident: int) -> Measured:
    result = ServingResult(10.0, Failures(), completed=1, output_tokens=int(10 * rate))
    return Measured(ready=ready, resident=resident, results={"single": result}, scaling={8: result})


def test_of_several_rounds_the_best_figures_count() -> None:
    best = best_of([measured(60, 3, 100), measured(80, 5, 90), measured(70, 2, 120)])
    assert (best.ready, best.resident) == (2, 90)
    assert best.results["single"].output_tokens == best.scaling[8].output_tokens == 800


def test_the_ratio_is_to_the_best_of_the_others() -> None:
    rows = table(
        {
            "piecework": measured(60, 3, 100),
            "slow": measured(20, 2, 400),
            "fast": measured(50, 4, 200),
        },
        ["single"],
    )
    assert rows[-1] == "| piecework / best peer | 1.50x | 1.20x | 0.50x |"


def test_the_command_takes_every_load_by_name() -> None:
    for name in peers.LOADS:
        chosen = build_parser().parse_args(["bench", "peers", "--loads", name])
        assert chosen.loads == (name,)
