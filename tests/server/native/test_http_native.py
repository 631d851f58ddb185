"""SGLang's native endpoints: `/generate` in all its forms, and those that tell of the server."""

from __future__ import annotations

import asyncio
import json
from dataclasses import fields
from typing import Any

import httpx
import pytest
from http_fixtures import client_of, error_of, events
from scripted_engine import CONTEXT_LENGTH, REPLY, ScriptedEngine, scripted_logprob

from piecework.runtime.config.engine import EngineConfig
from piecework.server.app import create_app
from piecework.server.config.server import ServerConfig


async def generate(client: httpx.AsyncClient, **body: Any) -> Any:
    response = await client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_an_answer_has_sglangs_members(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    answer = await generate(client, text="Hello", sampling_params={"max_new_tokens": 3})
    ids = scripted.tokenizer.encode(REPLY)[:3]
    meta = answer.pop("meta_info")
    assert answer == {"text": scripted.tokenizer.decode(ids), "output_ids": ids}
    assert meta.pop("e2e_latency") > 0
    assert meta.pop("id") == scripted.requests[0].name
    assert meta == {
        "finish_reason": {"type": "length", "length": 3},
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "cached_tokens": 1,
    }


async def test_the_defaults_are_sglangs(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    await generate(client, text="Hello")
    params = scripted.requests[0].params
    assert (params.max_new_tokens, params.temperature, params.top_p, params.top_k) == (
        128,
        1.0,
        1.0,
        -1,
    )
    await generate(client, input_ids=[5, 6], sampling_params={"max_new_tokens": None})
    assert scripted.requests[1].params.max_new_tokens == CONTEXT_LENGTH - 2


async def test_every_sampling_parameter_reaches_the_engine(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    sampling = {
        "max_new_tokens": 9, "min_new_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7,
        "min_p": 0.1, "presence_penalty": 0.3, "frequency_penalty": -0.4, "repetition_penalty": 1.1,
        "sampling_seed": 11, "stop_token_ids": [9, 8], "ignore_eos": True, "logit_bias": {"5": -1},
        "stop": "zzz", "skip_special_tokens": False, "no_stop_trim": True,
        "spaces_between_special_tokens": True,
    }  # fmt: skip
    await generate(client, text="Hello", sampling_params=sampling, priority=3)
    (request,) = scripted.requests
    compared = [field.name for field in fields(request.params) if field.compare]
    assert {name: getattr(request.params, name) for name in compared} == {
        "max_new_tokens": 9, "min_new_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7,
        "min_p": 0.1, "presence_penalty": 0.3, "frequency_penalty": -0.4, "repetition_penalty": 1.1,
        "seed": 11, "stop_token_ids": [8, 9], "ignore_eos": True, "logit_bias": {5: -1.0},
        "logprobs": None, "prompt_logprobs": None, "prompt_logprobs_start": 0, "grammar": None,
        "thinking_budget": None, "thought_begin_ids": [], "thought_end_ids": [],
        "extra_args": None,
    }  # fmt: skip
    assert (
        request.text.stop,
        request.text.include_stop,
        request.text.skip_special_tokens,
        request.priority,
    ) == (["zzz"], True, False, 3)


async def test_a_batch_is_answered_with_a_list(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    answers = await generate(
        client,
        text=["Hello", "The"],
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}],
    )
    assert [len(answer["output_ids"]) for answer in answers] == [1, 2]
    answers = await generate(
        client,
        input_ids=[[5], [6, 7]],
        sampling_params={"max_new_tokens": 1, "n": 2, "sampling_seed": 4},
    )
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [1, 1, 2, 2]
    assert [request.params.seed for request in scripted.requests[2:]] == [4, 5, 4, 5]
    assert len(await generate(client, text=["Hello"], sampling_params={"max_new_tokens": 1})) == 1


async def test_the_client_may_choose_ids(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    await generate(client, text="Hello", rid="mine", sampling_params={"max_new_tokens": 1})
    await generate(client, text=["Hello", "The"], rid="ours", sampling_params={"max_new_tokens": 1})
    await generate(
        client, text=["Hello", "The"], rid=["a", "b"], sampling_params={"max_new_tokens": 1, "n": 2}
    )
    assert [request.name for request in scripted.requests] == [
        "mine",
        "ours-0",
        "ours-1",
        "a-0",
        "a-1",
        "b-0",
        "b-1",
    ]


async def test_an_id_in_use_is_refused(client: httpx.AsyncClient, scripted: ScriptedEngine) -> None:
    scripted.script.held = True
    first = asyncio.create_task(client.post("/generate", json={"text": "Hello", "rid": "mine"}))
    while not scripted.running:
        await asyncio.sleep(0.005)
    error_of(await client.post("/generate", json={"text": "Hello", "rid": "mine"}), 400, "rid")
    scripted.script.held = False
    assert (await first).status_code == 200
    assert (
        await client.post("/generate", json={"text": "Hello", "rid": "mine"})
    ).status_code == 200


async def test_what_stopped_it_is_told(client: httpx.AsyncClient, scripted: ScriptedEngine) -> None:
    stopped = await generate(
        client, text="Hello", sampling_params={"stop": ["old friend", "there"]}
    )
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": "there"}
    assert stopped["text"] == "Hello "
    kept = await generate(
        client, text="Hello", sampling_params={"stop": "there", "no_stop_trim": True}
    )
    assert kept["text"] == "Hello there"
    scripted.script.reply = lambda request: [70, 71, 2]
    ended = await generate(client, text="Hello")
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}


async def test_logprobs_of_output_and_prompt(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    options: dict[str, Any] = {
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "return_text_in_logprobs": True,
    }
    answer = await generate(
        client, input_ids=[40, 41, 42], sampling_params={"max_new_tokens": 1}, **options
    )
    meta, token = answer["meta_info"], answer["output_ids"][0]
    text = scripted.tokenizer.decode

    def triples(token_id: int, position: int) -> list[list[Any]]:
        return [
            [value, alternative, text([alternative])]
            for alternative, value in scripted_logprob(token_id, position, 2).top
        ]

    first = [None, 40, text([40])]
    assert meta["input_token_logprobs"] == [
        first,
        *([scripted_logprob(t, t - 40, 0).logprob, t, text([t])] for t in (41, 42)),
    ]
    assert meta["input_top_logprobs"] == [None, triples(41, 1), triples(42, 2)]
    assert meta["output_token_logprobs"] == [
        [scripted_logprob(token, 3, 0).logprob, token, text([token])]
    ]
    assert meta["output_top_logprobs"] == [triples(token, 3)]


async def test_prompt_logprobs_begin_where_asked(client: httpx.AsyncClient) -> None:
    sampling = {"max_new_tokens": 1}
    late = await generate(
        client,
        input_ids=[40, 41, 42],
        return_logprob=True,
        logprob_start_len=2,
        sampling_params=sampling,
    )
    assert [entry[1:] for entry in late["meta_info"]["input_token_logprobs"]] == [[42, None]]
    none = await generate(
        client, input_ids=[40, 41, 42], return_logprob=True, sampling_params=sampling
    )
    assert none["meta_info"]["input_token_logprobs"] == []
    assert "output_top_logprobs" not in none["meta_info"]


async def test_zero_tokens_score_the_prompt(client: httpx.AsyncClient) -> None:
    answer = await generate(
        client,
        input_ids=[40, 41],
        return_logprob=True,
        logprob_start_len=0,
        sampling_params={"max_new_tokens": 0, "temperature": 0},
    )
    assert (answer["text"], answer["output_ids"]) == ("", [])
    assert len(answer["meta_info"]["input_token_logprobs"]) == 2


async def test_a_stream_is_cumulative(client: httpx.AsyncClient, scripted: ScriptedEngine) -> None:
    body = {
        "text": "Hello",
        "stream": True,
        "return_logprob": True,
        "sampling_params": {"max_new_tokens": 4},
    }
    pieces = events(await client.post("/generate", json=body))
    ids = scripted.tokenizer.encode(REPLY)[:4]
    assert [piece["output_ids"] for piece in pieces] == [ids[: i + 1] for i in range(4)]
    assert [piece["text"] for piece in pieces] == [
        scripted.tokenizer.decode(ids[: i + 1]) for i in range(4)
    ]
    assert [len(piece["meta_info"]["output_token_logprobs"]) for piece in pieces] == [1, 2, 3, 4]
    reasons = [piece["meta_info"]["finish_reason"] for piece in pieces]
    assert reasons == [None, None, None, {"type": "length", "length": 4}]


async def test_a_streamed_batch_has_indices(client: httpx.AsyncClient) -> None:
    body = {"text": ["Hello", "The"], "stream": True, "sampling_params": {"max_new_tokens": 3}}
    pieces = events(await client.post("/generate", json=body))
    assert sorted(piece["index"] for piece in pieces) == [0, 0, 0, 1, 1, 1]
    assert "index" not in events(await client.post("/generate", json={**body, "text": "Hello"}))[0]


async def test_put_works_too(client: httpx.AsyncClient) -> None:
    assert (await client.put("/generate", json={"text": "Hello"})).status_code == 200


async def test_abort_ends_one_request_with_all_its_parts(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    scripted.script.held = True
    body = {"text": "Hello", "sampling_params": {"n": 2}}
    mine, other = (
        asyncio.create_task(client.post("/generate", json={**body, "rid": rid}))
        for rid in ("mine", "other")
    )
    while len(scripted.running) < 4:
        await asyncio.sleep(0.005)
    assert (await client.post("/abort_request", json={"rid": "mine"})).json() == {"aborted": 2}
    answers = (await mine).json()
    assert [answer["meta_info"]["finish_reason"]["type"] for answer in answers] == [
        "abort",
        "abort",
    ]
    assert not other.done()
    assert (await client.post("/abort_request", json={"abort_all": True})).json() == {"aborted": 2}
    assert (await other).status_code == 200


async def test_aborting_one_id_leaves_another_clients_that_begins_alike(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    scripted.script.held = True
    body = {"text": "Hello", "sampling_params": {"n": 2}}
    mine = asyncio.create_task(client.post("/generate", json={**body, "rid": "mine"}))
    strange = asyncio.create_task(client.post("/generate", json={**body, "rid": "mine-7"}))
    while len(scripted.running) < 4:
        await asyncio.sleep(0.005)
    assert (await client.post("/abort_request", json={"rid": "mine-7"})).json() == {"aborted": 2}
    await strange
    again = asyncio.create_task(client.post("/generate", json={**body, "rid": "mine-7"}))
    while len(scripted.running) < 4:
        await asyncio.sleep(0.005)
    assert (await client.post("/abort_request", json={"rid": "mine"})).json() == {"aborted": 2}
    await mine
    assert not again.done()
    scripted.script.held = False
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in (await again).json()} == {
        "length"
    }


@pytest.mark.parametrize(("first", "second"), [("mine", "mine-1"), ("mine-1", "mine")])
async def test_a_request_cannot_take_the_id_of_a_part_of_another(
    client: httpx.AsyncClient, scripted: ScriptedEngine, first: str, second: str
) -> None:
    scripted.script.held = True
    body = {"text": "Hello", "sampling_params": {"n": 2}}
    task = asyncio.create_task(client.post("/generate", json={**body, "rid": first}))
    while len(scripted.running) < 2:
        await asyncio.sleep(0.005)
    assert (
        "mine-1"
        in error_of(await client.post("/generate", json={**body, "rid": second}), 400, "rid")[
            "message"
        ]
    )
    assert len(scripted.running) == 2
    scripted.script.held = False
    assert (await task).status_code == 200


async def test_one_sample_or_one_prompt_of_a_batch_can_be_aborted(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    scripted.script.held = True
    body = {"text": ["Hello", "The"], "rid": "ours", "sampling_params": {"n": 2}}
    task = asyncio.create_task(client.post("/generate", json=body))
    while len(scripted.running) < 4:
        await asyncio.sleep(0.005)
    counts = [
        (await client.post("/abort_request", json={"rid": rid})).json()["aborted"]
        for rid in ("ours-1-0", "ours-0", "ours-")
    ]
    assert counts == [1, 2, 0]
    scripted.script.held = False
    reasons = [answer["meta_info"]["finish_reason"]["type"] for answer in (await task).json()]
    assert reasons == ["abort", "abort", "abort", "length"]


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_flush_cache(client: httpx.AsyncClient, method: str) -> None:
    response = await client.request(method, "/flush_cache")
    assert (response.status_code, response.json()) == (200, {"success": True, "freed_tokens": 128})


@pytest.mark.parametrize("path", ["/get_model_info", "/model_info"])
async def test_model_info(client: httpx.AsyncClient, path: str) -> None:
    info = (await client.get(path)).json()
    assert (info["model_path"], info["tokenizer_path"], info["is_generation"]) == (
        "models/toy",
        "models/toy",
        True,
    )


@pytest.mark.parametrize("path", ["/get_server_info", "/server_info"])
async def test_server_info(client: httpx.AsyncClient, path: str) -> None:
    info = (await client.get(path)).json()
    assert (info["context_length"], info["kv_tokens"], info["status"], info["port"]) == (
        CONTEXT_LENGTH,
        4096,
        "ready",
        30000,
    )
    assert info["internal_states"][0]["kv_tokens_used"] == 1024


async def test_server_info_says_where_kv_events_are(scripted: ScriptedEngine) -> None:
    told = {"endpoint": "tcp://127.0.0.1:5557", "topic": "kv"}
    for more, expected in (({}, {**told, "replay_endpoint": None}), ({"publisher": "null"}, None)):
        engine = EngineConfig(model_path="toy", kv_events_config=json.dumps(told | more))
        app = create_app(scripted, ServerConfig(engine=engine))
        async with client_of(app) as client:
            (state,) = (await client.get("/server_info")).json()["internal_states"]
            assert state["kv_events"] == expected


async def test_loads(client: httpx.AsyncClient) -> None:
    told = (await client.get("/v1/loads?include=core")).json()
    (load,) = told["loads"]
    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (3, 2)
    assert (load["num_used_tokens"], load["token_usage"]) == (1024, 0.25)
    assert told["aggregate"]["total_reqs"] == 5 and told["dp_rank_count"] == 1
    (older,) = (await client.get("/get_load")).json()
    assert older == {"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 2, "num_tokens": 1024}
