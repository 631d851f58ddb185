"""Log-probabilities of answers: those of the visible text, and one for each alternative."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_fixtures import client_of, events, make_app
from scripted_engine import ScriptedEngine, scripted_logprob
from toy_tokenizer import toy_tokenizer

from piecework.runtime.core.generation import TokenLogprob
from piecework.server.openai.logprobs import CompletionLogprobs

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for m in messages %}[{{ m.content }}]{% endfor %}{# </think> #}"
    "{% for tool in tools or [] %}{{ tool | tojson }} <tool_call>"
    '{"name": <function-name>, "arguments": <args-json-object>}</tool_call>{% endfor %}'
)
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "\N{SNOWMAN}"}}\n</tool_call>'


async def answers(says: str, **body: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The choice of a whole answer, and all choices of a streamed one."""
    engine = ScriptedEngine(toy_tokenizer(chat_template=TEMPLATE))
    ids = engine.tokenizer.encode(says, add_special_tokens=False)
    engine.script.reply = lambda request: [*ids, engine.tokenizer.eos_token_ids[0]]
    sent = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 200,
        "logprobs": True,
        "top_logprobs": 2,
        "tools": [TOOL],
        **body,
    }
    async with client_of(make_app(engine)) as client:
        whole = await client.post(CHAT, json=sent)
        assert whole.status_code == 200, whole.text
        chunks = events(await client.post(CHAT, json={**sent, "stream": True}))
    pieces = [choice for chunk in chunks for choice in chunk["choices"]]
    return whole.json()["choices"][0], pieces


def text_of(entries: list[dict[str, Any]]) -> str:
    return bytes(byte for entry in entries for byte in entry["bytes"]).decode()


@pytest.mark.parametrize(
    ("says", "content", "told"),
    [
        ("Yes, it is.", "Yes, it is.", "Yes, it is."),
        ("<think>Hm, is it?</think>\n\nYes, it is.", "Yes, it is.", "Yes, it is."),
        ("<think>Hm.</think>" + CALL, None, ""),
        ("<think>Hm.</think>It is \N{SNOWMAN}." + CALL, "It is \N{SNOWMAN}.", "It is \N{SNOWMAN}."),
        ("<think>Hm, is", "", ""),
    ],
    ids=["text", "thought", "call", "all", "unfinished thought"],
)
async def test_entries_are_those_of_the_content(says: str, content: str | None, told: str) -> None:
    whole, pieces = await answers(says)
    assert whole["message"]["content"] == content
    entries = whole["logprobs"]["content"]
    assert text_of(entries) == told
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    streamed = []
    for piece in pieces:
        if piece["logprobs"] is not None:
            assert piece["delta"]["content"]
            streamed += piece["logprobs"]["content"]
    assert streamed == entries


async def test_entries_behind_a_stop_string_are_left_out() -> None:
    whole, _ = await answers("Yes, it is fine.", stop=[" is"], tools=[])
    assert (
        text_of(whole["logprobs"]["content"]).rstrip() == whole["message"]["content"] == "Yes, it"
    )


def alternatives(entry: TokenLogprob) -> tuple[dict[str, float], str]:
    """What stands for the alternatives of a token, and for the token."""
    tokenizer = toy_tokenizer()
    writer = CompletionLogprobs(tokenizer, [], "", count=len(entry.top), skip_special_tokens=True)
    written = writer.write([entry.token_id], [entry], None)
    return json.loads(bytes(written.top_logprobs[0])), written.tokens[0]


def test_alternatives_that_are_parts_of_characters_stand_apart() -> None:
    tokenizer = toy_tokenizer()
    parts = [
        token_id
        for token_id in range(tokenizer.vocab_size)
        if "\ufffd" in tokenizer.token_bytes(token_id).decode("utf-8", "replace")
    ][:6]
    entry = TokenLogprob(
        token_id=parts[5],
        logprob=-9.0,
        top=[(token_id, -1.0 - at) for at, token_id in enumerate(parts[:5])],
    )
    found, token = alternatives(entry)
    assert list(found.values()) == [-1.0, -2.0, -3.0, -4.0, -5.0, -9.0]
    assert found[token] == -9.0
    (byte,) = tokenizer.token_bytes(parts[5])
    assert token == f"bytes:\\x{byte:02x}"


def test_a_chosen_token_keeps_its_value_where_others_have_its_text() -> None:
    beyond = [toy_tokenizer().vocab_size + more for more in range(3)]  # ids without a text
    entry = TokenLogprob(
        token_id=beyond[1], logprob=-2.0, top=[(token_id, -1.0 - at) for at, token_id in
                                              enumerate(beyond)]
    )  # fmt: skip
    found, token = alternatives(entry)
    assert list(found.values()) == [-1.0, -2.0, -3.0] and found[token] == -2.0


def test_the_chosen_token_counts_once() -> None:
    found, _ = alternatives(scripted_logprob(40, 1, 5))
    assert len(found) == 5
