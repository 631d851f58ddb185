"""Thoughts through `/v1/chat/completions`: apart from the text, counted, and before a grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_fixtures import client_of, make_app
from scripted_engine import ScriptedEngine
from toy_tokenizer import toy_tokenizer

PATH = "/v1/chat/completions"
OPEN, CLOSED = "<think>\n", "{# </think> #}"
TEMPLATE = (
    "{%% for m in messages %%}[{{ m.reasoning_content or '' }}|{{ m.content }}]{%% endfor %%}"
    "{{ '-' if enable_thinking is defined and not enable_thinking else '' }}%s"
)
USER = {"role": "user", "content": "Hi"}


def thinker(says: str, *, opens: bool = False) -> ScriptedEngine:
    """An engine whose model thinks and says this."""
    engine = ScriptedEngine(toy_tokenizer(chat_template=TEMPLATE % (CLOSED + OPEN * opens)))
    ids = engine.tokenizer.encode(says, add_special_tokens=False)
    engine.script.reply = lambda request: [*ids, engine.tokenizer.eos_token_ids[0]]
    return engine


async def chat(engine: ScriptedEngine, **body: Any) -> dict[str, Any]:
    async with client_of(make_app(engine)) as client:
        answer = await client.post(PATH, json={"messages": [USER], "max_tokens": 100, **body})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


@pytest.mark.parametrize("opens", [False, True])
async def test_a_thought_stands_apart_and_is_counted(opens: bool) -> None:
    engine = thinker(("" if opens else "<think>") + "Hm.</think>\n\nYes.", opens=opens)
    answer = await chat(engine)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"]) == ("Hm.", "Hm.")
    assert message["content"] == "Yes."
    usage = answer["usage"]
    rest = len(engine.tokenizer.encode("\n\nYes.", add_special_tokens=False)) + 1
    reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    assert reasoning == usage["completion_tokens"] - rest


async def test_a_thought_that_the_answer_goes_on_with_stays_one() -> None:
    for begun, thought in (("<think>\nThe user", "is nice."), ("<think>A</think>So", None)):
        engine = thinker("is nice.</think>Yes." if thought else "Yes.")
        messages = [USER, {"role": "assistant", "content": begun}]
        members = {"continue_final_message": True, "add_generation_prompt": False}
        answer = await chat(engine, messages=messages, **members)
        message, usage = answer["choices"][0]["message"], answer["usage"]
        assert (message.get("reasoning_content"), message["content"]) == (thought, "Yes.")
        told = usage.get("completion_tokens_details") or {"reasoning_tokens": 0}
        assert bool(told["reasoning_tokens"]) == bool(thought)


async def test_a_streamed_thought() -> None:
    async with client_of(make_app(thinker("<think>Hm.</think>Yes."))) as client:
        sent = {"messages": [USER], "stream": True, "stream_options": {"include_usage": True}}
        answer = await client.post(PATH, json={**sent, "max_tokens": 100})
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
    assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


async def test_thoughts_are_left_in_the_text_or_out_on_demand() -> None:
    text = "<think>Hm.</think>Yes."
    whole = (await chat(thinker(text), separate_reasoning=False))["choices"][0]["message"]
    assert whole["content"] == text and "reasoning" not in whole
    silent = (await chat(thinker(text), include_reasoning=False))["choices"][0]["message"]
    assert silent["content"] == "Yes." and "reasoning" not in silent


async def test_a_thought_that_max_tokens_cuts_is_no_text() -> None:
    answer = await chat(thinker("Hm, a long thought.", opens=True), max_tokens=4)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length" and choice["message"]["content"] == ""
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4


async def test_the_template_hears_of_thoughts_and_of_the_effort() -> None:
    engine = thinker("Yes.")
    before = {"role": "assistant", "content": "So", "reasoning": "Hm"}
    await chat(engine, messages=[USER, before, USER], reasoning_effort="none")
    prompt = engine.tokenizer.decode(engine.requests[0].prompt_ids)
    assert prompt.endswith("[Hm|So][|Hi]-")


@pytest.mark.parametrize("effort", ["none", "high"])
async def test_an_effort_is_a_hint_for_a_model_that_does_not_think(
    scripted: ScriptedEngine, effort: str
) -> None:
    async with client_of(make_app(scripted)) as client:
        sent = {"messages": [USER], "reasoning_effort": effort}
        assert (await client.post(PATH, json=sent)).is_success


async def test_a_grammar_is_for_what_follows_the_thought() -> None:
    engine = thinker("Hm.</think>{}", opens=True)
    await chat(engine, response_format={"type": "json_object"})
    grammar = json.loads(engine.requests[0].params.grammar or "")
    assert "</think>" in grammar["grammars"][0]["lark_grammar"]
    assert grammar["grammars"][1]["json_schema"]


@pytest.mark.parametrize("name", ["max_thinking_tokens", "thinking_token_budget"])
@pytest.mark.parametrize("opens", [False, True])
async def test_the_engine_is_told_how_a_thought_is_closed(name: str, opens: bool) -> None:
    engine = thinker("Hm.</think>Yes.", opens=opens)
    await chat(engine, **{name: 7})
    (request,) = engine.requests
    tokenizer, params = engine.tokenizer, request.params
    assert params.thinking_budget == 7
    assert tokenizer.decode(params.thought_end_ids) == "</think>"
    assert tokenizer.decode(params.thought_begin_ids) == ("" if opens else "<think>")


async def test_a_budget_bounds_nothing_for_a_model_that_does_not_think() -> None:
    engine = ScriptedEngine(toy_tokenizer(chat_template="{{ messages[0].content }}"))
    async with client_of(make_app(engine)) as client:
        body = {"messages": [USER], "max_thinking_tokens": 5}
        assert (await client.post(PATH, json=body)).is_success
    assert engine.requests[0].params.thinking_budget is None
