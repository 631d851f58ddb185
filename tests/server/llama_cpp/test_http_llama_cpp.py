"""The endpoints of llama.cpp's server: `/completion`, `/infill`, `/props`, `/slots`,
`/apply-template`, and llama.cpp's members of `/tokenize`, `/detokenize` and `/health`.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_fixtures import MODEL, client_of, events, make_app
from scripted_engine import CONTEXT_LENGTH, INFO, REPLY, ScriptedEngine
from toy_tokenizer import toy_tokenizer

from piecework.runtime.sampling.defaults import SamplingDefaults
from piecework.runtime.tokenizer.data import TokenizerData
from piecework.runtime.tokenizer.tokenizer import Tokenizer
from piecework.server.config.keys import hash_of
from piecework.server.engine.state import EngineState

PATHS = ("/completion", "/infill", "/apply-template")


async def complete(client: httpx.AsyncClient, **body: Any) -> Any:
    answer = await client.post("/completion", json={"prompt": "Hello", "n_predict": 4, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(answer: httpx.Response, status: int) -> str:
    """Check that an answer is an error in llama.cpp's format. Return its type."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"code", "message", "type"}
    assert error["code"] == status
    return str(error["type"])


@pytest.mark.parametrize("path", ["/completion", "/completions"])
async def test_a_completion_has_llama_cpps_members(client: httpx.AsyncClient, path: str) -> None:
    answer = (await client.post(path, json={"prompt": "Hello", "n_predict": 4, "seed": 5})).json()
    assert answer["content"] and REPLY.startswith(answer["content"])
    assert answer["stop"] is True and answer["stop_type"] == "limit"
    assert answer["truncated"] is False and answer["has_new_line"] is False
    assert answer["tokens"] == [] and answer["model"] == MODEL and answer["prompt"] == "Hello"
    timings = answer["timings"]
    assert (timings["predicted_n"], answer["tokens_predicted"]) == (4, 4)
    assert timings["prompt_n"] + timings["cache_n"] == answer["tokens_evaluated"]
    assert timings["prompt_ms"] >= 0 and timings["predicted_ms"] >= 0
    settings = answer["generation_settings"]
    assert (settings["n_predict"], settings["seed"], settings["n_ctx"]) == (4, 5, CONTEXT_LENGTH)


async def test_a_stream_gives_the_pieces_of_the_whole_answer(client: httpx.AsyncClient) -> None:
    body = {"prompt": ["Hello", "The"], "n_predict": 5, "n_probs": 2}
    whole = (await client.post("/completion", json={**body, "return_tokens": True})).json()
    assert [one["index"] for one in whole] == [0, 1]
    pieces = events(await client.post("/completion", json={**body, "stream": True}))
    for answer in whole:
        own = [piece for piece in pieces if piece["index"] == answer["index"]]
        *before, last = own
        assert [piece["stop"] for piece in before] == [False] * len(before)
        assert "".join(piece["content"] for piece in own) == answer["content"]
        assert [token for piece in before for token in piece["tokens"]] == answer["tokens"]
        found = [entry for piece in before for entry in piece["completion_probabilities"]]
        assert found == answer["completion_probabilities"]
        assert "timings" not in before[0]
        assert (last["content"], last["tokens"], last["stop_type"]) == ("", [], "limit")
        assert last["generation_settings"]["stream"] is True
    timed = events(
        await client.post("/completion", json={**body, "stream": True, "timings_per_token": True})
    )
    assert all("timings" in piece for piece in timed)


