"""`POST /v1/completions`: exact wire shapes, every form of prompt, and what reaches the engine."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import httpx
import pytest
from http_fixtures import MODEL, events
from scripted_engine import CONTEXT_LENGTH, REPLY, ScriptedEngine, scripted_logprob
from tokenizers.processors import ByteLevel, TemplateProcessing

from piecework.server.openai.logprobs import finite

PATH = "/v1/completions"


async def complete(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(PATH, json={"prompt": "Hello", **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def stream(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    return events(await client.post(PATH, json={"prompt": "Hello", "stream": True, **body}))


def stream_text(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(
        choice["text"]
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    )


def start_of_reply(engine: ScriptedEngine, count: int) -> str:
    """The text of the reply's first tokens."""
    return engine.tokenizer.decode(engine.tokenizer.encode(REPLY, add_special_tokens=False)[:count])


async def test_an_answer_has_exactly_openais_members(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    answer = await complete(client, max_tokens=3)
    assert re.fullmatch(r"cmpl-[0-9a-f]{32}", answer.pop("id"))
    assert re.fullmatch(r"fp_[0-9a-f]{10}", answer.pop("system_fingerprint"))
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "text": start_of_reply(scripted, 3),
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 3,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


async def test_sixteen_tokens_unless_asked_otherwise(client: httpx.AsyncClient) -> None:
    assert (await complete(client))["usage"]["completion_tokens"] == 16
    assert (await complete(client, max_completion_tokens=7, max_tokens=9))["usage"][
        "completion_tokens"
    ] == 7


async def test_the_default_length_gives_way_to_a_long_prompt(client: httpx.AsyncClient) -> None:
    assert (await complete(client, prompt=[5] * (CONTEXT_LENGTH - 2)))["usage"][
        "completion_tokens"
    ] == 2


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("Hello", 1), (["Hello", "The"], 2), ([5, 6, 7], 1), ([[5], [6, 7]], 2)],
    ids=["text", "texts", "ids", "lists"],
)
async def test_each_form_of_prompt(
    client: httpx.AsyncClient, scripted: ScriptedEngine, prompt: Any, count: int
) -> None:
    answer = await complete(client, prompt=prompt)
    assert [choice["index"] for choice in answer["choices"]] == list(range(count))
    encode = scripted.tokenizer.encode
    given = prompt if isinstance(prompt, list) and count == 2 else [prompt]
    assert [r.prompt_ids for r in scripted.requests] == [
        encode(part) if isinstance(part, str) else part for part in given
    ]


