"""`/v1/responses` by the `openai` client: text, streams, tools, structured output, thoughts."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from http_fixtures import MODEL, make_app, serve, wait_for
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from scripted_engine import INFO, REPLY, ScriptedEngine
from toy_tokenizer import toy_tokenizer

from piecework.server.openai.requests import ChatCompletionRequest
from piecework.server.openai.responses import chat

THINKS = (
    "{% for m in messages %}[{{ m.reasoning_content or '' }}|{{ m.content }}]{% endfor %}"
    "{{ '</think>' if false else '' }}"
)
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
    "strict": True,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[ScriptedEngine, str]]:
    engine = ScriptedEngine(toy_tokenizer(chat_template=THINKS))
    engine.info = dataclasses.replace(INFO, context_length=1024)
    with serve(make_app(engine)) as url:
        yield engine, url


@pytest.fixture
def engine(served: tuple[ScriptedEngine, str]) -> ScriptedEngine:
    engine, _ = served
    engine.script = ScriptedEngine(engine.tokenizer).script
    engine.requests.clear()
    engine.dropped.clear()
    return engine


@pytest.fixture
def client(served: tuple[ScriptedEngine, str], engine: ScriptedEngine) -> Iterator[openai.OpenAI]:
    url = f"{served[1]}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
        yield client


def says(engine: ScriptedEngine, *texts: str) -> None:
    """The model says one text after another, a request each."""
    rest = iter(texts)
    known: dict[str, list[int]] = {}

    def reply(request: Any) -> list[int]:
        if request.rid not in known:
            ids = engine.tokenizer.encode(next(rest), add_special_tokens=False)
            known[request.rid] = [*ids, engine.tokenizer.eos_token_ids[0]]
        return known[request.rid]

    engine.script.reply = reply


def strict(response: Response) -> Response:
    """What the client has parsed leniently, parsed strictly."""
    return Response.model_validate(response.to_dict(mode="json"))


def prompt(engine: ScriptedEngine) -> str:
    return engine.tokenizer.decode(engine.requests[-1].prompt_ids)


def test_a_text(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    says(engine, "Hello there")
    answer = strict(
        client.responses.create(
            model=MODEL, input="Hi", instructions="Be kind.", metadata={"a": "b"}, user="me"
        )
    )
    assert (answer.status, answer.output_text, answer.error) == ("completed", "Hello there", None)
    assert prompt(engine) == "[|Be kind.][|Hi]"
    count = client.responses.input_tokens.count(model=MODEL, input="Hi", instructions="Be kind.")
    assert count.input_tokens == len(engine.requests[0].prompt_ids)
    assert (answer.metadata, answer.user, answer.instructions) == ({"a": "b"}, "me", "Be kind.")
    assert answer.usage is not None
    used = len(engine.requests[0].prompt_ids)
    assert (answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens) == (
        used,
        used // 2,
    )
    assert answer.usage.total_tokens == used + answer.usage.output_tokens


def test_max_output_tokens_makes_it_incomplete(client: openai.OpenAI) -> None:
    answer = strict(client.responses.create(model=MODEL, input="Hi", max_output_tokens=3))
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete" and answer.output_text


@pytest.mark.parametrize(
    "text", ["Hello there", "<think>The old fox.</think>The fox.", f"Well. {CALL}", CALL + CALL, ""]
)
def test_a_stream_tells_what_the_whole_response_says(
    client: openai.OpenAI, engine: ScriptedEngine, text: str
) -> None:
    says(engine, text, text)
    asked: dict[str, Any] = {
        "model": MODEL,
        "input": "Hi",
        "tools": [WEATHER],
        "include": ["message.output_text.logprobs"],
        "extra_body": {"seed": 1},
    }
    whole = strict(client.responses.create(**asked))
    events = []
    for event in client.responses.create(**asked, stream=True):
        events.append(EVENT.validate_python(event.to_dict(mode="json")))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-2:] == ["response.output_item.done", "response.completed"]
    told = [event.item for event in events if event.type == "response.output_item.done"]
    assert shapes(told) == shapes(events[-1].response.output) == shapes(whole.output)
    for index, item in enumerate(told):
        deltas = [one.delta for one in events if getattr(one, "output_index", None) == index
                  and one.type.endswith(".delta")]  # fmt: skip
        said = item.arguments if item.type == "function_call" else item.content[0].text
        assert "".join(deltas) == said


def shapes(items: list[Any]) -> list[dict[str, Any]]:
    """Items without what is made up for each."""
    return [item.model_dump(exclude={"id", "call_id"}) for item in items]


def test_the_streaming_helper(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    says(engine, "Hello there")
    with client.responses.stream(model=MODEL, input="Hi") as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(pieces) == stream.get_final_response().output_text == "Hello there"


def test_log_probabilities_are_those_of_the_text(
    client: openai.OpenAI, engine: ScriptedEngine
) -> None:
    says(engine, "<think>The fox.</think>The fox.")
    answer = strict(client.responses.create(model=MODEL, input="Hi", top_logprobs=2))
    (part,) = answer.output[1].content  # type: ignore[union-attr]
    assert "".join(entry.token for entry in part.logprobs) == "The fox."  # type: ignore
    assert {len(entry.top_logprobs) for entry in part.logprobs} == {2}  # type: ignore


def test_a_thought_is_an_item_and_is_counted(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    says(engine, "<think>Hm.</think>Yes.", "No.")
    answer = strict(client.responses.create(model=MODEL, input="Hi"))
    thought, message = answer.output
    assert thought.type == "reasoning" and thought.content is not None
    assert (thought.content[0].text, answer.output_text) == ("Hm.", "Yes.")
    assert answer.usage is not None and answer.usage.output_tokens_details.reasoning_tokens > 0
    back: Any = [
        {"role": "user", "content": "Hi"},
        thought,
        message,
        {"role": "user", "content": "?"},
    ]
    client.responses.create(model=MODEL, input=back, include=["reasoning.encrypted_content"])
    assert prompt(engine) == "[|Hi][Hm.|Yes.][|?]"


def test_a_loop_of_two_rounds_with_a_tool(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    says(engine, f"Well.{CALL}", "It rains.")
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Bonn?"}]}]
    answer = strict(
        client.responses.create(model=MODEL, input=items, tools=[WEATHER], tool_choice="auto")
    )
    _, call = answer.output
    assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Bonn"}
    items += [*answer.output, {"type": "function_call_output", "call_id": call.call_id,
                               "output": "rain"}]  # fmt: skip
    answer = client.responses.create(model=MODEL, input=items, tools=[WEATHER])
    assert answer.output_text == "It rains."
    assert "rain" in prompt(engine) and "Bonn?" in prompt(engine)


def test_a_model_of_pydantic(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    class Person(BaseModel):
        name: str
        age: int

    says(engine, '{"name": "fox", "age": 5}')
    answer = client.responses.parse(model=MODEL, input="Hi", text_format=Person)
    assert answer.output_parsed == Person(name="fox", age=5)
    assert engine.requests[0].params.grammar
    assert answer.text is not None and answer.text.format is not None
    assert answer.text.format.type == "json_schema"


def test_an_error_on_the_way_is_the_last_event(
    client: openai.OpenAI, engine: ScriptedEngine
) -> None:
    engine.script.fail_after = 2
    events = list(client.responses.create(model=MODEL, input="Hi", stream=True))
    last = events[-1]
    assert last.type == "response.failed" and last.response.error is not None
    assert (last.response.status, last.response.error.code) == ("failed", "server_error")
    assert "it broke" in last.response.error.message
    assert REPLY.startswith(last.response.output_text)
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model=MODEL, input="Hi")


def test_a_client_that_leaves_ends_its_response(
    client: openai.OpenAI, engine: ScriptedEngine
) -> None:
    engine.script.delay = 0.01
    stream = client.responses.create(model=MODEL, input="Hi", stream=True)
    next(iter(stream))
    stream.close()
    wait_for(lambda: not engine.running)
    assert engine.dropped == [engine.requests[0].rid]


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({"input": []}, "input", "at least 1"),
        ({"input": 5}, "input", "list"),
        ({}, "input", "required"),
        ({"model": None}, "model", "/v1/models"),
        ({"input": [{"role": "user"}]}, "input[0]", "needs content"),
        ({"input": [{"type": "computer_call"}]}, "input[0]", "send message or function_call"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].image_url",
            "only text",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
            "input",
            "send the call",
        ),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "pattern"),
        ({"tools": [{"type": "funktion", "name": "x"}]}, "tools[0]", "declare a function"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "declare a function"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0]", "messages"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", "needs server_label"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "none of the tools"),
        (
            {"tools": [{**WEATHER, "parameters": {"type": "string"}}]},
            "tools[0].parameters",
            "object",
        ),
        (
            {"conversation": "conv_1", "previous_response_id": "resp_1"},
            "conversation",
            "previous_response_id",
        ),
        ({"conversation": {}}, "conversation", "string"),
        ({"service_tier": "first"}, "service_tier", "flex"),
        ({"prompt": {"id": "x"}}, "prompt", "instructions"),
        ({"truncation": "auto", "input": "x " * 2000}, "input", "Shorten input"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort", "low"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a", "512"),
        ({"include": ["all"]}, "include[0]", "logprobs"),
        ({"input": "x " * 2000}, "input", "Shorten input"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "schema"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "x"}}}},
            "text.format",
            "mend",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(
    client: openai.OpenAI, body: dict[str, Any], param: str, told: str
) -> None:
    asked = {"model": MODEL, "input": "Hi", **body} if body else body
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/responses", body=asked, cast_to=object)
    assert caught.value.param == param and told in str(caught.value), str(caught.value)


@pytest.mark.parametrize("turns", [3, 200])
def test_truncation_leaves_out_the_first_turns(
    client: openai.OpenAI, engine: ScriptedEngine, turns: int
) -> None:
    said = [f"{number} {'x' * 10}" for number in range(turns)]
    items: Any = [{"role": "developer", "content": "Be kind."}]
    for text in said:
        items += [{"role": "user", "content": text}, {"role": "assistant", "content": "y"}]
    asked: Any = {"model": MODEL, "truncation": "auto", "max_output_tokens": 24}
    answer = strict(client.responses.create(input=items, **asked))
    assert answer.truncation == "auto"
    kept = re.findall(r"\|(\d+) x", prompt(engine))
    assert prompt(engine).startswith(f"[|Be kind.][|{kept[0]} x")
    assert [int(number) for number in kept] == list(range(turns))[-len(kept) :]
    one = len(engine.tokenizer.encode(f"[|{said[-1]}][|y]", add_special_tokens=False))
    left = 1024 - 24 - len(engine.requests[-1].prompt_ids)
    assert len(kept) == turns or 0 <= left < one


def test_what_is_passed_on_is_known_to_chats() -> None:
    assert set(chat._SAME) <= set(ChatCompletionRequest.model_fields)
