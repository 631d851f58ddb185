"""The `openai` client against a real server: sync and async, whole and streamed, raw answers,
errors.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import openai
import pytest
from http_fixtures import MODEL, make_app, serve
from scripted_engine import REPLY, ScriptedEngine

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]
KEY = "sesame"


@pytest.fixture
def url(scripted: ScriptedEngine) -> Iterator[str]:
    with serve(make_app(scripted, api_key=KEY)) as url:
        yield url


@pytest.fixture
def sync_client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
async def async_client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=20
    ) as client:
        yield client


def reply(engine: ScriptedEngine, count: int) -> str:
    return engine.tokenizer.decode(engine.tokenizer.encode(REPLY)[:count])


def test_a_chat(sync_client: openai.OpenAI, scripted: ScriptedEngine) -> None:
    answer = sync_client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=5, logprobs=True, top_logprobs=2
    )
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        reply(scripted, 5),
        "length",
    )
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [2] * 5
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens // 2


def test_a_streamed_chat(sync_client: openai.OpenAI, scripted: ScriptedEngine) -> None:
    chunks = list(
        sync_client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=5,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    for index in range(2):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in choices) == reply(scripted, 5)
        assert choices[0].delta.role == "assistant"
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 10


def test_the_streaming_helper(sync_client: openai.OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script.reply = lambda request: [
        *scripted.tokenizer.encode("Hello"),
        *scripted.tokenizer.eos_token_ids,
    ]
    with sync_client.chat.completions.stream(model=MODEL, messages=MESSAGES) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
    assert "".join(pieces) == stream.get_final_completion().choices[0].message.content == "Hello"


def test_completions(sync_client: openai.OpenAI, scripted: ScriptedEngine) -> None:
    prompts = ["Hello", "The"]
    answer = sync_client.completions.create(
        model=MODEL, prompt=prompts, max_tokens=4, logprobs=1, echo=True, extra_body={"top_k": 5}
    )
    assert [choice.text for choice in answer.choices] == [
        prompt + reply(scripted, 4) for prompt in prompts
    ]
    assert answer.choices[0].logprobs is not None
    assert (
        len(answer.choices[0].logprobs.tokens or []) == len(scripted.tokenizer.encode("Hello")) + 4
    )
    assert scripted.requests[0].params.top_k == 5


def test_streamed_completions(sync_client: openai.OpenAI, scripted: ScriptedEngine) -> None:
    chunks = list(
        sync_client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=4, stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == reply(scripted, 4)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "length"]


def test_models(sync_client: openai.OpenAI) -> None:
    assert [model.id for model in sync_client.models.list()] == [MODEL]
    assert sync_client.models.retrieve(MODEL).owned_by == "piecework"


async def test_the_async_client(async_client: openai.AsyncOpenAI, scripted: ScriptedEngine) -> None:
    answer = await async_client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=3
    )
    assert answer.choices[0].message.content == reply(scripted, 3)
    stream = await async_client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=3, stream=True
    )
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == reply(
        scripted, 3
    )
    pieces = await async_client.completions.create(
        model=MODEL, prompt="Hello", max_tokens=3, stream=True
    )
    assert "".join([chunk.choices[0].text async for chunk in pieces]) == reply(scripted, 3)


def test_raw_answers(sync_client: openai.OpenAI) -> None:
    headers = {"X-Request-Id": "mine"}
    raw = sync_client.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, max_tokens=1, extra_headers=headers
    )
    assert raw.headers["content-type"] == "application/json"
    assert raw.request_id == "mine"
    assert raw.parse().object == "chat.completion"
    with sync_client.completions.with_streaming_response.create(
        model=MODEL, prompt="Hello", max_tokens=2, stream=True
    ) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


def test_errors_are_of_the_clients_kinds(
    sync_client: openai.OpenAI, url: str, scripted: ScriptedEngine
) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-17"):
        sync_client.chat.completions.create(model="gpt-17", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as bad:
        sync_client.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong").models.list()
    scripted.script.fail_after = 1
    with pytest.raises(openai.InternalServerError):
        sync_client.completions.create(model=MODEL, prompt="x")


def test_an_error_in_a_stream_is_raised(
    sync_client: openai.OpenAI, scripted: ScriptedEngine
) -> None:
    scripted.script.fail_after = 2
    stream = sync_client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="it broke"):
        list(stream)


def test_a_full_queue_is_tried_again(url: str, scripted: ScriptedEngine) -> None:
    scripted.script.room = 0
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=1) as client,
        pytest.raises(openai.InternalServerError) as full,
    ):
        client.completions.create(model=MODEL, prompt="x")
    assert full.value.status_code == 503
    assert full.value.response.headers["retry-after"] == "1"
