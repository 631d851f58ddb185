"""`piecework serve` of several models as processes: an engine each, which starts, ends and crashes
apart from the others.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from server_process import ServerProcess
from tiny_encoders import make_tiny_encoder, write_modules
from tiny_models import make_tiny_model

from piecework.lab.fleet import main as measure

pytestmark = pytest.mark.slow
BODY = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
COMMON = ("--dtype", "float32", "--num-threads", "1", "--log-level", "warning")


@pytest.fixture(scope="module")
def config(
    tmp_path_factory: pytest.TempPathFactory, pipeline_folder: Callable[[str], Path]
) -> Path:
    """Two language models, an embedder and a pipeline, none of which compiles."""
    folder = tmp_path_factory.mktemp("fleet")
    for name, seed in (("a", 1), ("b", 2)):
        (folder / name).mkdir()
        make_tiny_model(folder / name, seed=seed)
    (folder / "e").mkdir()
    write_modules(make_tiny_encoder(folder / "e", "bert"), "pooling_mode_mean_tokens")
    models = [{"name": name, "model_path": folder / name} for name in "abe"]
    for text in models[:2]:
        text |= {"max_total_tokens": 2048, "disable_piecewise_cuda_graph": "true"}
    models.append({"name": "draw", "model_path": pipeline_folder("flux")})
    entries = [", ".join(f"{key}: {value}" for key, value in each.items()) for each in models]
    path = folder / "models.yaml"
    path.write_text("models:\n" + "".join(f"- {{{entry}}}\n" for entry in entries))
    return path


class FleetProcess(ServerProcess):
    def __init__(self, config: Path, *flags: str) -> None:
        super().__init__("", "--config", str(config), *flags, common=COMMON)

    def ask(self, model: str) -> Any:
        answer = self.client.post("/v1/completions", json={"model": model, **BODY})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def until_asleep(self, model: str) -> None:
        for _ in range(600):
            status = self.client.get(f"/v1/models/{model}").json()["status"]
            if status["value"] == "sleeping":
                return
            time.sleep(0.05)
        raise AssertionError(f"it does not sleep: {status}")

    def engines(self) -> dict[int, psutil.Process]:
        return {each.pid: each for each in psutil.Process(self.process.pid).children()}


def test_an_engine_that_is_killed_comes_back_and_no_other_notices(config: Path) -> None:
    server = FleetProcess(config)
    try:
        server.wait_ready()
        assert not server.engines()
        before = {"a": server.ask("a")}
        (first,) = server.engines()
        before["b"] = server.ask("b")
        assert before["a"] != before["b"]
        (second,) = server.engines().keys() - {first}
        os.kill(first, signal.SIGKILL)
        assert {name: server.ask(name) for name in before} == before
        assert second in server.engines() and first not in server.engines()
        unloaded = server.client.post("/v1/models/unload", json={"model": "b"}).json()
        assert unloaded["status"]["value"] == "unloaded" and second not in server.engines()
        assert server.ask("b") == before["b"]
        left = list(server.engines().values())
        server.process.terminate()
        code, _, err = server.finish()
        assert code == 0, err
        assert not psutil.wait_procs(left, timeout=5)[1]
    finally:
        server.process.kill()


def test_an_idle_engine_sleeps_wakes_and_may_be_killed_asleep(config: Path) -> None:
    server = FleetProcess(config, "--idle-unload", "0.5")
    try:
        server.wait_ready()
        text = server.ask("a")
        ((pid, _),) = server.engines().items()
        for _ in range(2):
            server.until_asleep("a")
            assert server.ask("a") == text and [*server.engines()] == [pid]
        server.until_asleep("a")
        os.kill(pid, signal.SIGKILL)
        assert server.ask("a") == text and pid not in server.engines()
        server.until_asleep("a")
    finally:
        server.process.kill()


def test_all_of_many_requests_are_answered_within_the_memory(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ["--num-requests", "300", "--concurrency", "60"]
    flags = [*COMMON, "--fleet-memory", "4", "--max-loaded-models", "3"]
    code = measure(["--config", str(config), *load, "--", *flags])
    told = capsys.readouterr().out
    print(told, file=sys.stderr)
    assert code == 0
    found = json.loads(told)
    assert found["answered"] == 300 and found["most models loaded"] <= 3
    assert found["most memory of engines, GiB"] <= 4 and found["switches"] >= 4