async def test_why_a_completion_ended_is_told(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    by_word = await complete(client, n_predict=-1, stop=["", "there"])
    assert (by_word["stop_type"], by_word["stopping_word"]) == ("word", "there")
    full = await complete(client, n_predict=-1)
    assert (full["stop_type"], full["truncated"]) == ("limit", True)
    assert full["tokens_predicted"] == CONTEXT_LENGTH - full["tokens_evaluated"]
    end = scripted.tokenizer.eos_token_ids[0]
    scripted.script.reply = lambda request: [*scripted.tokenizer.encode("a\nb"), end]
    ended = await complete(client, n_predict=-1)
    assert (ended["stop_type"], ended["content"]) == ("eos", "a\nb")
    assert ended["has_new_line"] is True


async def test_every_parameter_reaches_the_engine(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    await complete(
        client, temperature=-1, top_k=7, top_p=0.5, min_p=0.25, repeat_penalty=1.5,
        presence_penalty=0.5, frequency_penalty=-0.5, seed=3, n_cmpl=2, n_probs=3,
        stop="zzz", ignore_eos=True, logit_bias=[[5, 1.5], ["the", False], [6, -1e9]],
        grammar='root ::= [a-z]+', cache_prompt=False, id_slot=0,
    )  # fmt: skip
    first, second = scripted.requests
    params = first.params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.0, 7, 0.5, 0.25)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (
        1.5,
        0.5,
        -0.5,
    )
    assert (params.seed, second.params.seed, params.max_new_tokens) == (3, 4, 4)
    assert (params.logprobs, params.ignore_eos, first.text.stop) == (3, True, ["zzz"])
    banned = scripted.tokenizer.encode("the", add_special_tokens=False)
    assert params.logit_bias == {5: 1.5, 6: -100.0, **dict.fromkeys(banned, -100.0)}
    assert params.grammar is not None
    await complete(client, logit_bias={"5": 2, "the": 1}, max_tokens=2, json_schema={})
    params = scripted.requests[-1].params
    assert params.logit_bias == {5: 2.0, **dict.fromkeys(banned, 1.0)}
    assert params.max_new_tokens == 4 and params.grammar is not None


async def test_the_models_defaults_come_before_llama_cpps(scripted: ScriptedEngine) -> None:
    defaults = SamplingDefaults({"temperature": 0.25, "repetition_penalty": 1.25})
    async with client_of(make_app(scripted, defaults=defaults)) as client:
        settings = (await complete(client))["generation_settings"]
        told = (await client.get("/props")).json()["default_generation_settings"]["params"]
    expected = {"temperature": 0.25, "repeat_penalty": 1.25, "top_k": 40, "top_p": 0.95,
                "min_p": 0.05, "seed": 2**32 - 1}  # fmt: skip
    assert {name: settings[name] for name in expected} == expected
    assert {name: told[name] for name in expected} == expected


async def test_prompts_have_every_form(client: httpx.AsyncClient, scripted: ScriptedEngine) -> None:
    encode = scripted.tokenizer.encode
    for prompt, expected in (
        ("Hello", [encode("Hello")]),
        ([5, 6.0], [[5, 6]]),
        ([5, "the", 6], [[5, *encode("the", add_special_tokens=False), 6]]),
        (["Hello"], [encode("Hello")]),
        ([[5, 6], "Hello", [7, "the"]], [[5, 6], encode("Hello"), [7, *encode("the")]]),
        ({"prompt_string": "Hello"}, [encode("Hello")]),
        ([{"prompt_string": "Hello"}, [5]], [encode("Hello"), [5]]),
    ):
        scripted.requests.clear()
        answer = await complete(client, prompt=prompt)
        assert [request.prompt_ids for request in scripted.requests] == expected
        assert isinstance(answer, list) == (len(expected) > 1)


async def test_an_answer_may_be_cut_to_named_members(client: httpx.AsyncClient) -> None:
    names = ["content", "generation_settings/n_predict", "nothing", "content/__class__"]
    answer = await complete(client, response_fields=names)
    assert answer == {"content": answer["content"], "generation_settings/n_predict": 4}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": {}}),
        ("/completion", {"prompt": [True]}),
        ("/completion", {"prompt": ["a", None]}),
        ("/completion", {"prompt": [[]]}),
        ("/completion", {"prompt": []}),
        ("/completion", {"prompt": ["a"] * 5000}),
        ("/completion", {"prompt": [10**9]}),
        ("/completion", {"prompt": {"prompt_string": "a", "multimodal_data": ["aaaa"]}}),
        ("/completion", {"prompt": "a", "n_predict": -3}),
        ("/completion", {"prompt": "a", "n": 2}),
        ("/completion", {"prompt": "a", "post_sampling_probs": True}),
        ("/completion", {"prompt": "a", "grammar": "root ::= ("}),
        ("/completion", {"prompt": "a", "grammar": 'root ::= "a"', "json_schema": {}}),
        ("/completion", {"prompt": "a", "logit_bias": [[5]]}),
        ("/completion", {"prompt": "a", "logit_bias": [[5, True]]}),
        ("/completion", {"prompt": "a", "logit_bias": [[5, 10**400]]}),
        ("/completion", {"prompt": "a", "logit_bias": [[-1, 1]]}),
        ("/completion", {"prompt": "a", "repeat_penalty": 9}),
        ("/completion", {"prompt": "a", "n_probs": 101}),
        ("/completion", {"prompt": "a", "mirostat_tau": 1, "dry_multiplier": 1}),
        ("/completion", {"prompt": "a", "response_fields": ["a"] * 65}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": 5}]}),
        ("/infill", {"input_prefix": "a"}),
        ("/apply-template", {"messages": []}),
    ],
    ids=str,
)
async def test_bad_input_is_refused_in_llama_cpps_format(
    client: httpx.AsyncClient, scripted: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    assert refused(await client.post(path, json=body), 400) == "invalid_request_error"
    assert not scripted.requests


async def test_errors_have_llama_cpps_types(scripted: ScriptedEngine) -> None:
    body = {"prompt": "a", "n_predict": 2}
    async with client_of(make_app(scripted, api_key="secret")) as client:
        for path in PATHS:
            answer = await client.post(path, json=body)
            assert refused(answer, 401) == "authentication_error"
        for path in ("/props", "/slots"):
            assert refused(await client.get(path), 401) == "authentication_error"
    async with client_of(make_app(scripted)) as client:
        answer = await client.post("/completion", json={**body, "prompt": [5] * CONTEXT_LENGTH})
        assert refused(answer, 400) == "exceed_context_size_error"
        answer = await client.post("/completion", json={**body, "model": "other"})
        assert refused(answer, 404) == "not_found_error"
        scripted.script.fail_after = 1
        assert refused(await client.post("/completion", json=body), 500) == "server_error"
        streamed = events(await client.post("/completion", json={**body, "stream": True}))
        assert streamed[-1]["error"].keys() == {"code", "message", "type"}
        scripted.script.room = 0
        assert refused(await client.post("/completion", json=body), 503) == "unavailable_error"


async def test_keys_without_admin_may_complete_but_not_see_the_slots(
    scripted: ScriptedEngine, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.jsonl"
    keys.write_text(json.dumps({"name": "a", "sha256": hash_of(b"secret")}))
    async with client_of(make_app(scripted, api_keys=str(keys))) as client:
        client.headers["Authorization"] = "Bearer secret"
        await complete(client)
        assert (await client.get("/props")).status_code == 200
        assert refused(await client.get("/slots"), 403) == "permission_error"


async def test_a_client_that_leaves_ends_its_completions(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    scripted.script.held = True
    asked = asyncio.create_task(complete(client, prompt=["a", "b"], n_predict=100))
    while len(scripted.running) < 2:
        await asyncio.sleep(0.005)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert not scripted.running and len(scripted.dropped) == 2


MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
FILES = ["<|repo_name|>", "<|file_sep|>"]


def infilling(marks: list[str]) -> ScriptedEngine:
    """Return an engine whose tokenizer has these special tokens."""
    toy = toy_tokenizer()
    backend = type(toy.backend).from_str(toy.backend.to_str())
    backend.add_special_tokens(marks)
    data = TokenizerData(backend=backend, special_tokens={}, eos_token_ids=[2], chat_templates={})
    return ScriptedEngine(Tokenizer(data))


@pytest.mark.parametrize("has_files", [True, False])
async def test_infill_puts_the_parts_in_the_models_order(has_files: bool) -> None:
    scripted = infilling([*MARKS, *FILES] if has_files else MARKS)
    body = {
        "input_prefix": "def f(", "input_suffix": ")", "prompt": "a", "n_predict": 3,
        "input_extra": [{"filename": "b.py", "text": "import os"}, {"text": "x"}],
    }  # fmt: skip
    async with client_of(make_app(scripted)) as client:
        answer = await client.post("/infill", json=body)
        streamed = events(await client.post("/infill", json={**body, "stream": True}))
    assert answer.status_code == 200, answer.text
    gap = "<|fim_prefix|>def f(<|fim_suffix|>)<|fim_middle|>a"
    before = (
        "<|repo_name|>repository\n<|file_sep|>b.py\nimport os\n<|file_sep|>tmp\nx\n"
        "<|file_sep|>filename\n"
        if has_files
        else "import os\nx\n"
    )
    assert answer.json()["prompt"] == before + gap
    assert "".join(piece["content"] for piece in streamed) == answer.json()["content"]
    stops = [scripted.tokenizer.backend.token_to_id(name) for name in FILES] if has_files else []
    assert scripted.requests[0].params.stop_token_ids == stops


async def test_properties_are_those_of_the_model(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    told = (await client.get("/props")).json()
    assert told["total_slots"] == INFO.max_running_requests
    assert told["chat_template"] == scripted.tokenizer.chat_template
    assert (told["bos_token"], told["eos_token"]) == ("<s>", "<|im_end|>")
    assert (told["model_alias"], told["model_path"]) == (MODEL, "models/toy")
    assert told["default_generation_settings"]["n_ctx"] == CONTEXT_LENGTH


async def test_slots_are_the_running_requests_and_no_text(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    total = INFO.max_running_requests
    free = (await client.get("/slots")).json()
    assert [slot["id"] for slot in free] == list(range(total))
    assert not any(slot["is_processing"] for slot in free)
    scripted.script.held = True
    asked = asyncio.create_task(complete(client, prompt=["secret"] * (total + 1)))
    while len(scripted.running) <= total:
        await asyncio.sleep(0.005)
    assert not any(slot["is_processing"] for slot in (await client.get("/slots")).json())
    for request in scripted.requests[:-1]:
        request.started = 1.0
    answer = await client.get("/slots")
    assert all(slot["is_processing"] for slot in answer.json())
    assert answer.json()[0]["next_token"]["n_remain"] == 4 and "secret" not in answer.text
    assert refused(await client.get("/slots?fail_on_no_slot=1"), 503) == "unavailable_error"
    scripted.script.held = False
    await asked
    assert (await client.get("/slots?fail_on_no_slot=1")).status_code == 200


async def test_a_template_is_applied_as_a_chat_does(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    text = (await client.post("/apply-template", json={"messages": messages})).json()["prompt"]
    await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    ids = scripted.tokenizer.encode(text, add_special_tokens=False)
    assert scripted.requests[0].prompt_ids == ids
    refused(await client.post("/apply-template", json={"messages": messages, "model": "x"}), 404)


async def test_content_is_tokenized_as_llama_cpp_does(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    encode = scripted.tokenizer.encode
    text = "The fox 媽"
    plain = (await client.post("/tokenize", json={"content": text})).json()["tokens"]
    assert plain == encode(text, add_special_tokens=False)
    pieces = (await client.post("/tokenize", json={"content": text, "with_pieces": True})).json()
    assert [piece["id"] for piece in pieces["tokens"]] == plain
    spelled = [
        piece.encode() if isinstance(piece, str) else bytes(piece)
        for piece in (each["piece"] for each in pieces["tokens"])
    ]
    assert b"".join(spelled).decode() == text
    assert any(isinstance(each["piece"], list) for each in pieces["tokens"])
    back = (await client.post("/detokenize", json={"tokens": plain})).json()
    assert back["content"] == back["prompt"] == text
    for body in (
        {"content": "<s>", "parse_special": False},
        {"content": text, "prompt": text},
        {"prompt": text, "with_pieces": True},
        {"content": "a b " * 70_000, "with_pieces": True},
    ):
        assert (await client.post("/tokenize", json=body)).status_code == 400
    answer = await client.post("/tokenize", json={"content": text, "parse_special": False})
    assert answer.json()["tokens"] == plain


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
async def test_health_is_ok_or_503(
    client: httpx.AsyncClient, scripted: ScriptedEngine, path: str
) -> None:
    answer = await client.get(path)
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    scripted.state = EngineState.STARTING
    assert (await client.get(path)).status_code == 503
