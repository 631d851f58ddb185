"""Two replicas on a real local cluster of Ray: `pip install -e .[ray]` brings it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from server_process import free_port
from tiny_adapters import make_adapter
from tiny_models import make_tiny_model

ray = pytest.importorskip("ray")

from ray import serve  # noqa: E402

from piecework.cli.ray import build, read_arguments  # noqa: E402

pytestmark = pytest.mark.slow
ARGS = {
    "model_path": "smollm2-135m",
    "max-running-requests": 16,
    "max-total-tokens": 16384,
    "disable-piecewise-cuda-graph": True,
    "replica-cpus": 1,
}
SCALED = {
    **ARGS,
    "min_replicas": 1,
    "max_replicas": 2,
    "target_ongoing_requests": 4,
    "upscale_delay": 2,
    "downscale_delay": 5,
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


@pytest.fixture
def two(url: str) -> str:
    serve.run(build({**ARGS, "num_replicas": 2}), name="app")
    return url


def chat(url: str, text: str, **members: object) -> httpx.Response:
    body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": text}], **members}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)


def replicas() -> list[psutil.Process]:
    """The processes of the deployment that has engines."""
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if "ServeReplica:app:Engine" in " ".join(process.cmdline())
    ]


def engines() -> list[psutil.Process]:
    """Those that compute, of all replicas."""
    return [
        process
        for replica in replicas()
        for process in replica.children()
        if "engine.process" in " ".join(process.cmdline())
    ]


def running_engines() -> int:
    application = serve.status().applications["app"]
    return application.deployments["Engine"].replica_states.get("RUNNING", 0)


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_chat_is_answered_and_streamed(two: str) -> None:
    whole = chat(two, "Say hi.", temperature=0, max_tokens=8).json()
    streamed = chat(two, "Say hi.", temperature=0, max_tokens=8, stream=True).text
    events = [line.removeprefix("data: ") for line in streamed.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(deltas) == whole["choices"][0]["message"]["content"]


def test_bad_input_is_refused_as_by_any_server(two: str) -> None:
    assert chat(two, "hi", max_tokens=-1).json()["error"]["param"] == "max_tokens"
    answer = httpx.post(f"{two}/v1/completions", content=b"x" * 5_000_000, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_prompts_that_begin_alike_go_to_one_replica(two: str) -> None:
    shared = "Here are the rules of the house, which all guests keep. " * 20
    cached = []
    for number in range(8):
        usage = chat(two, f"{shared}{number}", max_tokens=1).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert all(tokens > 150 for tokens in cached[1:])


def test_a_client_that_goes_stops_its_request(url: str) -> None:
    serve.run(build({**ARGS, "num_replicas": 1}), name="app")
    engine = serve.get_deployment_handle("Engine", "app")

    def running() -> float:
        return engine.record_autoscaling_stats.remote().result()["running_requests"]

    assert running() == 0, "a handle's first call takes longer than the request"
    body = {"prompt": "once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        next(answer.iter_lines())
        wait_for(lambda: running() == 1)
    began = time.monotonic()
    wait_for(lambda: running() == 0)
    assert time.monotonic() - began < 2, "its 1,500 tokens take longer"


def test_500_requests_are_answered_though_a_replica_is_killed(two: str) -> None:
    def ask(number: int) -> int:
        if number == 150:
            os.kill(replicas()[0].pid, signal.SIGKILL)
        return chat(two, f"Count from {number}.", max_tokens=4).status_code

    with ThreadPoolExecutor(16) as pool:
        codes = list(pool.map(ask, range(500)))
    assert codes == [200] * 500


def test_a_stream_whose_replica_is_killed_ends_with_an_error_event(two: str) -> None:
    body = {"prompt": "once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{two}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        for process in replicas():
            process.kill()
        rest = [line for line in lines if line]
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_unavailable"


def test_replicas_are_added_under_load_and_taken_away(url: str) -> None:
    serve.run(build(SCALED), name="app")
    with ThreadPoolExecutor(24) as pool:
        deadline = time.monotonic() + 120
        while running_engines() < 2 and time.monotonic() < deadline:
            codes = list(pool.map(lambda n: chat(url, f"Tell of {n}.").status_code, range(24)))
            assert set(codes) == {200}
    assert running_engines() == 2
    wait_for(lambda: running_engines() == 1, seconds=120)
    assert chat(url, "Are you there?", max_tokens=1).status_code == 200


def test_an_engine_that_ends_within_a_replica_loses_no_request(two: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = [
            pool.submit(chat, two, f"Tell of {n}.", max_tokens=200, ignore_eos=True)
            for n in range(8)
        ]
        wait_for(lambda: bool(engines()))
        time.sleep(0.5)
        for process in engines():
            process.kill()
        assert [answer.result().status_code for answer in answers] == [200] * 8
    assert len(replicas()) == 2


def test_each_replica_answers_by_every_adapter(
    url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of eight prompts that begin differently, each replica gets some."""
    folder = tmp_path_factory.mktemp("adapters")
    model = make_tiny_model(folder / "model", "llama")
    adapters = [make_adapter(folder / name, model, seed=seed) for seed, name in enumerate("ab")]
    named = ",".join(f"{path.name}={path}" for path in adapters)
    settings = {"model_path": str(model), "dtype": "float32", "lora-modules": named}
    serve.run(
        build({**ARGS, **settings, "num_replicas": 2, "served-model-name": "base"}), name="app"
    )
    listed = httpx.get(f"{url}/v1/models", timeout=60).json()["data"]
    assert {each["id"]: each.get("parent") for each in listed} == {
        "base": None, "a": "base", "b": "base"
    }  # fmt: skip

    def answer(name: str, number: int) -> str:
        body = {"model": name, "prompt": [number] * 20, "max_tokens": 6, "temperature": 0}
        found = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        assert found["model"] == name
        return str(found["choices"][0]["text"])

    texts = {
        name: [[answer(name, number) for number in range(8)] for _ in range(2)]
        for name in ("base", "a", "b")
    }
    assert all(first == second for first, second in texts.values())
    assert len({tuple(first) for first, _ in texts.values()}) == 3
    assert len(engines()) == 2
    body = {"lora_name": "c", "lora_path": str(adapters[0])}
    refused = httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=60)
    assert refused.status_code == 400, "one replica would have it, and the others not"


def test_a_model_that_is_not_there_is_told_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="no-such-model"):
        read_arguments({"model_path": "./no-such-model"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("port", "2"), ("batch-dir", "2"), ("responses-store", "2"), ("nnodes", "2")),
        *(("lora-root", "2"), ("weights-root", "2"), ("enable-sleep-mode", True)),
    ],
)
def test_flags_that_are_not_for_replicas_are_refused(name: str, value: str | bool) -> None:
    with pytest.raises(ValueError, match=f"^{name}: .*leave it out"):
        read_arguments({name: value})


def test_several_models_are_refused(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text("models:\n- {name: a, model_path: smollm2-135m}\n")
    with pytest.raises(ValueError, match="a replica serves one model"):
        read_arguments({"config": str(tmp_path / "models.yaml")})
    with pytest.raises(ValueError, match="--fleet-memory is for several models"):
        read_arguments({"model_path": "smollm2-135m", "fleet-memory": 4})


def test_the_shipped_file_has_arguments_that_are_understood() -> None:
    file = Path(__file__).parents[3] / "docker" / "ray" / "serve.yaml"
    (application,) = yaml.safe_load(file.read_text())["applications"]
    config, placement = read_arguments(application["args"])
    assert (placement.max_replicas, config.engine.num_threads) == (4, 2)
