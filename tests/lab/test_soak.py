"""The soak: it passes a good server, finds each thing that may be wrong with a bad one, and really
leaves and aborts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from http_fixtures import make_app
from http_fixtures import serve as serve_app
from scripted_engine import ScriptedEngine
from scripted_server import ScriptedServer
from server_process import ready
from tiny_models import make_tiny_model
from toy_tokenizer import toy_tokenizer

from piecework.bench.report import Report
from piecework.bench.server_process import resident_bytes
from piecework.bench.target import Api, Target
from piecework.lab.soak import faults as soak_faults
from piecework.lab.soak import run as soak_module
from piecework.lab.soak.__main__ import main
from piecework.lab.soak.requests import Mix
from piecework.lab.soak.result import SoakSettings
from piecework.lab.soak.run import run
from piecework.runtime.core.messages import EngineStats
from piecework.server.engine.spawn import DIFFUSION_PIPELINE, LANGUAGE_MODEL

CALM = Mix(
    apis=tuple(Api), disconnect_rate=0.0, abort_rate=0.0, max_prompt_words=30, max_new_tokens=8
)
STORMY = replace(CALM, disconnect_rate=0.3, abort_rate=0.3)
SETTINGS = SoakSettings(num_requests=40, concurrency=8, verify=5, settle_seconds=0.3)


def echo(prompt: Any) -> str:
    """An answer that depends on the prompt alone, without log-probabilities or stops that could be
    met.
    """
    return " ".join(f"{word}." for word in str(prompt).split()[:6]).upper()


@pytest.fixture
def good(server: ScriptedServer) -> ScriptedServer:
    server.reply = echo
    return server


def soak(
    url: str, tmp_path: Path, settings: SoakSettings = SETTINGS, mix: Mix = CALM
) -> dict[str, Any]:
    """Run a soak; what it wrote, and its exit code as `code`."""
    code = run(Target(base_url=url, timeout=20), settings, mix, Report(str(tmp_path / "out.json")))
    written: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    return {**written, "code": code}


def test_a_good_server_passes(
    good: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good.delay = 0.1  # long enough that every client has a request in flight at some moment
    told = soak(good.url, tmp_path)
    assert (told["code"], told["outcomes"], told["failed"]) == (0, {"answered": 40}, [])
    assert (told["verified"], told["mismatches"], told["problems"]) == (5, [], [])
    assert len(good.requests) == 40 + 5 + 1 and good.most_running == 8
    assert capsys.readouterr().out.endswith("PASSED\n")


def test_clients_leave_and_requests_are_aborted(good: ScriptedServer, tmp_path: Path) -> None:
    good.delay = 0.1
    told = soak(good.url, tmp_path, mix=STORMY)
    assert told["code"] == 0, told["failed"]
    outcomes = told["outcomes"]
    assert min(outcomes["disconnected"], outcomes["aborted"], outcomes["answered"]) > 0
    assert sum(outcomes.values()) == 40
    assert good.disconnected > 0
    assert good.aborted


@pytest.fixture
def engine() -> ScriptedEngine:
    engine = ScriptedEngine(toy_tokenizer())
    engine.stats = EngineStats(kv_tokens_total=4096, kv_tokens_cached=128)
    return engine


def test_piecework_s_own_http_surface_passes(engine: ScriptedEngine, tmp_path: Path) -> None:
    engine.script.delay = 0.001
    with serve_app(make_app(engine)) as url:
        told = soak(
            url,
            tmp_path,
            replace(SETTINGS, max_mismatches=0),
            replace(STORMY, max_prompt_words=8, vocab_size=300),
        )
    assert told["code"] == 0, (told["failed"], told["failures"], told["problems"])
    assert told["verified"] == 5
    assert engine.running == set()


OVERLOAD = replace(SETTINGS, overload=True, verify=0, max_under_way=5)


def overloaded(engine: ScriptedEngine, tmp_path: Path, settings: SoakSettings) -> dict[str, Any]:
    """A soak of a server that takes three requests at once, and says that five are under way."""
    engine.script.room, engine.script.delay = 3, 0.001
    engine.stats = EngineStats(running_requests=3, queued_requests=2)
    with serve_app(make_app(engine)) as url:
        return soak(url, tmp_path, settings, replace(CALM, max_prompt_words=8, vocab_size=300))


def test_refusals_with_retry_after_are_what_an_overload_wants(
    engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak_module, "_LONGEST_PAUSE", 0.02)
    told = overloaded(engine, tmp_path, replace(OVERLOAD, max_under_way=4))
    assert told["failures"] == {} and told["problems"] == []
    assert min(told["outcomes"]["refused"], told["outcomes"]["answered"]) > 0
    # The scripted server is never idle.
    assert "5 requests ran and waited at once, more than 4" in told["failed"]


def test_a_refusal_that_does_not_say_when_to_come_again_is_found(
    good: ScriptedServer, tmp_path: Path
) -> None:
    good.fail = lambda number: 503 if number % 4 == 0 else None
    told = soak(good.url, tmp_path, OVERLOAD)
    assert told["code"] == 1
    assert "HTTP 503 without Retry-After" in told["problems"]
    assert "no request was refused" in str(told["failed"])


def test_the_load_goes_on_for_as_long_as_was_asked(good: ScriptedServer, tmp_path: Path) -> None:
    told = soak(good.url, tmp_path, replace(SETTINGS, duration=0.3, num_requests=2, verify=0))
    assert told["code"] == 0 and told["outcomes"]["answered"] > 4


def _spoil(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A bend of whole `/generate` answers; the other formats stay as they are."""

    def bend(data: Any) -> Any:
        if isinstance(data, list):
            return [bend(each) for each in data]
        return change(data) if "meta_info" in data else data

    return bend


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: {**data, "text": data["text"][::-1]}, "took text back"),
        (
            lambda data: {**data, "text": data["text"] + "zzzz the and ing e . \n"},
            "stop string is in the text",
        ),
        (
            lambda data: {**data, "meta_info": {**data["meta_info"], "completion_tokens": 99}},
            "99 tokens, more than",
        ),
        (
            lambda data: {**data, "meta_info": {**data["meta_info"], "prompt_tokens": 1}},
            "1 prompt tokens counted",
        ),
        (
            lambda data: {
                **data,
                "meta_info": {**data["meta_info"], "output_token_logprobs": [[-1.0, 1, None]] * 50},
            },
            "50 log-prob",
        ),
        (
            lambda data: {
                **data,
                "meta_info": {**data["meta_info"], "output_token_logprobs": [[0.5, 1, None]]},
            },
            "not below 0",
        ),
        (
            lambda data: {
                **data,
                "meta_info": {**data["meta_info"], "output_token_logprobs": [[-0.5, 1, None]]},
            },
            "nobody asked for",
        ),
        (
            lambda data: {
                **data,
                "meta_info": {**data["meta_info"], "finish_reason": {"type": "length"}},
            },
            "malformed answer",
        ),
        (lambda data: {"meta_info": data["meta_info"]}, "malformed answer"),
    ],
)
def test_a_wrong_answer_is_found(
    good: ScriptedServer, tmp_path: Path, change: Any, problem: str
) -> None:
    good.bend = _spoil(change)
    told = soak(good.url, tmp_path, replace(SETTINGS, verify=0))
    assert told["code"] == 1
    assert any(problem in each for each in told["problems"]), told["problems"][:3]


