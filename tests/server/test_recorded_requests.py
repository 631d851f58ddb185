"""Every member that an agent or a client library sends is taken, and what it sends back is read."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from http_fixtures import client_of, make_app
from recorded_requests import REQUESTS
from scripted_engine import INFO, ScriptedEngine
from toy_tokenizer import toy_tokenizer

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}|{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}]{% endfor %}"
    "{% for t in tools or [] %}{{ t.function | tojson }}{% endfor %}"
)


@pytest.fixture
def scripted() -> ScriptedEngine:
    """An engine whose model calls the first tool."""
    engine = ScriptedEngine(toy_tokenizer(chat_template=TEMPLATE))
    engine.info = dataclasses.replace(INFO, context_length=65536, kv_tokens=65536)
    return engine


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_recorded_request_is_answered(scripted: ScriptedEngine, name: str) -> None:
    path, body = REQUESTS[name]
    first = next(iter(body.get("tools", [])), {})
    called = first.get("function", first).get("name")
    text = f'<tool_call>\n{{"name": "{called}", "arguments": {{"path": "b.py"}}}}\n</tool_call>'
    ids = scripted.tokenizer.encode(text if called else "fox", add_special_tokens=False)
    scripted.script.reply = lambda request: [*ids, *scripted.tokenizer.eos_token_ids]
    async with client_of(make_app(scripted)) as client:
        answer = await client.post(path, json=body, headers={"anthropic-version": "2023-06-01"})
    assert answer.status_code == 200, answer.text
    assert ("error" not in answer.text) or '"error":null' in answer.text, answer.text
    assert not called or called in answer.text
    # A call is held to its tool's schema, whatever the schemas of the others say.
    assert bool(scripted.requests[-1].params.grammar) == bool(called)
    prompt = scripted.tokenizer.decode(scripted.requests[-1].prompt_ids)
    assert all(text in prompt for text in spoken(body)), prompt


def spoken(body: dict[str, Any]) -> list[str]:
    """All texts that the model must hear of."""
    texts: list[str] = []

    def find(value: Any) -> None:
        if isinstance(value, dict):
            texts.extend(
                value[name] for name in ("text", "content") if isinstance(value.get(name), str)
            )
            for part in value.values():
                find(part)
        elif isinstance(value, list):
            for part in value:
                find(part)

    find([body.get(name, []) for name in ("system", "messages", "input")])
    return texts
