"""Attacks on a real server: it stays healthy, and the result has what was measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess, ready
from tiny_models import make_tiny_model

from piecework.lab.attack.__main__ import main
from piecework.lab.attack.run import ATTACKS


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A vocabulary that is no multiple of 256, and time-outs for the impatient."""
    model = make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", vocab_size=700)
    with ready(
        str(model),
        "--timeout-header",
        "2",
        "--timeout-body",
        "2",
        "--timeout-write",
        "2",
        "--timeout-keep-alive",
        "4",
    ) as server:
        yield server


def attack(server: ServerProcess, tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    result = tmp_path / "result.json"
    code = main(["--base-url", server.url, "--json", str(result), *flags])
    return code, json.loads(result.read_text())


@pytest.mark.slow
def test_attacks_are_counted_timed_and_weighed(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, result = attack(
        server, tmp_path, "--attacks", "giant-header,vanishing-numbers", "--max-wait", "5"
    )
    header, numbers = result["attacks"]
    out = capsys.readouterr().out
    assert code == 0, out
    assert header["answers"] == {"431": 4} and header["polls"] > 10 and header["failures"] == 0
    assert sum(numbers["answers"].values()) == 160 and set(numbers["answers"]) == {"200", "400"}
    assert numbers["engines"] == [server.engine().pid]
    assert (
        "| giant-header: a header of 180 MB, four times at once | 4 | 4 x 431 | " in out
        and out.endswith("PASSED\n")
    )


def test_a_goal_that_is_missed_is_exit_code_1(server: ServerProcess, tmp_path: Path) -> None:
    code, result = attack(server, tmp_path, "--attacks", "giant-url", "--max-wait", "0.000001")
    assert code == 1 and "more than --max-wait" in result["failed"][0]


@pytest.mark.slow
def test_mutated_bodies_do_no_harm(server: ServerProcess, tmp_path: Path) -> None:
    code, result = attack(
        server, tmp_path, "--attacks", "fuzz", "--requests", "3000", "--max-wait", "10"
    )
    assert code == 0, result["failed"]
    assert (
        result["attacks"][0]["answers"].keys() <= {"200", "400", "404", "405", "415"}
        and result["attacks"][0]["answers"]["200"] > 200
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_attack_does_harm(server: ServerProcess, tmp_path: Path) -> None:
    # Bounds for a machine that does other things: the effects of a hole are ten times as large.
    code, result = attack(
        server, tmp_path, "--attacks", "all", "--max-wait", "5", "--seconds", "20"
    )
    assert code == 0, result["failed"]
    answers = {one["name"]: one["answers"] for one in result["attacks"]}
    assert answers.keys() == ATTACKS.keys()
    assert answers["slow-headers"] == {"408": 300} == answers["slow-bodies"]
    assert answers["unread-answers"] == {"cut off": 20}
    assert answers["half-bodies"].keys() <= {"408", "503"}
