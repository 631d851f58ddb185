"""`cache_control`: which prefixes the engine is asked to keep, and what `usage` says of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from http_fixtures import client_of, make_app
from scripted_engine import INFO, ScriptedEngine
from toy_tokenizer import toy_tokenizer

from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.tokenizer.output_processor import RequestState
from piecework.server.app import create_app
from piecework.server.config.server import ServerConfig

PATH = "/v1/messages"
MARK = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
TOOL = {"name": "look", "description": "around", "input_schema": {"type": "object"}}
# It trims texts.
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>\n{% endfor %}"
    "<assistant>"
)


def text(words: str, **mark: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **mark}


def turn(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


@pytest.fixture
def engine() -> ScriptedEngine:
    found = ScriptedEngine(toy_tokenizer(chat_template=TEMPLATE))
    found.info = dataclasses.replace(INFO, context_length=2048, page_size=8)
    return found


async def asked(engine: ScriptedEngine, **body: Any) -> tuple[RequestState, dict[str, Any]]:
    """Return the request that the engine gets, and the usage of its answer."""
    async with client_of(make_app(engine)) as client:
        answer = await client.post(PATH, json={"max_tokens": 4, **body})
    assert answer.status_code == 200, answer.text
    return engine.requests[-1], answer.json()["usage"]


def kept(engine: ScriptedEngine, request: RequestState) -> list[tuple[str, float]]:
    """The texts of the kept prefixes."""
    ids, decode = request.prompt_ids, engine.tokenizer.decode
    return [(decode(ids[:end], skip_special_tokens=False), time) for end, time in request.keep]


async def test_a_mark_on_the_last_block_keeps_the_whole_prompt(engine: ScriptedEngine) -> None:
    for body in (
        {"messages": [turn("user", text("Hi " * 20, **MARK))]},
        {"messages": [turn("user", text("Hi " * 20))], **MARK},
    ):
        request, usage = await asked(engine, **body)
        length = len(request.prompt_ids)
        assert request.keep == [(length, 300.0)]
        created = length // 8 * 8 - length // 2  # The engine says that half was cached.
        assert usage["cache_read_input_tokens"] == length // 2
        assert usage["cache_creation_input_tokens"] == created > 0
        assert usage["cache_creation"]["ephemeral_5m_input_tokens"] == created
        assert usage["input_tokens"] == length - length // 2 - created


async def test_without_a_mark_nothing_is_kept(engine: ScriptedEngine) -> None:
    request, usage = await asked(engine, messages=[turn("user", text("Hi"))])
    assert not request.keep and usage["cache_creation_input_tokens"] == 0


@pytest.mark.parametrize("marked", ["system", "tools"])
async def test_system_and_tools_end_where_the_first_message_begins(
    engine: ScriptedEngine, marked: str
) -> None:
    request, usage = await asked(
        engine,
        system=[text("Be kind.", **(MARK if marked == "system" else {}))],
        tools=[{**TOOL, **(MARK if marked == "tools" else {})}],
        messages=[turn("user", text("\n What is it? " + "It is long. " * 60))],
    )
    ((prefix, _),) = kept(engine, request)
    assert prefix.startswith("<system>Be kind.") and "look" in prefix
    assert prefix.endswith("</system>\n<user>")
    assert usage["cache_creation_input_tokens"] == 0  # The cache had them.


async def test_marks_of_two_times(engine: ScriptedEngine) -> None:
    body: dict[str, Any] = {
        "system": [text("Be kind.", **HOUR), text("It is Monday.")],
        "tools": [TOOL],
        "messages": [
            turn("user", text("Look", **MARK)),
            turn("assistant", {"type": "tool_use", "id": "1", "name": "look", "input": {}}),
            turn("user", {"type": "tool_result", "tool_use_id": "1", "content": "A fox", **MARK}),
            turn("user", text("And? " * 40)),
        ],
    }
    request, usage = await asked(engine, **body)
    (system, hour), (rest, minutes) = kept(engine, request)
    assert (hour, minutes) == (3600.0, 300.0)
    assert system == "<system>Be kind.\n"
    assert "A fox" in rest and rest.endswith("</user>\n<user>")
    unmarked = await asked(engine, **_without_marks(body))
    assert unmarked[0].prompt_ids == request.prompt_ids
    assert usage["cache_creation"]["ephemeral_1h_input_tokens"] == 0


async def test_the_hour_is_told_apart(engine: ScriptedEngine) -> None:
    request, usage = await asked(
        engine, messages=[turn("user", text("Hi " * 40, **HOUR), text("so", **MARK))]
    )
    (hour, _), (whole, _) = sorted(request.keep)
    read, told = usage["cache_read_input_tokens"], usage["cache_creation"]
    assert whole == len(request.prompt_ids)
    assert told["ephemeral_1h_input_tokens"] == hour // 8 * 8 - read > 0
    assert sum(told.values()) == whole // 8 * 8 - read == usage["cache_creation_input_tokens"]


async def test_a_wrong_mark_is_refused(engine: ScriptedEngine) -> None:
    wrong = {"cache_control": {"type": "ephemeral", "ttl": "2d"}}
    async with client_of(make_app(engine)) as client:
        for body in ({"messages": [turn("user", text("Hi", **wrong))]},
                     {"messages": [turn("user", text("Hi"))], **wrong}):  # fmt: skip
            answer = await client.post(PATH, json={"max_tokens": 4, **body})
            assert answer.status_code == 400
            assert "cache_control.ttl" in answer.json()["error"]["message"]


def _without_marks(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_marks(one) for name, one in value.items() if name not in MARK}
    return [_without_marks(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("condition", ["m.content|length > 20", "m.content[:1] != 'Q'"])
async def test_a_mark_does_not_make_a_template_refuse_a_text(condition: str) -> None:
    template = TEMPLATE.replace(
        "<{{ m.role }}>",
        "{% if " + condition + " %}{{ raise_exception('no') }}{% endif %}<{{ m.role }}>",
        1,
    )
    engine = ScriptedEngine(toy_tokenizer(chat_template=template))
    engine.info = dataclasses.replace(INFO, context_length=2048, page_size=8)
    body = {"system": [text("Quietly", **MARK)], "messages": [turn("user", text("Quite so?"))]}
    request, _ = await asked(engine, **body)
    assert request.keep == []


async def test_nothing_is_created_where_no_prefix_is_kept(engine: ScriptedEngine) -> None:
    config = EngineConfig(model_path="models/toy", disable_radix_cache=True)
    body = {"max_tokens": 4, "messages": [turn("user", text("Hi " * 30))]}
    async with client_of(create_app(engine, ServerConfig(engine=config), None)) as client:
        usage = (await client.post(PATH, json=body | MARK)).json()["usage"]
    assert usage["cache_creation_input_tokens"] == 0 and usage["input_tokens"] > 16
