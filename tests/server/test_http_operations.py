"""Health, readiness, metrics, version, models, tokenize, the API key, request ids."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest
from http_fixtures import MODEL, client_of, error_of, events, make_app
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import CONTEXT_LENGTH, INFO, ScriptedEngine

from piecework import __version__
from piecework.runtime.core.engine_info import GraphInfo
from piecework.runtime.core.messages import EngineStats
from piecework.server.engine.state import EngineState
from piecework.server.observability.metrics import Latency
from piecework.server.serving import operations

KEY = "sésame"


async def metrics_of(client: httpx.AsyncClient) -> dict[str, float]:
    """Every sample without labels but the model's, by name."""
    text = (await client.get("/metrics")).text
    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    assert all(sample.labels["model_name"] == MODEL for sample in samples)
    return {
        sample.name.removeprefix("piecework:"): sample.value
        for sample in samples
        if set(sample.labels) == {"model_name"}
    }


@pytest.mark.parametrize("path", ["/health", "/ready", "/health_generate", "/v1/health", "/ping"])
@pytest.mark.parametrize("state", EngineState)
async def test_healthy_only_while_the_engine_serves(
    client: httpx.AsyncClient, scripted: ScriptedEngine, path: str, state: EngineState
) -> None:
    scripted.state = state
    response = await client.get(path)
    if state is EngineState.READY:
        assert response.status_code == 200
    else:
        error_of(response, 503)
        assert int(response.headers["retry-after"]) > 0
        assert "num_errors_total{" not in (await client.get("/metrics")).text


async def test_probes_of_other_servers_need_no_key(scripted: ScriptedEngine) -> None:
    async with client_of(make_app(scripted, api_key="secret")) as client:
        assert (await client.get("/v1/health")).status_code == 200
        assert [(await client.request(m, "/ping")).status_code for m in ("GET", "POST")] == [
            200
        ] * 2
        assert (await client.get("/tokenizer_info")).status_code == 401


async def test_the_tokenizer_is_described(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    told = (await client.get("/tokenizer_info")).json()
    assert told["chat_template"] == scripted.tokenizer.chat_template
    ids = {each["content"]: int(id) for id, each in told["added_tokens_decoder"].items()}
    assert ids[told["eos_token"]] == scripted.tokenizer.eos_token_ids[0]
    assert all(
        scripted.tokenizer.decode([id], skip_special_tokens=False) == text
        for text, id in ids.items()
    )


@pytest.mark.parametrize("state", EngineState)
async def test_the_process_lives_whatever_its_engine_does(
    client: httpx.AsyncClient, scripted: ScriptedEngine, state: EngineState
) -> None:
    scripted.state = state
    assert (await client.get("/live")).status_code == 200


async def test_health_generate_makes_one_real_token(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    assert (await client.get("/health_generate")).status_code == 200
    assert [request.params.max_new_tokens for request in scripted.requests] == [1]


async def test_health_generate_gives_up(
    client: httpx.AsyncClient, scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "GENERATE_TIMEOUT", 0.05)
    scripted.script.held = True
    error_of(await client.get("/health_generate"), 503)
    assert len(scripted.dropped) == 1
    assert not scripted.running


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/v1/chat/completions",
        "/generate",
        "/v1/models",
        "/v1/tokenize",
        "/server_info",
    ],
)
async def test_an_engine_that_has_not_started_is_unavailable(
    client: httpx.AsyncClient, scripted: ScriptedEngine, path: str
) -> None:
    scripted.state, scripted.info = EngineState.STARTING, None
    body = (
        {"prompt": "x"} if "chat" not in path else {"messages": [{"role": "user", "content": "x"}]}
    )
    response = await (
        client.get(path)
        if "mod" in path or "info" in path
        else client.post(path, json={"text": "x", **body})
    )
    assert error_of(response, 503)["code"] == "engine_unavailable"
    detail = error_of(response, 503)
    assert "starting (preparing weights)" in detail["message"]
    assert (detail["phase"], detail["retry_after"]) == ("preparing weights", 7)
    assert response.headers["retry-after"] == "7"


