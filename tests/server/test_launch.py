"""`piecework serve` as a process: how it starts, what it says, and how it ends."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
from scripted_engine import INFO
from server_process import PROMPT, ready, serve
from tiny_models import make_tiny_model

from piecework.cli.core.flags import ServerConfig
from piecework.runtime.core.adapter_info import AdapterInfo
from piecework.server.summary import summary


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), "llama"))


def finish_reason(lines: Iterator[str]) -> str:
    """How a stream ended; it must have ended in order."""
    *chunks, last = lines
    assert last == "[DONE]"
    reason: str = json.loads(chunks[-1])["choices"][0]["finish_reason"]
    return reason


class Life(NamedTuple):
    """What one server with vLLM's flags did: statuses of /health while it started, what it was, how
    a stream and a request fared that met SIGINT, and what was left.
    """

    seen: list[int]
    told: dict[str, Any]
    ollama_names: list[dict[str, Any]]
    url: str
    status_while_ending: int
    reason: str
    refused: httpx.Response
    left: tuple[int, str, str]


@pytest.fixture(scope="module")
def life(model: str) -> Life:
    flags = [
        "--max-model-len",
        "1k",
        "--max-num-seqs",
        "3",
        "--block-size",
        "32",
        "--tensor-parallel-size",
        "1",
    ]
    flags += ["--enforce-eager", "--no-enable-prefix-caching", "--disable-log-requests"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        second = free.getsockname()[1]
    flags += ["--ollama-port", str(second)]
    with serve(model, *flags) as server:
        seen = []
        while 200 not in seen:
            seen.append(server.status())
            assert server.process.poll() is None
            time.sleep(0.02)
        told = server.client.get("/server_info").json()
        names = httpx.get(f"http://127.0.0.1:{second}/api/tags").json()["models"]
        with server.stream() as lines:
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.2)
            refused = server.client.post("/v1/completions", json=PROMPT)
            status, reason = server.status(), finish_reason(lines)
        return Life(seen, told, names, server.url, status, reason, refused, server.finish())


def test_health_tells_loading_from_ready_and_the_summary_what_is_served(life: Life) -> None:
    code, out, err = life.left
    assert 503 in life.seen and code == 0
    assert (
        f"serves tiny at {life.url}" in out
        and "LlamaForCausalLM, float32 on cpu, " in out
        and " attention, weights " in out
    )
    assert "2,048 tokens in pages of" in out and f"curl {life.url}/v1/" in out
    told = re.search(r"ready after (\S+) s\)", out), re.search(r"start-up +(.*)", out)
    assert told[0] and told[1], out
    phases = dict(phase.removesuffix(" s").rsplit(" ", 1) for phase in told[1][1].split(", "))
    assert "processes" in phases and sum(map(float, phases.values())) == pytest.approx(
        float(told[0][1]), abs=0.06 * len(phases)
    )
    assert "Traceback" not in err


def test_what_the_machine_makes_other_than_expected_has_a_line_in_the_summary() -> None:
    info = replace(INFO, remarks={"threads": "2: the control group's CPU quota is 2.5"})
    assert "  threads         2: the control group's CPU quota is 2.5\n" in summary(
        ServerConfig(), info, 30000, 1.0, rows={}, chat=False
    )


def test_adapters_and_their_slots_have_a_line_in_the_summary() -> None:
    loaded = AdapterInfo(
        identity="x", name="sql", path="/sql", rank=8, num_layers=2, num_bytes=1, is_resident=True
    )
    memory = {"adapter_slots": 4, "adapter_rank": 16, "adapter_bytes": 3 << 20}
    for adapters, names in (([loaded], "sql"), ([], "none loaded")):
        info = replace(INFO, adapters=adapters, **memory)
        line = f"  adapters        {names}; 4 slots for ranks up to 16, 3 MiB\n"
        assert line in summary(ServerConfig(), info, 30000, 1.0, rows={}, chat=False)


def test_a_second_port_has_the_same_endpoints(life: Life) -> None:
    assert [each["name"] for each in life.ollama_names] == ["tiny:latest"]
    for port in (0, 65536, 30000):
        with pytest.raises(ValueError, match="--ollama-port"):
            ServerConfig(ollama_port=port)


def test_a_command_line_of_vllm_serves_what_it_means(life: Life) -> None:
    told = life.told
    assert (told["context_length"], told["max_running_requests"], told["page_size"]) == (
        1000,
        3,
        32,
    )
    assert told["disable_cuda_graph"] and told["disable_radix_cache"]
    assert told["graphs"]["decode_backend"] == told["graphs"]["prefill_backend"] == "disabled"


@pytest.mark.slow
def test_graphs_show_in_the_summary_and_in_server_info(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIECEWORK_CACHE_DIR", str(tmp_path))
    flags = [
        "--piecewise-cuda-graph",
        "--piecewise-cuda-graph-compiler",
        "eager",
        "--piecewise-cuda-graph-tokens",
        "4,8",
    ]
    with ready(
        model,
        *flags,
        "--cuda-graph-backend-decode",
        "full",
        "--cuda-graph-bs",
        "1,2",
        "--startup",
        "full",
    ) as server:
        info = server.client.get("/server_info").json()
        graphs = info["graphs"]
        assert server.client.post("/v1/completions", json=PROMPT).status_code == 200
        metrics = server.client.get("/metrics").text
        server.process.send_signal(signal.SIGINT)
        _, out, err = server.finish()
    assert "\r" not in err, "progress bars are for terminals"
    assert {"weights", "memory", "pieces"} <= info["start_seconds"].keys()
    assert (graphs["prefill_sizes"], graphs["decode_sizes"], graphs["distinct_pieces"]) == (
        [4, 8],
        [1, 2],
        3,
    )
    assert (
        "prefill piecewise, decode full; 3 distinct pieces; 2 sizes up to 8 tokens; 2 sizes up to "
        "2 requests" in out
    )
    assert graphs["passes"]["noop"] >= 0 and "one rank" in graphs["passes_off"]["async_tp"]
    (passes,) = (line for line in out.splitlines() if line.startswith("  passes "))
    assert "off: " in passes and "async_tp (there is one rank only)" in passes
    assert 'pass_matches{model_name="tiny",pass="noop"}' in metrics
    assert (
        "num_graph_replays_total" in metrics
        and 'num_graph_replays_total{model_name="tiny"} 0.0' not in metrics
    )


def test_a_signal_lets_running_requests_finish_and_takes_no_new_ones(life: Life) -> None:
    assert life.reason == "length" and life.status_while_ending == 503
    assert life.refused.status_code == 503 and "retry-after" in life.refused.headers


@pytest.mark.slow
def test_what_runs_after_the_drain_timeout_is_cut_off(model: str) -> None:
    with ready(model, "--drain-timeout", "0.1") as server, server.stream() as lines:
        server.process.send_signal(signal.SIGTERM)
        assert finish_reason(lines) == "abort"
        assert server.finish()[0] == 0


def test_a_second_signal_ends_at_once(model: str) -> None:
    with ready(model) as server, server.stream():
        engine = server.engine()
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.finish(3)[0] == 128 + signal.SIGTERM
        assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE


def test_a_signal_while_the_model_loads_ends_at_once(model: str) -> None:
    with serve(model) as server:
        while server.status() == 0:
            assert server.process.poll() is None
            time.sleep(0.02)
        server.process.send_signal(signal.SIGTERM)
        code, out, err = server.finish(3)
    assert (code, out) == (0, "")
    assert "Traceback" not in err


def test_an_engine_that_cannot_start_is_one_line(model: str) -> None:
    with serve(model, "--max-total-tokens", str(10**12)) as server:
        code, out, err = server.finish(60)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(
        "piecework serve: error: --max-total-tokens 1000000000000 takes "
    )
    assert "Traceback" not in err


@pytest.mark.slow
def test_an_engine_that_crashes_again_and_again_is_given_up_in_json_where_the_log_is(
    model: str,
) -> None:
    with ready(model, "--log-format", "json") as server, server.stream():
        for _ in range(3):
            while not (engines := psutil.Process(server.process.pid).children()):
                time.sleep(0.01)
            engines[0].kill()
            engines[0].wait()
        code, _, err = server.finish()
    assert code == 1
    events = [json.loads(line) for line in err.splitlines()]
    assert events[-1]["level"] == "critical"
    assert "the engine process ended 3 times" in events[-1]["message"]


def test_a_port_in_use_is_one_line_and_costs_no_load(model: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = ["--port", str(taken.getsockname()[1])]
        with serve(model, *flags) as server:
            while server.process.poll() is None:
                with suppress(psutil.NoSuchProcess):
                    assert not psutil.Process(server.process.pid).children()
                time.sleep(0.01)
            code, out, err = server.finish()
    assert (code, out) == (2, "")
    assert (
        err
        == f"piecework serve: error: port {flags[1]} of 127.0.0.1 is in use; choose another with "
        "--port, or stop what listens there\n"
    )


def test_who_connects_before_the_server_can_answer_is_answered(model: str) -> None:
    with serve(model) as server:
        early = None
        while early is None:
            assert server.process.poll() is None
            with suppress(ConnectionRefusedError):
                early = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        with early:
            early.sendall(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n")
            assert early.recv(12) in (b"HTTP/1.1 503", b"HTTP/1.1 200")


def test_a_broken_model_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with serve(str(tmp_path)) as server:
        code, out, err = server.finish(60)
    assert (code, out) == (2, "")
    assert err.startswith("piecework serve: error: ") and err.count("\n") == 1