def test_a_missing_usage_is_found(good: ScriptedServer, tmp_path: Path) -> None:
    good.usage = False
    assert any("no usage" in each for each in soak(good.url, tmp_path)["problems"])


def test_an_early_end_for_length_is_found(good: ScriptedServer, tmp_path: Path) -> None:
    def bend(data: Any) -> Any:
        for choice in data["choices"]:
            choice["finish_reason"] = choice["finish_reason"] and "length"
        return data

    good.reply, good.bend = (lambda prompt: "A"), bend
    mix = replace(CALM, apis=(Api.COMPLETION,))
    assert any(
        "ended for length after 1 of" in each
        for each in soak(good.url, tmp_path, mix=mix)["problems"]
    )


def test_an_answer_that_changes_under_load_is_told(good: ScriptedServer, tmp_path: Path) -> None:
    good.reply = lambda prompt: "ALONE X" if len(good.requests) <= SETTINGS.verify else "CROWD Y"
    told = soak(good.url, tmp_path, replace(SETTINGS, max_mismatches=None))
    assert told["code"] == 0 and len(told["mismatches"]) == 5
    assert any(
        "alone ' ALONE" in each and "under load ' CROWD" in each for each in told["mismatches"]
    )
    good.requests.clear()
    assert (
        "5 answers differ"
        in soak(good.url, tmp_path, replace(SETTINGS, max_mismatches=4))["failed"][0]
    )