async def test_every_parameter_reaches_the_engine(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    await complete(
        client, max_tokens=9, min_tokens=2, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1,
        presence_penalty=0.3, frequency_penalty=-0.4, repetition_penalty=1.1, seed=11,
        stop_token_ids=[9, 8, 9], ignore_eos=True, logit_bias={"5": -100, "6": 1.5}, logprobs=2,
        stop=["zzz"], skip_special_tokens=False, include_stop_str_in_output=True, priority=4,
        user="me", unknown_member={"x": 1},
    )  # fmt: skip
    (request,) = scripted.requests
    params = {
        field.name: getattr(request.params, field.name)
        for field in fields(request.params)
        if field.compare
    }
    assert params == {
        "thinking_budget": None, "thought_begin_ids": [], "thought_end_ids": [],
        "extra_args": None,
        "max_new_tokens": 9, "min_new_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7,
        "min_p": 0.1, "presence_penalty": 0.3, "frequency_penalty": -0.4, "repetition_penalty": 1.1,
        "seed": 11, "stop_token_ids": [8, 9], "ignore_eos": True, "logit_bias": {5: -100.0, 6: 1.5},
        "logprobs": 2, "prompt_logprobs": None, "prompt_logprobs_start": 0,
        "grammar": None,
    }  # fmt: skip
    assert (
        request.text.stop,
        request.text.include_stop,
        request.text.skip_special_tokens,
        request.priority,
    ) == (["zzz"], True, False, 4)


async def test_no_top_k_has_two_spellings(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    for top_k in (0, -1):
        await complete(client, top_k=top_k)
    assert [request.params.top_k for request in scripted.requests] == [-1, -1]


async def test_a_prompt_and_its_completion_may_fill_the_context(client: httpx.AsyncClient) -> None:
    assert (await complete(client, prompt=[5] * (CONTEXT_LENGTH - 9), max_tokens=9))["usage"][
        "total_tokens"
    ] == CONTEXT_LENGTH


async def test_null_means_the_default(client: httpx.AsyncClient, scripted: ScriptedEngine) -> None:
    names = (
        "max_tokens",
        "temperature",
        "top_p",
        "n",
        "stop",
        "seed",
        "logprobs",
        "logit_bias",
        "stream",
        "stream_options",
        "model",
        "user",
    )
    answer = await complete(client, **dict.fromkeys(names))
    assert answer["usage"]["completion_tokens"] == 16
    assert scripted.requests[0].params.temperature == 1.0


async def test_samples_differ_by_seed_and_share_the_id(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    answer = await complete(client, prompt=["Hello", "The"], n=3, seed=7, max_tokens=1)
    assert [request.params.seed for request in scripted.requests] == [7, 8, 9, 7, 8, 9]
    assert [request.name for request in scripted.requests] == [
        f"{answer['id']}-{i}" for i in range(6)
    ]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))


async def test_the_prompt_counts_once_however_many_samples(client: httpx.AsyncClient) -> None:
    usage = (await complete(client, prompt=[[5, 6, 7, 8], [5, 6]], n=3, max_tokens=2))["usage"]
    assert usage == {
        "prompt_tokens": 6,
        "completion_tokens": 12,
        "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


async def test_best_of_returns_the_likeliest_first(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    # The scripted log-probability falls with the token id, so the sample with the lowest tokens is
    # the best.
    replies = {0: [90], 1: [40], 2: [60], 3: [50]}
    scripted.script.reply = lambda request: replies[(request.params.seed or 0) - 100]
    answer = await complete(client, best_of=4, n=2, seed=100, max_tokens=3)
    decode = scripted.tokenizer.decode
    assert [choice["text"] for choice in answer["choices"]] == [decode([40] * 3), decode([50] * 3)]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 12
    assert all(choice["logprobs"] is None for choice in answer["choices"])


async def test_a_stop_string_ends_the_text_and_is_not_part_of_it(client: httpx.AsyncClient) -> None:
    (choice,) = (await complete(client, max_tokens=100, stop=["nothing", ", ol"]))["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hello there", "stop")
    assert stream_text(await stream(client, max_tokens=100, stop=", ol")) == "Hello there"


async def test_the_end_of_sequence_token_stops_silently(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    eos = scripted.tokenizer.eos_token_ids[0]
    scripted.script.reply = lambda request: [*scripted.tokenizer.encode("Hello"), eos]
    answer = await complete(client)
    assert answer["choices"][0] == {
        "index": 0,
        "text": "Hello",
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert answer["usage"]["completion_tokens"] == 3


async def test_logprobs_have_the_chosen_token_and_the_likeliest(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    (choice,) = (await complete(client, max_tokens=2, logprobs=1))["choices"]
    first, second = scripted.tokenizer.encode(REPLY)[:2]
    text = [scripted.tokenizer.decode([token]) for token in (first, second)]
    neighbour = scripted.tokenizer.decode([first + 1])
    entries = [scripted_logprob(first, 2, 1), scripted_logprob(second, 3, 1)]
    assert choice["logprobs"]["tokens"] == text
    assert choice["logprobs"]["token_logprobs"] == [entry.logprob for entry in entries]
    assert choice["logprobs"]["top_logprobs"][0] == {
        neighbour: entries[0].top[0][1],
        text[0]: entries[0].logprob,
    }
    assert choice["logprobs"]["text_offset"] == [0, len(text[0])]


async def test_echo_brings_the_prompt_and_its_logprobs(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    (choice,) = (await complete(client, prompt="The fox", max_tokens=2, echo=True, logprobs=0))[
        "choices"
    ]
    logprobs, prompt_tokens = choice["logprobs"], len(scripted.tokenizer.encode("The fox"))
    assert choice["text"] == "The fox" + start_of_reply(scripted, 2)
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert [
        choice["text"][at:][: len(token)]
        for at, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
    ] == logprobs["tokens"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert len(logprobs["token_logprobs"]) == prompt_tokens + 2
    assert all(isinstance(value, float) for value in logprobs["token_logprobs"][1:])


@pytest.mark.parametrize("logprob", [float("-inf"), float("nan"), -1e9])
def test_json_has_no_infinity(logprob: float) -> None:
    assert finite(logprob) == -9999.0


async def test_echo_alone_generates_nothing(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    answer = await complete(
        client, prompt=scripted.tokenizer.encode("The fox"), max_tokens=0, echo=True, logprobs=1
    )
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"]) == (
        "The fox",
        "length",
        0,
    )
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]


async def test_text_offsets_count_characters_and_skip_special_tokens(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    text = "é🦊b"
    scripted.script.reply = lambda request: [0, *scripted.tokenizer.encode(text)]
    count = len(scripted.tokenizer.encode(text)) + 1
    (choice,) = (await complete(client, max_tokens=count, logprobs=0))["choices"]
    assert choice["text"] == text
    assert choice["logprobs"]["text_offset"][:2] == [0, 0]
    assert choice["logprobs"]["text_offset"][-1] == 2
    assert choice["logprobs"]["tokens"][0] == "<s>"


CHAT_PROMPT = "<|im_start|>user\nhé<|im_end|>\n"


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("added", [False, True])
async def test_text_offsets_of_an_echoed_prompt_count_its_special_tokens(
    client: httpx.AsyncClient, scripted: ScriptedEngine, as_ids: bool, added: bool
) -> None:
    """Those that the tokenizer puts before a text are no part of what was sent."""
    backend = scripted.tokenizer.backend
    if added:
        backend.post_processor = TemplateProcessing(
            single="<s> $A", pair=None, special_tokens=[("<s>", 0)]
        )
    try:
        ids = scripted.tokenizer.encode(CHAT_PROMPT)
    finally:
        prompt = ids if as_ids else CHAT_PROMPT
        answer = await complete(client, prompt=prompt, max_tokens=3, echo=True, logprobs=0)
        backend.post_processor = ByteLevel(trim_offsets=True)
    (choice,) = answer["choices"]
    assert ids == scripted.requests[0].prompt_ids and (ids[0] == 0) == added
    shown = CHAT_PROMPT if not (added and as_ids) else "<s>" + CHAT_PROMPT
    assert choice["text"] == shown + start_of_reply(scripted, 3)
    pieces = [
        scripted.tokenizer.token_bytes(token_id)
        for token_id in [*ids, *scripted.tokenizer.encode(REPLY)[:3]]
    ]
    if added and not as_ids:
        pieces[0] = b""
    # A character's second byte begins where the character does.
    begins = [
        len(b"".join(pieces[:index]).decode("utf-8", "ignore")) for index in range(len(pieces))
    ]
    assert choice["logprobs"]["text_offset"] == begins


async def test_a_stream_has_one_final_chunk_for_each_choice(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    chunks = await stream(client, prompt=["Hello", "The"], n=2, max_tokens=5)
    assert (
        len(
            {
                (
                    chunk["id"],
                    chunk["created"],
                    chunk["object"],
                    chunk["model"],
                    chunk["system_fingerprint"],
                )
                for chunk in chunks
            }
        )
        == 1
    )
    assert all(
        set(chunk) == {"id", "object", "created", "model", "system_fingerprint", "choices"}
        for chunk in chunks
    )
    for index in range(4):
        reasons = [
            choice["finish_reason"]
            for chunk in chunks
            for choice in chunk["choices"]
            if choice["index"] == index
        ]
        assert reasons[-1] == "length"
        assert set(reasons[:-1]) == {None}
        assert stream_text(chunks, index) == start_of_reply(scripted, 5)


async def test_a_stream_tells_the_same_as_a_whole_answer(client: httpx.AsyncClient) -> None:
    options: dict[str, Any] = {"prompt": "The fox", "max_tokens": 6, "echo": True, "logprobs": 2}
    (whole,) = (await complete(client, **options))["choices"]
    pieces = [choice for chunk in await stream(client, **options) for choice in chunk["choices"]]
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert [value for piece in pieces for value in piece["logprobs"][name]] == values


async def test_usage_on_a_stream(client: httpx.AsyncClient) -> None:
    *chunks, last = await stream(client, max_tokens=4, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == (await complete(client, max_tokens=4))["usage"]


async def test_usage_on_every_chunk(client: httpx.AsyncClient) -> None:
    chunks = await stream(
        client, max_tokens=4, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 4]
    assert all(chunk["usage"]["prompt_tokens"] == 2 for chunk in chunks)


async def test_several_tokens_of_one_step_are_one_chunk(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    scripted.script.tokens_per_step = 4
    assert len(await stream(client, max_tokens=8)) == 2
