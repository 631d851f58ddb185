"""Bad input: each is answered 4xx in OpenAI's error shape that names the parameter, nothing reaches
the engine, nothing breaks.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from http_fixtures import error_of
from scripted_engine import ScriptedEngine

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
USER = {"role": "user", "content": "Hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hello"},
    CHAT: {"messages": [USER]},
    GENERATE: {"text": "Hello"},
}
JSON = {"Content-Type": "application/json"}
UNKNOWN_TOKEN = 400
"""The toy tokenizer has fewer tokens, the scripted model has more."""

SHARED: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n"),
    ({"n": 10_000}, "n"),
    ({"n": "2"}, "n"),
    ({"n": True}, "n"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 1e6}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**70}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-46}, "repetition_penalty"),
    ({"stop": 5}, "stop"),
    ({"stop": [5]}, "stop"),
    ({"stop": ["x", ""]}, "stop"),
    ({"stop": ["x"] * 1000}, "stop"),
    ({"stop": "x" * 10_000}, "stop"),
    ({"stop_token_ids": [UNKNOWN_TOKEN]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": ["x"]}, "stop_token_ids[0]"),
    ({"logit_bias": {str(UNKNOWN_TOKEN): 1}}, "logit_bias"),
    ({"logit_bias": {"hello": 1}}, "logit_bias"),
    ({"logit_bias": {"-5": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": 10**400}}, "logit_bias"),
    ({"logit_bias": {"5": "x"}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"regex": "[ab"}, "regex"),
    ({"regex": ["ab"]}, "regex"),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
    ({"ebnf": "root"}, "ebnf"),
    ({"json_schema": "{"}, "json_schema"),
    ({"json_schema": "[]"}, "json_schema"),
    ({"json_schema": "[" * 5000 + "]" * 5000}, "json_schema"),
    ({"json_schema": {"type": "nope"}}, "json_schema"),
    ({"json_schema": {"$ref": "#"}}, "json_schema"),
    ({"structural_tag": "{}"}, "structural_tag"),
]
"""What is wrong on every generating endpoint: on /generate as sampling parameters."""
OPENAI: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"best_of": 200}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stream": "true"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options.include_usage"),
    ({"response_format": {"type": "json"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": []}}}},
        "response_format.json_schema",
    ),
    ({"guided_json": {"minimum": "x"}}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": "ab"}}, "structured_outputs.choice"),
    ({"priority": 2**40}, "priority"),
    ({"bad_words": ["x"]}, "bad_words"),
    ({"allowed_token_ids": [5]}, "allowed_token_ids"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"prompt_logprobs": True}, "prompt_logprobs"),
    ({"no_stop_trim": True}, "no_stop_trim"),
    ({"moderation": {"model": "x"}}, "moderation"),
    ({"model": 5}, "model"),
]
FOR_ONE: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompt"),
    (COMPLETIONS, {"prompt": [5, "a"]}, "prompt"),
    (COMPLETIONS, {"prompt": [5, True]}, "prompt"),
    (COMPLETIONS, {"prompt": [[5], 5]}, "prompt"),
    (COMPLETIONS, {"prompt": 5}, "prompt"),
    (COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
    (COMPLETIONS, {"prompt": [UNKNOWN_TOKEN]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [10**400]}, "prompt"),
    (COMPLETIONS, {"prompt": [[5]] * 5000}, "prompt"),
    (COMPLETIONS, {"prompt": [[5]] * 100, "n": 100}, "prompt"),
    (COMPLETIONS, {"logprobs": 101}, "logprobs"),
    (COMPLETIONS, {"logprobs": -1}, "logprobs"),
    (COMPLETIONS, {"logprobs": True}, "logprobs"),
    (COMPLETIONS, {"logprobs": 101, "echo": True}, "logprobs"),
    (COMPLETIONS, {"suffix": "end"}, "suffix"),
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "Hi"}, "messages"),
    (CHAT, {"messages": ["Hi"]}, "messages[0]"),
    (CHAT, {"messages": [USER, {"role": "king", "content": "x"}]}, "messages[1].role"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        CHAT,
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        },
        "messages[0].content[0].image_url",
    ),
    (CHAT, {"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content"),
    (
        CHAT,
        {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
        "messages[1].tool_calls[0].function",
    ),
    (CHAT, {"messages": [{**USER, "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    (CHAT, {"messages": [{**USER, "refusal": "No."}]}, "messages[0].refusal"),
    (CHAT, {"messages": [USER, {"role": "assistant"}]}, "messages[1].content"),
    (
        CHAT,
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}]},
        "messages[1].content",
    ),
    (
        CHAT,
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "function_call": CALL["function"]},
            ]
        },
        "messages[1].function_call",
    ),
    (CHAT, {"messages": [USER, {"role": "assistant", "audio": {"id": "a"}}]}, "messages[1].audio"),
    (
        CHAT,
        {"messages": [USER, {"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}]},
        "messages[1].tool_calls[0].type",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]},
        "messages[0].content",
    ),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    (CHAT, {"function_call": {"name": "f"}}, "function_call"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"web_search_options": {}}, "web_search_options"),
    (CHAT, {"echo": True}, "echo"),
    (CHAT, {"documents": [{"text": "x"}]}, "documents"),
    (GENERATE, {"session_params": {"id": "x"}}, "session_params"),
    (GENERATE, {"sampling_params": {"stop_regex": "a+"}}, "sampling_params[0].stop_regex"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 101}, "top_logprobs"),
    (CHAT, {"logprobs": 2}, "logprobs"),
    (
        CHAT,
        {"add_generation_prompt": True, "continue_final_message": True},
        "continue_final_message",
    ),
    (CHAT, {"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    (GENERATE, {"text": None}, "text"),
    (GENERATE, {"text": ""}, "text"),
    (GENERATE, {"text": []}, "text"),
    (GENERATE, {"text": ["a", ""]}, "text"),
    (GENERATE, {"text": 5}, "text"),
    (GENERATE, {"text": ["a"] * 5000}, "text"),
    (GENERATE, {"input_ids": [5]}, "text"),
    (GENERATE, {"text": None, "input_ids": []}, "input_ids"),
    (GENERATE, {"text": None, "input_ids": [[5], []]}, "input_ids"),
    (GENERATE, {"text": None, "input_ids": ["x"]}, "input_ids"),
    (GENERATE, {"text": None, "input_ids": [UNKNOWN_TOKEN]}, "input_ids"),
    (GENERATE, {"sampling_params": 5}, "sampling_params[0]"),
    (GENERATE, {"sampling_params": [{}, {}]}, "sampling_params"),
    (GENERATE, {"sampling_params": {"max_new_tokens": -1}}, "sampling_params[0].max_new_tokens"),
    (GENERATE, {"sampling_params": {"max_new_tokens": 2, "min_new_tokens": 3}}, "min_new_tokens"),
    (GENERATE, {"rid": ""}, "rid"),
    (GENERATE, {"rid": 5}, "rid"),
    (GENERATE, {"rid": ["a", "b"]}, "rid"),
    (GENERATE, {"return_logprob": True, "top_logprobs_num": 101}, "top_logprobs_num"),
    (GENERATE, {"image_data": "x"}, "image_data"),
]
CASES = [
    *((path, body, param) for path in (COMPLETIONS, CHAT) for body, param in SHARED + OPENAI),
    *((GENERATE, {"sampling_params": body}, param) for body, param in SHARED),
    *FOR_ONE,
]


@pytest.mark.parametrize(("path", "body", "param"), CASES, ids=lambda value: str(value)[:60])
async def test_a_bad_parameter_is_named(
    client: httpx.AsyncClient, scripted: ScriptedEngine, path: str, body: Any, param: str
) -> None:
    given = {**GOOD[path], **body}
    response = await client.post(
        path, json={name: value for name, value in given.items() if value is not None}
    )
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    named = (
        error["param"].rpartition("].")[2]
        if path == GENERATE and "sampling_params" in body
        else error["param"]
    )
    assert named == (param.rpartition("].")[2] if path == GENERATE else param)
    assert error["type"] == "invalid_request_error"
    assert param.partition("[")[0].partition(".")[0] in error["message"]
    assert scripted.requests == []


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE])
async def test_a_good_body_is_taken(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.post(path, json=GOOD[path])).status_code == 200


@pytest.mark.parametrize(
    ("path", "names", "whole"),
    [
        (
            COMPLETIONS,
            (
                "max_tokens",
                "max_completion_tokens",
                "min_tokens",
                "n",
                "best_of",
                "seed",
                "top_k",
                "logprobs",
                "priority",
            ),
            2,
        ),
        (COMPLETIONS, ("stop_token_ids", "prompt"), [5, 6]),
        (
            CHAT,
            (
                "max_tokens",
                "max_completion_tokens",
                "min_tokens",
                "n",
                "best_of",
                "seed",
                "top_k",
                "priority",
            ),
            2,
        ),
        (GENERATE, ("priority", "logprob_start_len", "top_logprobs_num"), 2),
    ],
    ids=str,
)
async def test_a_whole_number_may_be_written_with_a_point(
    client: httpx.AsyncClient,
    scripted: ScriptedEngine,
    path: str,
    names: tuple[str, ...],
    whole: Any,
) -> None:
    """To JSON Schema 2.0 is an integer, and 2.5 and true are none."""
    for name in names:
        given = {
            **GOOD[path],
            "best_of": 3,
            name: [float(part) for part in whole] if isinstance(whole, list) else float(whole),
        }
        assert (await client.post(path, json=given)).status_code == 200, name
        for wrong in (2.5, True):
            response = await client.post(
                path, json={**given, name: [wrong] if isinstance(whole, list) else wrong}
            )
            assert response.status_code == 400, name
            assert response.json()["error"]["param"].startswith(name)
    assert all(
        type(token) is int
        for request in scripted.requests
        for token in [*request.prompt_ids, *request.params.stop_token_ids]
    )


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE])
async def test_top_p_may_be_zero(
    client: httpx.AsyncClient, scripted: ScriptedEngine, path: str
) -> None:
    body = {"sampling_params": {"top_p": 0}} if path == GENERATE else {"top_p": 0}
    assert (await client.post(path, json={**GOOD[path], **body})).status_code == 200
    assert scripted.requests[0].params.greedy


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/tokenize"])
async def test_an_unknown_model_does_not_exist(client: httpx.AsyncClient, path: str) -> None:
    body = {"prompt": "x"} if path != CHAT else GOOD[CHAT]
    error = error_of(await client.post(path, json={**body, "model": "gpt-17"}), 404, "model")
    assert error["code"] == "model_not_found"
    assert "gpt-17" in error["message"]
    assert (await client.post(path, json={**body, "model": "default"})).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", COMPLETIONS),
        ("DELETE", CHAT),
        ("POST", "/health"),
        ("GET", "/generate"),
        ("PUT", "/v1/models"),
    ],
)
async def test_the_wrong_method(client: httpx.AsyncClient, method: str, path: str) -> None:
    response = await client.request(method, path)
    error_of(response, 405)
    assert response.headers["allow"]


@pytest.mark.parametrize(
    "path", ["/page", "/v1", "/v1/engines", "/v1/completions/x", "/%00", "/v1/models/%ff"]
)
async def test_an_unknown_path(client: httpx.AsyncClient, path: str) -> None:
    response = await client.get(path)
    error_of(response, 404, "model" if "models" in path else None)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/tokenize", {}, "prompt"),
        ("/v1/tokenize", {"prompt": 5}, "prompt"),
        ("/v1/tokenize", {"prompt": "x", "messages": [USER]}, "prompt"),
        ("/v1/tokenize", {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ("/v1/tokenize", {"prompt": ["x"] * 5000}, "prompt"),
        ("/v1/detokenize", {}, "tokens"),
        ("/v1/detokenize", {"tokens": "x"}, "tokens"),
        ("/v1/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/v1/detokenize", {"tokens": [[5], 5]}, "tokens"),
        ("/v1/detokenize", {"tokens": [UNKNOWN_TOKEN]}, "tokens"),
        ("/v1/detokenize", {"tokens": [[-1]]}, "tokens"),
        ("/abort_request", {}, "rid"),
        ("/abort_request", {"rid": ""}, "rid"),
        ("/abort_request", {"rid": 5}, "rid"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_bad_input_elsewhere(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    error_of(await client.post(path, json=body), 400, param)