async def test_requests_wait_while_the_engine_starts_again(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    scripted.state = EngineState.RESTARTING
    assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200


async def test_version(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json() == {"version": __version__}


async def test_the_documentation_lists_the_paths(client: httpx.AsyncClient) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    assert {
        "/v1/completions",
        "/v1/chat/completions",
        "/generate",
        "/health",
        "/v1/tokenize",
    } <= set(paths)
    assert (await client.get("/docs")).status_code == 200


async def test_the_one_model(client: httpx.AsyncClient) -> None:
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", CONTEXT_LENGTH)
    assert (await client.get(f"/v1/models/{MODEL}")).json() == card
    assert (
        error_of(await client.get("/v1/models/acme/other"), 404, "model")["code"]
        == "model_not_found"
    )


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_tokenize_and_back(
    client: httpx.AsyncClient, scripted: ScriptedEngine, prefix: str
) -> None:
    ids = scripted.tokenizer.encode("The fox")
    answer = (await client.post(f"{prefix}/tokenize", json={"prompt": "The fox"})).json()
    assert answer == {"tokens": ids, "count": len(ids), "max_model_len": CONTEXT_LENGTH}
    back = (await client.post(f"{prefix}/detokenize", json={"tokens": ids})).json()
    assert back == dict.fromkeys(("text", "prompt", "content"), "The fox")


async def test_tokenize_several_and_a_chat(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    encode = scripted.tokenizer.encode
    several = (await client.post("/tokenize", json={"prompt": ["The fox", ""]})).json()
    assert several["tokens"] == [encode("The fox"), encode("")]
    assert several["count"] == [len(ids) for ids in several["tokens"]]
    chat = (
        await client.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]})
    ).json()
    assert scripted.tokenizer.decode(chat["tokens"], skip_special_tokens=False).endswith(
        "<|im_start|>assistant\n"
    )
    back = (await client.post("/detokenize", json={"tokens": several["tokens"]})).json()
    assert back["text"] == ["The fox", ""]


@pytest.mark.parametrize(("skip", "text"), [(False, "<s>#"), (True, "#")])
async def test_detokenize_keeps_special_tokens_where_asked(
    client: httpx.AsyncClient, scripted: ScriptedEngine, skip: bool, text: str
) -> None:
    ids = [0, *scripted.tokenizer.encode("#", add_special_tokens=False)]
    assert (
        await client.post("/detokenize", json={"tokens": ids, "skip_special_tokens": skip})
    ).json()["text"] == text


