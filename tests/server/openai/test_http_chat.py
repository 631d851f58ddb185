"""`POST /v1/chat/completions`: exact wire shapes, templates, messages."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from http_fixtures import MODEL, client_of, error_of, events, make_app
from scripted_engine import CONTEXT_LENGTH, REPLY, ScriptedEngine, scripted_logprob
from toy_tokenizer import toy_tokenizer

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "Hi"}
HEAD = {"id", "object", "created", "model", "system_fingerprint"}


async def chat(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(PATH, json={"messages": [USER], "max_tokens": 4, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def stream(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    return events(
        await client.post(PATH, json={"messages": [USER], "max_tokens": 4, "stream": True, **body})
    )


def prompt_text(engine: ScriptedEngine) -> str:
    return engine.tokenizer.decode(engine.requests[-1].prompt_ids, skip_special_tokens=False)


async def test_an_answer_has_exactly_openais_members(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    answer = await chat(client)
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", answer["id"])
    assert set(answer) == HEAD | {"choices", "usage"}
    assert (answer["object"], answer["model"]) == ("chat.completion", MODEL)
    text = scripted.tokenizer.decode(scripted.tokenizer.encode(REPLY)[:4])
    message = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
    assert answer["choices"] == [
        {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
    ]
    assert answer["usage"]["prompt_tokens"] == len(scripted.requests[0].prompt_ids)


async def test_the_default_length_is_what_the_context_has_left(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    usage = (await chat(client, max_tokens=None))["usage"]
    assert usage["total_tokens"] == CONTEXT_LENGTH
    assert usage["completion_tokens"] == scripted.requests[0].params.max_new_tokens


async def test_messages_become_the_models_prompt(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    system = {"role": "developer", "content": "Be brief."}
    parts = {
        "role": "user",
        "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
    }
    await chat(client, messages=[system, USER, {"role": "assistant", "content": "Yes?"}, parts])
    turns = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Yes?"), ("user", "one\ntwo")]
    expected = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    assert prompt_text(scripted) == expected + "<|im_start|>assistant\n"


async def test_what_unmodified_clients_send_and_changes_nothing_is_taken(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    plain = await chat(client)
    harmless: dict[str, Any] = {
        "tool_choice": "none", "function_call": "auto", "modalities": ["text"], "tools": [],
        "parallel_tool_calls": True, "store": True, "metadata": {"a": "b"}, "service_tier": "auto",
        "user": "me", "safety_identifier": "x", "prompt_cache_key": "y",
        "prompt_cache_retention": "24h", "prediction": {"type": "content", "content": "Hello"},
        "verbosity": "medium", "audio": None, "reasoning_effort": None, "web_search_options": None,
        "response_format": {"type": "text"}, "stream": False,
    }  # fmt: skip
    assert (await chat(client, **harmless))["choices"] == plain["choices"]
    assert scripted.requests[0].prompt_ids == scripted.requests[1].prompt_ids
    assert events(
        await client.post(
            PATH,
            json={
                "messages": [USER],
                "stream": True,
                "stream_options": {"include_obfuscation": False},
            },
        )
    )


@pytest.mark.parametrize(
    "refused",
    [
        {"role": "assistant", "content": None, "refusal": "I cannot."},
        {"role": "assistant", "refusal": "I cannot."},
        {"role": "assistant", "content": "", "refusal": "I cannot."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]},
        {
            "role": "assistant",
            "content": "I cannot.",
            "refusal": None,
            "tool_calls": None,
            "function_call": None,
            "audio": None,
        },
    ],
)
async def test_a_refusal_in_the_history_is_what_the_assistant_said(
    client: httpx.AsyncClient, scripted: ScriptedEngine, refused: dict[str, Any]
) -> None:
    await chat(client, messages=[USER, refused, USER])
    assert "<|im_start|>assistant\nI cannot.<|im_end|>" in prompt_text(scripted)


TOOL_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}<{{ c.function.name }} {{ "
    "c.function.arguments | tojson }} {{ c.id }}>"
    "{% endfor %}{% endif %}"
    "{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}{% endfor %}"
)


def calling(*arguments: Any) -> dict[str, Any]:
    functions = [{"name": f"f{i}", "arguments": given} for i, given in enumerate(arguments)]
    calls = [
        {"id": f"c{i}", "type": "function", "function": function}
        for i, function in enumerate(functions)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


async def test_tool_calls_of_the_history_reach_a_template_that_knows_them() -> None:
    engine = ScriptedEngine(toy_tokenizer(chat_template=TOOL_TEMPLATE))
    called = calling('{"b": 1, "a": "\u00e9"}', {"x": [2]}, "", "no JSON")
    result = {"role": "tool", "tool_call_id": "c0", "content": "42"}
    async with client_of(make_app(engine)) as client:
        await chat(client, messages=[USER, called, result])
    calls = '<f0 {"b": 1, "a": "é"} c0><f1 {"x": [2]} c1><f2 {} c2><f3 "no JSON" c3>'
    assert prompt_text(engine) == f"[user]Hi[assistant]{calls}[tool]42(c0)"


async def test_tool_calls_that_a_template_leaves_out_are_told_otherwise(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    # That the name occurs elsewhere does not make the call visible.
    await chat(client, messages=[{"role": "user", "content": "call f0"}, calling("{}"), USER])
    assert '"name": "f0", "arguments": {}' in prompt_text(scripted)
    first_only = ScriptedEngine(
        toy_tokenizer(chat_template=TOOL_TEMPLATE.replace("in m.tool_calls", "in m.tool_calls[:1]"))
    )
    async with client_of(make_app(first_only)) as other:
        await chat(other, messages=[USER, calling("{}", "{}")])
        assert prompt_text(first_only).endswith("<f0 {} c0>[assistant]<f1 {} c1>")
        await chat(other, messages=[USER, calling("{}")])
        assert prompt_text(first_only).endswith("<f0 {} c0>")


async def test_calls_that_a_template_leaves_out_are_told_as_the_model_writes_them(
    scripted: ScriptedEngine,
) -> None:
    async with client_of(make_app(scripted, tool_call_parser="lfm2")) as client:
        await chat(client, messages=[USER, calling('{"a": "b"}'), USER])
        assert "<|tool_call_start|>[f0(a='b')]<|tool_call_end|>" in prompt_text(scripted)
        deep = '{"a": ' + "[" * 5000 + "]" * 5000 + "}"
        for arguments in (deep, '{"a": 1e999}', '{"a": NaN}'):
            answer = await client.post(PATH, json={"messages": [USER, calling(arguments), USER]})
            assert answer.status_code in (200, 400), arguments[:20]


async def test_arguments_that_would_be_millions_of_objects_are_not_parsed() -> None:
    engine = ScriptedEngine(toy_tokenizer(chat_template=TOOL_TEMPLATE))
    async with client_of(make_app(engine)) as client:
        for arguments in ('{"a": [' + "[]," * 200_000 + "1]}", '{"a": ' + "[" * 150_000):
            error_of(await client.post(PATH, json={"messages": [USER, calling(arguments)]}), 400)
        deep = '{"a": ' + "[" * 5000 + "]" * 5000 + "}"
        assert (
            await client.post(PATH, json={"messages": [USER, calling(deep)], "max_tokens": 1})
        ).status_code in (200, 400)


async def test_the_template_brings_its_own_special_tokens(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    await chat(client)
    start = scripted.tokenizer.encode("<|im_start|>", add_special_tokens=False)
    assert scripted.requests[0].prompt_ids[: len(start)] == start


async def test_the_final_message_may_be_continued(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    messages = [USER, {"role": "assistant", "content": "The answer"}]
    await chat(client, messages=messages, continue_final_message=True)
    assert prompt_text(scripted).endswith("<|im_start|>assistant\nThe answer")
    await chat(client, messages=messages, add_generation_prompt=False)
    assert prompt_text(scripted).endswith("The answer<|im_end|>\n")


async def test_template_arguments_reach_the_template(client: httpx.AsyncClient) -> None:
    response = await client.post(
        PATH, json={"messages": [USER], "chat_template_kwargs": {"shout": True}}
    )
    assert "no shouting" in error_of(response, 400, "messages")["message"]


async def test_logprobs_have_bytes_and_alternatives(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    (choice,) = (await chat(client, logprobs=True, top_logprobs=2, max_tokens=1))["choices"]
    token = scripted.tokenizer.encode(REPLY)[0]
    entry = scripted_logprob(token, len(scripted.requests[0].prompt_ids), 2)

    def wire(token_id: int, logprob: float) -> dict[str, Any]:
        raw = scripted.tokenizer.token_bytes(token_id)
        return {"token": raw.decode(), "logprob": logprob, "bytes": list(raw)}

    content = [
        {
            **wire(token, entry.logprob),
            "top_logprobs": [wire(*alternative) for alternative in entry.top],
        }
    ]
    assert choice["logprobs"] == {"content": content, "refusal": None}


async def test_part_of_a_character_is_told_by_its_bytes(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    ids = scripted.tokenizer.encode("\N{SNOWMAN}")
    assert len(ids) == 3
    scripted.script.reply = lambda request: ids
    (choice,) = (await chat(client, logprobs=True, max_tokens=3))["choices"]
    assert choice["message"]["content"] == "\N{SNOWMAN}"
    assert (
        bytes(byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"]).decode()
        == "\N{SNOWMAN}"
    )
    assert choice["logprobs"]["content"][0]["token"] == "\N{REPLACEMENT CHARACTER}"


async def test_a_character_cut_off_by_max_tokens_is_no_text_and_its_bytes_are_told(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    ids = scripted.tokenizer.encode("\N{SNOWMAN}")
    scripted.script.reply = lambda request: ids
    answer = await chat(client, logprobs=True, max_tokens=5)
    chunks = await stream(client, logprobs=True, max_tokens=5)
    (whole,), pieces = (
        answer["choices"],
        [choice for chunk in chunks for choice in chunk["choices"]],
    )
    assert (
        "".join(piece["delta"].get("content", "") for piece in pieces)
        == whole["message"]["content"]
        == "\N{SNOWMAN}"
    )
    told = [
        entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]
    ]
    assert told == whole["logprobs"]["content"]
    assert (
        bytes(byte for entry in told for byte in entry["bytes"]) == ("\N{SNOWMAN}" * 2).encode()[:5]
    )
    assert answer["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("n", [1, 3])
async def test_a_stream_begins_with_the_role_and_ends_with_the_reason(
    client: httpx.AsyncClient, scripted: ScriptedEngine, n: int
) -> None:
    chunks = await stream(client, n=n)
    assert all(
        set(chunk) == HEAD | {"choices"} and chunk["object"] == "chat.completion.chunk"
        for chunk in chunks
    )
    text = scripted.tokenizer.decode(scripted.tokenizer.encode(REPLY)[:4])
    for index in range(n):
        first, *middle, last = [
            choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index
        ]
        assert first == {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        assert all(
            set(piece["delta"]) == {"content"} and piece["finish_reason"] is None
            for piece in middle
        )
        assert "".join(piece["delta"]["content"] for piece in middle) == text
        assert last == {"index": index, "delta": {}, "logprobs": None, "finish_reason": "length"}


async def test_a_stream_has_the_logprobs_of_every_token(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    # Tokens without text of their own must not be lost: these four are a character and a third.
    scripted.script.reply = lambda request: scripted.tokenizer.encode("\N{SNOWMAN}")
    (whole,) = (await chat(client, logprobs=True, top_logprobs=1))["choices"]
    pieces = [
        choice["logprobs"]
        for chunk in await stream(client, logprobs=True, top_logprobs=1)
        for choice in chunk["choices"]
    ]
    assert [entry for piece in pieces if piece for entry in piece["content"]] == whole["logprobs"][
        "content"
    ]


async def test_usage_on_a_stream(client: httpx.AsyncClient) -> None:
    *chunks, last = await stream(client, n=2, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]) == ([], (await chat(client, n=2))["usage"])


async def test_usage_on_every_chunk_counts_no_token_before_it_is_told(
    client: httpx.AsyncClient,
) -> None:
    chunks = await stream(
        client, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 3, 4, 4, 4]
    assert (
        len(
            {
                (chunk["usage"]["prompt_tokens"], str(chunk["usage"]["prompt_tokens_details"]))
                for chunk in chunks
            }
        )
        == 1
    )


async def test_no_stop_string_shows_in_a_stream(client: httpx.AsyncClient) -> None:
    chunks = await stream(client, stop=["old friend"], max_tokens=30)
    assert (
        "".join(
            choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]
        )
        == "Hello there, "
    )
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_best_of_works_for_chats_too(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    scripted.script.reply = lambda request: [90 if request.params.seed == 5 else 40]
    (choice,) = (await chat(client, best_of=2, seed=5, max_tokens=2))["choices"]
    assert choice["message"]["content"] == scripted.tokenizer.decode([40, 40])
