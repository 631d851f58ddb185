"""The whole server as its users meet it: a real process, the real `openai` client, crashes and
disconnects included.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import jsonschema
import openai
import pytest
import pytest_asyncio
from server_process import ServerProcess, ready
from tiny_models import make_tiny_model

from piecework.bench import structured, tool_calls
from piecework.bench.report import Report
from piecework.bench.structured import StructuredSettings
from piecework.bench.target import Api, Target
from piecework.bench.tool_calls import ToolSettings
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.llm import LLM

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPTS = [[1 + (11 * i + j) % 300 for j in range(4 + 9 * i)] for i in range(8)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 60, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3"))


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[ServerProcess]:
    with ready(model, "--max-total-tokens", "4096", "--enable-sleep-mode") as process:
        yield process


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(server: ServerProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as found:
        yield found


@pytest.fixture(scope="module")
def expected(model: str) -> list[str]:
    """The same model in this process, without HTTP."""
    llm = LLM(model, dtype="float32", max_total_tokens=4096, num_threads=1)
    return [
        done.text
        for done in llm.generate(
            PROMPTS, SamplingParams(temperature=0.0, max_new_tokens=60, ignore_eos=True)
        )
    ]


async def streamed(client: openai.AsyncOpenAI, prompt: list[int], **extra: Any) -> str:
    """The text of a streamed completion, its wire shape checked on the way."""
    text, finished = "", 0
    async for chunk in await client.completions.create(
        model="tiny", prompt=prompt, stream=True, **{**GREEDY, **extra}
    ):
        assert not finished, "something came after the final chunk"
        text += chunk.choices[0].text
        finished += chunk.choices[0].finish_reason is not None
    assert finished == 1
    return text


def figures(server: ServerProcess) -> dict[str, float]:
    """The gauges of /metrics by name."""
    found = re.findall(
        r"^piecework:(\w+)\{[^}]*\} ([\d.e+-]+)$",
        httpx.get(f"{server.url}/metrics").text,
        re.MULTILINE,
    )
    return {name: float(value) for name, value in found}


async def until_idle(server: ServerProcess) -> None:
    for _ in range(200):
        now = figures(server)
        if now["num_running_reqs"] == now["num_queue_reqs"] == now["num_used_tokens"] == 0:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"requests or pages are left: {now}")


async def test_completions_are_the_models(client: openai.AsyncOpenAI, expected: list[str]) -> None:
    answers = await asyncio.gather(
        *(client.completions.create(model="tiny", prompt=prompt, **GREEDY) for prompt in PROMPTS)
    )
    assert [answer.choices[0].text for answer in answers] == expected
    assert [answer.usage.prompt_tokens for answer in answers if answer.usage] == [
        len(prompt) for prompt in PROMPTS
    ]


async def test_streams_are_the_same_text(client: openai.AsyncOpenAI, expected: list[str]) -> None:
    assert await asyncio.gather(*(streamed(client, prompt) for prompt in PROMPTS)) == expected


async def test_one_request_may_hold_all_prompts(
    client: openai.AsyncOpenAI, expected: list[str]
) -> None:
    answer = await client.completions.create(model="tiny", prompt=PROMPTS, **GREEDY)
    assert [choice.text for choice in answer.choices] == expected


async def test_a_seed_gives_the_same_text_alone_and_in_a_crowd(client: openai.AsyncOpenAI) -> None:
    async def seeded(seed: int) -> str:
        answer = await client.completions.create(
            model="tiny", prompt=PROMPTS[2], seed=seed, temperature=1.0, max_tokens=40
        )
        return str(answer.choices[0].text)

    alone = [await seeded(seed) for seed in range(4)]
    assert await asyncio.gather(*(seeded(seed) for seed in range(4))) == alone
    assert len(set(alone)) == 4


async def test_a_chat(client: openai.AsyncOpenAI, server: ServerProcess) -> None:
    messages: list[Any] = [{"role": "user", "content": "How many apples?"}]
    answer = await client.chat.completions.create(
        model="tiny", messages=messages, temperature=0.0, max_tokens=12, logprobs=True
    )
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].logprobs is not None and answer.usage is not None
    assert len(answer.choices[0].logprobs.content or []) == answer.usage.completion_tokens


async def test_a_repeated_prompt_is_found_in_the_cache(client: openai.AsyncOpenAI) -> None:
    prompt = [300 + j % 50 for j in range(80)]
    await client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
    answer = await client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 64
    for found in (0, 64):
        salted = await client.completions.create(
            model="tiny", prompt=prompt, max_tokens=2, extra_body={"cache_salt": "another"}
        )
        assert salted.usage.prompt_tokens_details.cached_tokens == found


async def test_a_killed_engine_is_a_pause_in_the_stream(
    client: openai.AsyncOpenAI, server: ServerProcess, model: str
) -> None:
    long = {"max_tokens": 250}
    llm = LLM(model, dtype="float32", max_total_tokens=4096, num_threads=1)
    wanted = [
        done.text
        for done in llm.generate(
            PROMPTS, SamplingParams(temperature=0.0, max_new_tokens=250, ignore_eos=True)
        )
    ]
    before = figures(server)["generation_tokens_total"]
    jobs = [asyncio.create_task(streamed(client, prompt, **long)) for prompt in PROMPTS]
    while figures(server)["generation_tokens_total"] < before + 200:
        await asyncio.sleep(0.01)
    os.kill(server.engine().pid, signal.SIGKILL)
    assert await asyncio.gather(*jobs) == wanted
    await until_idle(server)


async def test_an_engine_that_sleeps_under_traffic_loses_no_request(
    client: openai.AsyncOpenAI, server: ServerProcess, expected: list[str]
) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        for round_ in range(6):
            jobs = [asyncio.create_task(streamed(client, prompt)) for prompt in PROMPTS]
            await asyncio.sleep(0.02 * round_)
            assert (await http.post("/sleep", params={"level": 1 + round_ % 2})).status_code == 200
            assert (await http.get("/is_sleeping")).json()["is_sleeping"]
            assert (await http.get("/health")).status_code == 200
            if round_ == 5:  # The process that replaces a killed one is awake.
                os.kill(server.engine().pid, signal.SIGKILL)
            else:
                assert (await http.post("/wake_up")).status_code == 200
            assert await asyncio.gather(*jobs) == expected
        async with asyncio.timeout(60):  # The requests may have ended before the engine was killed.
            while (await http.get("/is_sleeping")).json()["is_sleeping"]:
                await asyncio.sleep(0.05)
    await until_idle(server)


async def test_clients_that_leave_at_any_moment_leave_nothing_behind(
    client: openai.AsyncOpenAI, server: ServerProcess
) -> None:
    choose = random.Random(1)

    async def leave_early(number: int) -> None:
        prompt = [choose.randrange(1, 400) for _ in range(choose.randrange(1, 200))]
        body = {
            "prompt": prompt,
            "max_tokens": 400,
            "ignore_eos": True,
            "stream": number % 2 == 0,
            "n": 1 + number % 3,
        }
        async with httpx.AsyncClient(base_url=server.url) as http:
            job = asyncio.create_task(http.post("/v1/completions", json=body, timeout=60))
            await asyncio.sleep(choose.random() * 0.4)
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)

    stays = asyncio.create_task(streamed(client, PROMPTS[0]))
    await asyncio.gather(*(leave_early(number) for number in range(60)))
    assert len(await stays) > 0
    await until_idle(server)


async def test_bad_input_in_a_crowd_disturbs_nobody(
    client: openai.AsyncOpenAI, server: ServerProcess, expected: list[str]
) -> None:
    bad: list[tuple[dict[str, Any], int]] = [
        ({"prompt": [1, 2], "max_tokens": -1}, 400),
        ({"prompt": [1] * 5000}, 400),
        ({"prompt": [10**6]}, 400),
        ({"prompt": [1], "logit_bias": {"99999": 1}}, 400),
        ({"prompt": [1], "model": "other"}, 404),
        ({"prompt": [1], "temperature": -1}, 400),
        ({"prompt": [1], "n": 10_000}, 400),
    ]

    async def post(body: dict[str, Any], status: int) -> None:
        async with httpx.AsyncClient(base_url=server.url) as http:
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == status and answer.json()["error"]["message"], answer.text

    good = [asyncio.create_task(streamed(client, prompt)) for prompt in PROMPTS]
    await asyncio.gather(*(post(body, status) for body, status in bad * 3))
    assert await asyncio.gather(*good) == expected
    await until_idle(server)


async def test_structured_answers_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "maximum": 9}},
        "required": ["kind", "legs"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "pet", "schema": schema}}
    asked: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": "A pet"}],
        "response_format": form,
        "max_tokens": 200,
        "seed": 5,
    }
    whole = await client.chat.completions.create(**asked)
    pieces = [
        chunk.choices[0].delta.content or ""
        async for chunk in await client.chat.completions.create(**asked, stream=True)
        if chunk.choices
    ]
    assert whole.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(whole.choices[0].message.content or ""), schema)
    assert "".join(pieces) == whole.choices[0].message.content


async def test_many_schemas_and_calls_are_followed(server: ServerProcess) -> None:
    target = Target(base_url=server.url)
    quick = StructuredSettings(concurrencies=(), num_schemas=18, max_tokens=150)
    tools = ToolSettings(num_requests=16, max_tokens=150)
    for measured in (
        partial(structured.run, target, quick, Report(None)),
        partial(tool_calls.run, replace(target, api=Api.CHAT), tools, Report(None)),
    ):
        assert await asyncio.to_thread(measured) == 0


async def test_a_prediction_changes_no_answer_and_is_counted(
    client: openai.AsyncOpenAI, server: ServerProcess
) -> None:
    chat: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": "Tell me about foxes."}],
        **GREEDY,
    }
    plain = await client.chat.completions.create(**chat)
    text = plain.choices[0].message.content
    assert text is not None and plain.usage is not None
    parts = [{"type": "text", "text": part} for part in (text[:20], text[23:])]
    for content in (text, parts):
        found = await client.chat.completions.create(
            **chat, prediction={"type": "content", "content": content}
        )
        assert found.choices[0].message.content == text
        details = found.usage and found.usage.completion_tokens_details
        # A random model's text has other tokens when it is encoded again, so most may be wrong.
        assert details is not None and details.accepted_prediction_tokens is not None
        assert details.rejected_prediction_tokens is not None
    metrics = httpx.get(f"{server.url}/metrics").text
    accepted = re.findall(r"^vllm:spec_decode_num_accepted_tokens_total.* (\S+)$", metrics, re.M)
    assert float(accepted[0]) > 0
    with pytest.raises(openai.BadRequestError, match="prediction has"):
        await client.chat.completions.create(
            **chat, prediction={"type": "content", "content": "fox " * 9000}
        )
    with pytest.raises(openai.BadRequestError, match="prediction"):
        await client.chat.completions.create(**chat, prediction={"type": "file", "content": "a"})