async def test_metrics_count_what_happened(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    await client.post("/v1/completions", json={"prompt": [[5, 6, 7, 8], [9, 10]], "max_tokens": 3})
    await client.post("/v1/chat/completions", json={"messages": [], "n": 1})
    scripted.script.fail_after = 1
    await client.post("/v1/completions", json={"prompt": [5, 6]})
    values = await metrics_of(client)
    expected = {
        "num_requests_total": 3, "num_aborted_requests_total": 0, "prompt_tokens_total": 8,
        "cached_tokens_total": 4, "generation_tokens_total": 7,
        "time_to_first_token_seconds_count": 3, "inter_token_latency_seconds_count": 4,
        "e2e_request_latency_seconds_count": 2, "num_running_reqs": 3, "num_queue_reqs": 2,
        "num_used_tokens": 1024, "token_usage": 0.25, "cache_hit_rate": 0, "engine_up": 1,
    }  # fmt: skip
    assert {name: values[name] for name in expected} == expected
    text = (await client.get("/metrics")).text
    assert (
        f'piecework:num_errors_total{{model_name="{MODEL}",type="invalid_request_error"}} 1.0'
        in text
    )
    assert f'piecework:num_errors_total{{model_name="{MODEL}",type="server_error"}} 1.0' in text


def test_a_latency_counts_and_sums_each_value() -> None:
    latency = Latency("x_seconds", "", (0.25, 1.0))
    latency.observe(0.5, 3)
    latency.observe(0.25)
    samples = latency.family(MODEL).samples
    values = {
        sample.labels.get("le", sample.name.rpartition("_")[2]): sample.value for sample in samples
    }
    wanted = {"0.25": 1, "1.0": 4, "+Inf": 4, "count": 4, "sum": 1.75}
    assert {name: values[name] for name in wanted} == wanted


@pytest.mark.parametrize(("said", "told"), [("", True), ("0", True), ("True", False)])
async def test_metrics_tell_when_they_began_unless_told_not_to(
    scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, said: str, told: bool
) -> None:
    monkeypatch.setenv("PROMETHEUS_DISABLE_CREATED_SERIES", said)
    async with client_of(make_app(scripted)) as client:
        values = await metrics_of(client)
    assert ("num_requests_created" in values) == told
    assert ("e2e_request_latency_seconds_created" in values) == told
    assert values["num_requests_total"] == 0


async def test_metrics_tell_how_steps_ran(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    scripted.stats = EngineStats(
        piecewise_steps_total=9,
        graph_replays_total=7,
        padded_tokens_total=30,
        graph_fallbacks_total={"too_long": 2},
        prefill_steps_total=10,
        prefill_step_tokens_total=400,
        prefill_replays_total=5,
        prefill_replayed_tokens_total=100,
    )
    scripted.info = replace(
        INFO,
        graphs=GraphInfo(
            num_graphs=12,
            graph_bytes=4096,
            capture_seconds=1.5,
            passes={"noop": 3},
            passes_off={"async_tp": "there is one rank only"},
        ),
    )
    values = await metrics_of(client)
    assert (
        values["num_piecewise_steps_total"],
        values["num_graph_replays_total"],
        values["num_padded_tokens_total"],
    ) == (9, 7, 30)
    assert values["num_prefill_steps_total"] == 10
    assert (values["prefill_replay_share"], values["prefill_replay_token_share"]) == (0.5, 0.25)
    (state,) = (await client.get("/server_info")).json()["internal_states"]
    assert (state["prefill_replay_share"], state["prefill_replay_token_share"]) == (0.5, 0.25)
    assert (
        values["num_graphs"],
        values["graph_memory_bytes"],
        values["graph_capture_seconds"],
    ) == (12, 4096, 1.5)
    assert f'num_graph_fallbacks_total{{model_name="{MODEL}",reason="too_long"}} 2.0' in (
        text := (await client.get("/metrics")).text
    )
    assert f'pass_matches{{model_name="{MODEL}",pass="noop"}} 3.0' in text
    off = f'{{model_name="{MODEL}",pass="async_tp",reason="there is one rank only"}} 1.0'
    assert f"pass_off{off}" in text


async def test_metrics_count_aborted_sequences(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    scripted.script.held = True
    task = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x", "n": 2}))
    while len(scripted.running) < 2:
        await asyncio.sleep(0.005)
    await client.post("/abort_request", json={"abort_all": True})
    assert [choice["finish_reason"] for choice in (await task).json()["choices"]] == [
        "abort",
        "abort",
    ]
    assert (await metrics_of(client))["num_aborted_requests_total"] == 2


@pytest.mark.parametrize(
    "header", [None, "", f"Bearer {KEY}x", f"Basic {KEY}", "Bearer ", KEY, "Basic abc", "Bearer"]
)
async def test_the_wrong_key_is_refused(scripted: ScriptedEngine, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header.encode()}
    async with client_of(make_app(scripted, api_key=KEY), headers=headers) as client:
        for path in ("/v1/models", "/server_info", "/docs", "/v1/nowhere"):
            response = await client.get(path)
            assert error_of(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        error_of(await client.post("/generate", json={"text": "x"}), 401)
    assert scripted.requests == []


async def test_the_right_key_opens_and_monitoring_needs_none(scripted: ScriptedEngine) -> None:
    async with client_of(make_app(scripted, api_key=KEY)) as client:
        for path in ("/health", "/live", "/ready", "/metrics", "/health_generate"):
            assert (await client.get(path)).status_code == 200
        for scheme in ("Bearer", "bearer"):
            assert (
                await client.get(
                    "/v1/models", headers={"Authorization": f"{scheme} {KEY}".encode()}
                )
            ).status_code == 200


async def test_the_key_is_told_to_nobody(scripted: ScriptedEngine) -> None:
    async with client_of(
        make_app(scripted, api_key=KEY), headers={"Authorization": f"Bearer {KEY}".encode()}
    ) as client:
        assert "api_key" not in (await client.get("/server_info")).json()


async def test_request_ids_are_echoed_or_made(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version", headers={"X-Request-Id": "abc-1"})).headers[
        "x-request-id"
    ] == "abc-1"
    made = [(await client.get("/nowhere")).headers["x-request-id"] for _ in range(2)]
    assert len(set(made)) == 2
    for unusable in ("", "with space", "x" * 129, "é"):
        response = await client.get("/version", headers={"X-Request-Id": unusable.encode()})
        assert len(response.headers["x-request-id"]) == 32


async def test_an_unforeseen_error_tells_nothing_but_its_id(scripted: ScriptedEngine) -> None:
    def broken(_: Any) -> None:
        raise RuntimeError("secret")

    scripted.add_request = broken  # type: ignore[method-assign]
    app = make_app(scripted)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://test"
    ) as client:
        response = await client.post(
            "/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "abc"}
        )
        error_of(response, 500)
        assert "secret" not in response.text
        assert response.headers.get_list("x-request-id") == ["abc"]


async def test_a_full_queue_says_when_to_come_back(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    scripted.script.room = 2
    for stream in (False, True):
        response = await client.post(
            "/v1/completions", json={"prompt": "x", "n": 3, "stream": stream}
        )
        assert error_of(response, 503)["code"] == "queue_full"
        assert response.headers["retry-after"] == "1"
        assert not scripted.running
    assert (await client.post("/v1/completions", json={"prompt": "x", "n": 2})).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
async def test_an_engine_that_fails_is_a_server_error(
    client: httpx.AsyncClient, scripted: ScriptedEngine, path: str
) -> None:
    scripted.script.fail_after = 2
    response = await client.post(path, json={"prompt": "x", "text": "x"})
    assert "it broke" in error_of(response, 500)["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/v1/chat/completions"])
async def test_an_error_in_a_stream_is_its_last_event(
    client: httpx.AsyncClient, scripted: ScriptedEngine, path: str
) -> None:
    scripted.script.fail_after = 2
    body = {
        "prompt": "x",
        "text": "x",
        "messages": [{"role": "user", "content": "x"}],
        "stream": True,
    }
    if path == "/generate":
        del body["prompt"]
    response = await client.post(path, json=body)
    assert response.status_code == 200
    *_, last, end = response.text.split("\n\n")
    assert last.startswith('data: {"error":{"message":')
    assert end == ""
    assert (
        f'num_errors_total{{model_name="{MODEL}",type="server_error"}} 1.0'
        in (await client.get("/metrics")).text
    )
    scripted.script.fail_after = None
    assert events(await client.post(path, json=body))