def test_failed_requests_fail_the_soak(good: ScriptedServer, tmp_path: Path) -> None:
    good.fail = lambda number: 500 if number % 10 == 9 else None
    told = soak(good.url, tmp_path, replace(SETTINGS, verify=0))
    assert (told["code"], told["failures"], told["outcomes"]) == (
        1,
        {"HTTP 500": 4},
        {"answered": 36, "failed": 4},
    )


def test_a_server_that_is_not_idle_fails_the_soak(good: ScriptedServer, tmp_path: Path) -> None:
    good.leaked_tokens = 16
    told = soak(good.url, tmp_path)
    assert told["code"] == 1
    assert told["failed"] == [
        "the server is not idle: 0 running, 0 queued, KV tokens held by requests: 16"
    ]


def test_the_figures_of_the_last_step_are_brought_up_to_date(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    """An engine tells its figures with each step; after an abort there may be none. The soak asks
    for one more token.
    """
    idle, stale = engine.stats, replace(engine.stats, running_requests=1, kv_tokens_used=32)
    engine.script.reply = lambda request: [66] * 8
    real = engine.add_request

    def add_request(request: Any) -> None:
        engine.stats = idle if request.params.max_new_tokens == 1 else stale
        real(request)

    engine.add_request = add_request  # type: ignore[method-assign]
    with serve_app(make_app(engine)) as url:
        assert (
            soak(url, tmp_path, mix=replace(CALM, max_prompt_words=5, vocab_size=300))["code"] == 0
        )


def test_what_other_servers_tell_in_their_metrics(
    good: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good.missing = {"/server_info"}
    assert soak(good.url, tmp_path)["state"] == {"running": 0, "queued": 0, "kv_tokens_held": None}
    good.missing = {"/server_info", "/metrics"}
    told = soak(good.url, tmp_path)
    assert (told["code"], told["state"]) == (0, None)
    assert "not checked" in capsys.readouterr().out


def test_a_server_that_cannot_abort_fails_the_soak(good: ScriptedServer, tmp_path: Path) -> None:
    good.delay, good.missing = 0.05, {"/abort_request"}
    told = soak(good.url, tmp_path, mix=replace(CALM, abort_rate=1.0))
    assert told["code"] == 1 and told["failures"]["/abort_request: HTTP 404"] > 0


# Memory


@pytest.fixture
def program() -> Iterator[subprocess.Popen[bytes]]:
    """One that takes 40 MiB for each line it is sent, and answers each with a line."""
    code = (
        "import sys\nkept = []\nfor line in sys.stdin:\n    kept.append(b'x' * (40 << 20))\n    "
        "print(flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        grow(process)
        yield process
        process.kill()


def grow(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    process.stdout.readline()


def test_growing_memory_is_told_and_may_fail_the_soak(
    good: ScriptedServer, program: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    good.fail = lambda number: grow(program) if number == 30 else None
    settings = replace(SETTINGS, server_pid=program.pid, max_memory_growth_mib=20.0)
    told = soak(good.url, tmp_path, settings)
    assert told["memory_growth_mib"] == pytest.approx(40, abs=2)
    assert told["code"] == 1 and "memory grew by 40" in told["failed"][0]
    assert soak(good.url, tmp_path, settings)["code"] == 0


def test_memory_counts_what_the_process_started() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        assert resident_bytes(os.getpid()) > resident_bytes(child.pid) > 1 << 20
        both = resident_bytes(os.getpid())
    finally:
        child.kill()
        child.communicate()
    assert both - resident_bytes(os.getpid()) > 1 << 20


def test_a_server_process_that_is_not_there(good: ScriptedServer, tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    with pytest.raises(ValueError, match=f"no process {child.pid}"):
        soak(good.url, tmp_path, replace(SETTINGS, server_pid=child.pid))


def test_a_server_process_that_dies_fails_the_soak(
    good: ScriptedServer, program: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    good.fail = lambda number: program.kill() if number == 3 else None
    told = soak(good.url, tmp_path, replace(SETTINGS, server_pid=program.pid))
    assert told["code"] == 1 and told["failures"]["the server's process is gone"] > 0


# Faults of the engine


@pytest.mark.slow
def test_an_engine_that_is_killed_and_stopped_under_the_load_costs_no_answer(
    tmp_path: Path,
) -> None:
    """Each answer is the one that the same request had before the faults."""
    model = str(make_tiny_model(tmp_path / "model", "llama"))
    mix = replace(CALM, max_new_tokens=200)
    with ready(model, "--watchdog-timeout", "4") as server:
        faults = {"server_pid": server.process.pid, "kills": 1, "hangs": 1, "fault_interval": 1.0}
        settings = replace(SETTINGS, verify=20, settle_seconds=20.0, max_mismatches=0, **faults)  # type: ignore[arg-type]
        told = soak(server.url, tmp_path, settings, mix)
    assert (told["code"], told["failed"]) == (0, [])
    assert told["faults"] == {"killed": 1, "stopped": 1} and told["verified"] >= 20


def test_a_server_whose_engine_does_not_come_back_fails_the_soak(
    good: ScriptedServer,
    program: subprocess.Popen[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(soak_faults, "_READY_SECONDS", 0.5)
    told = soak(good.url, tmp_path, replace(SETTINGS, server_pid=program.pid, kills=1))
    assert told["code"] == 1 and "the server survived 0 of 1 faults of its engine" in told["failed"]


def test_faults_are_of_the_process_that_a_server_starts() -> None:
    assert all(soak_faults._ENGINE in each for each in (LANGUAGE_MODEL, DIFFUSION_PIPELINE))


def test_faults_need_the_process_of_the_server() -> None:
    with pytest.raises(ValueError, match="need --server-pid"):
        replace(SETTINGS, hangs=1)


# The mix


def test_prompts_fit_the_context_that_the_server_tells(
    good: ScriptedServer, tmp_path: Path
) -> None:
    good.context_length = 64
    soak(good.url, tmp_path, mix=replace(CALM, max_prompt_words=400))
    lengths = [len(words(body)) for _, body in good.requests]
    assert 20 < max(lengths) <= (64 - CALM.max_new_tokens) // 2
    good.context_length = 9
    with pytest.raises(
        ValueError, match="--max-new-tokens 8 leaves no room for a prompt in a context of 9 tokens"
    ):
        soak(good.url, tmp_path)


def words(body: dict[str, Any]) -> list[Any]:
    prompt = (
        body.get("prompt")
        or body.get("text")
        or body.get("input_ids")
        or body["messages"][0]["content"]
    )
    return prompt.split() if isinstance(prompt, str) else prompt


def test_the_command_soaks(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.reply = lambda prompt: "A B C"
    mix = [
        "--apis",
        "completion,generate",
        "--disconnect-rate",
        "0",
        "--abort-rate",
        "0",
        "--max-prompt-words",
        "9",
        "--max-new-tokens",
        "4",
    ]
    checks = [
        "--verify",
        "2",
        "--max-mismatches",
        "0",
        "--settle-seconds",
        "1",
        "--max-memory-growth",
        "500",
    ]
    assert (
        main(
            [
                *("--base-url", server.url, "--num-requests", "12", "--concurrency", "3"),
                *mix,
                *checks,
            ]
        )
        == 0
    )
    assert len(server.requests) == 12 + 2 + 1
    assert {path for path, _ in server.requests} == {"/v1/completions", "/generate"}
    printed = capsys.readouterr()
    assert printed.out.endswith("PASSED\n") and "\r" not in printed.err
    server.fail = lambda number: 500
    assert main(["--base-url", server.url, "--num-requests", "12", *mix]) == 1


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--apis", "chat,talk"], "is not a list of completion,chat,generate"),
        (["--disconnect-rate", "x"], "a number from 0 to 1"),
        (["--server-pid", "999999999"], "--server-pid: there is no process 999999999"),
    ],
)
def test_an_error_of_the_user_names_the_flag(
    argv: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = main(argv)
    except SystemExit as ended:
        code = ended.code
    assert code == 2 and error in capsys.readouterr().err
