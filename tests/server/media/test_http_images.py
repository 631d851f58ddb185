"""Images in requests of every endpoint family: what reaches the engine, and what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from http_fixtures import client_of, make_app
from image_stand_in import PLACEHOLDER, TOKENS, StandIn, base64_of, data_url, image_file
from scripted_engine import ScriptedEngine

from piecework.runtime.core.images import Preprocessed
from piecework.server.media.process import ProcessEnded

PNG, JPEG, WEBP, GIF = (image_file(kind) for kind in ("PNG", "JPEG", "WEBP", "GIF"))
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


def part(content: bytes = PNG, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(content), **more}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


def block(content: bytes = PNG, kind: str = "image/png") -> dict[str, Any]:
    source = {"type": "base64", "media_type": kind, "data": base64_of(content)}
    return {"type": "image", "source": source}


@pytest.fixture
def stand_in(scripted: ScriptedEngine) -> StandIn:
    return StandIn(scripted.tokenizer)


@pytest.fixture
async def seeing(scripted: ScriptedEngine, stand_in: StandIn) -> AsyncIterator[httpx.AsyncClient]:
    app = make_app(scripted, preprocessor=stand_in, limit_mm_per_prompt="image=3")
    async with client_of(app) as client:
        yield client


USE = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [text("Seen:"), block(JPEG)]}
FILE = {"type": "input_image", "image_url": data_url(PNG), "detail": "low"}
BODIES: dict[str, tuple[str, dict[str, Any], list[bytes]]] = {
    "chat": (CHAT, {"messages": [user(text("What"), part(), text("is"), part(JPEG))]}, [PNG, JPEG]),
    "turns": (
        CHAT,
        {"messages": [user(part(WEBP)), {"role": "assistant", "content": "Red."}, user(part(GIF))]},
        [WEBP, GIF],
    ),
    "blocks": (
        MESSAGES,
        {"max_tokens": 4, "messages": [{"role": "user", "content": [block(), text("What?")]}]},
        [PNG],
    ),
    "tool result": (
        MESSAGES,
        {
            "max_tokens": 4,
            "messages": [
                {"role": "user", "content": "Look."},
                {"role": "assistant", "content": [USE]},
                {"role": "user", "content": [RESULT]},
            ],
        },
        [JPEG],
    ),
    "response": (
        RESPONSES,
        {
            "model": "toy",
            "input": [{"role": "user", "content": [FILE, {"type": "input_text", "text": "?"}]}],
        },
        [PNG],
    ),
    "output of a call": (
        RESPONSES,
        {
            "model": "toy",
            "input": [
                {"role": "user", "content": "Look."},
                {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": [FILE]},
            ],
        },
        [PNG],
    ),
    "ollama": (
        "/api/chat",
        {
            "model": "toy",
            "stream": False,
            "messages": [{"role": "user", "content": "What?", "images": [base64_of(PNG)]}],
        },
        [PNG],
    ),
    "ollama prompt": (
        "/api/generate",
        {"model": "toy", "stream": False, "prompt": "What?", "images": [base64_of(PNG)]},
        [PNG],
    ),
    "sglang": (
        "/generate",
        {"text": f"A {PLACEHOLDER}{PLACEHOLDER}", "image_data": [data_url(PNG), base64_of(GIF)]},
        [PNG, GIF],
    ),
    "llama.cpp": (
        "/completion",
        {
            "prompt": {"prompt_string": "A <__media__>?", "multimodal_data": [base64_of(PNG)]},
            "n_predict": 4,
        },
        [PNG],
    ),
}


@pytest.mark.parametrize("name", BODIES)
async def test_each_family_sends_images_to_the_engine(
    seeing: httpx.AsyncClient, scripted: ScriptedEngine, stand_in: StandIn, name: str
) -> None:
    path, body, files = BODIES[name]
    answer = await seeing.post(path, json=body)
    assert answer.status_code == 200, answer.text
    (request,) = stand_in.requests
    assert [file.data for file in request.images] == files
    images = scripted.requests[-1].images
    assert [image.tensors["pixels"].data for image in images] == files
    assert all(image.length == TOKENS for image in images)
    assert len(scripted.requests[-1].prompt_ids) > TOKENS * len(files)


async def test_texts_and_images_keep_their_order(
    seeing: httpx.AsyncClient, stand_in: StandIn
) -> None:
    await seeing.post(CHAT, json={"messages": [user(text("one"), part(), text("two"), part(GIF))]})
    assert f"one{PLACEHOLDER}two{PLACEHOLDER}" in stand_in.requests[0].text


async def test_usage_counts_image_tokens_and_text_has_none(seeing: httpx.AsyncClient) -> None:
    body = {"messages": [user(text("What?"), part(), part())], "n": 2, "max_tokens": 2}
    usage = (await seeing.post(CHAT, json=body)).json()["usage"]
    assert usage["prompt_tokens_details"]["image_tokens"] == 2 * TOKENS
    plain = (await seeing.post(CHAT, json={"messages": [user(text("What?"))]})).json()["usage"]
    assert "image_tokens" not in plain["prompt_tokens_details"]
    items = [{"role": "user", "content": [FILE, FILE]}]
    usage = (await seeing.post(RESPONSES, json={**LIMIT, "input": items})).json()["usage"]
    assert usage["input_tokens_details"]["image_tokens"] == 2 * TOKENS
    path, generated, files = BODIES["sglang"]
    meta = (await seeing.post(path, json=generated)).json()["meta_info"]
    assert meta["image_tokens"] == len(files) * TOKENS


async def test_token_counts_include_images(
    seeing: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    asked: list[tuple[str, dict[str, Any], str]] = [
        ("/tokenize", {"messages": [user(part())]}, "count"),
        (f"{MESSAGES}/count_tokens", {"messages": [{"role": "user", "content": [block()]}]},
         "input_tokens"),
        (f"{RESPONSES}/input_tokens",
         {"model": "toy", "input": [{"role": "user", "content": [FILE]}]}, "input_tokens"),
    ]  # fmt: skip
    await seeing.post(CHAT, json={"messages": [user(part())]})
    tokens = len(scripted.requests[-1].prompt_ids)
    for path, body, member in asked:
        assert (await seeing.post(path, json=body)).json()[member] == tokens


async def test_clients_learn_that_the_model_reads_images(
    seeing: httpx.AsyncClient, client: httpx.AsyncClient
) -> None:
    await seeing.post("/tokenize", json={"messages": [user(part())]})
    for asked, sees in ((seeing, True), (client, False)):
        card = (await asked.get("/v1/models")).json()["data"][0]
        assert card.get("input_modalities") == (["text", "image"] if sees else None)
        assert card.get("image_tokens_1024") == (TOKENS if sees else None)
        assert (await asked.get("/props")).json()["modalities"]["vision"] is sees
        shown = (await asked.post("/api/show", json={"model": "toy"})).json()
        assert ("vision" in shown["capabilities"]) is sees


LIMIT = {"model": "toy", "max_output_tokens": 2}
SVG = b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'/>"
ONE = "messages[0].content[0].image_url"


def address(url: str) -> dict[str, Any]:
    return {"messages": [user({"type": "image_url", "image_url": {"url": url}})]}


REFUSED: dict[str, tuple[str, dict[str, Any], str | None, str]] = {
    "svg type": (CHAT, address(data_url(SVG, "image/svg+xml")), ONE, "send PNG"),
    "svg content": (CHAT, address(data_url(SVG)), ONE, "an SVG; send PNG"),
    "media type": (CHAT, address(data_url(PNG, "text/html")), ONE, "text/html"),
    "bad base64": (CHAT, address("data:image/png;base64,iVBOR*w0KGgo"), ONE, "base64 is damaged"),
    "no base64": (CHAT, address("data:image/png,abc"), ONE, "has no base64"),
    "empty": (CHAT, address("data:image/png;base64,"), ONE, "empty"),
    "remote": (CHAT, address("https://a.example/x.png"), ONE, "--allow-remote-media"),
    "metadata": (CHAT, address("http://169.254.169.254/latest"), ONE, "--allow-remote-media"),
    "file": (CHAT, address("file:///etc/passwd"), ONE, "--allowed-local-media-path"),
    "no address": (CHAT, address("cat.png"), ONE, "no address of an image"),
    "too many": (
        CHAT,
        {"messages": [user(part(), part()), user(part(), text("x"), part())]},
        "messages[1].content[2].image_url",
        "send fewer",
    ),
    "assistant": (
        CHAT,
        {"messages": [user(text("x")), {"role": "assistant", "content": [part()]}]},
        "messages[1].content[0].image_url",
        "move it to a message of the user",
    ),
    "system": (
        CHAT,
        {"messages": [{"role": "system", "content": [part()]}, user(text("x"))]},
        "messages[0].content[0].image_url",
        "move it to a message of the user",
    ),
    "detail": (CHAT, {"messages": [user(part(detail="huge"))]}, "messages[0].content[0].detail",
               "auto, low or high"),
    "placeholder": (CHAT, {"messages": [user(text(PLACEHOLDER), part())]}, "messages", "leave it"),
    "uploaded": (
        RESPONSES,
        {"model": "toy",
         "input": [{"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}]},
        "input[0].content[0].file_id",
        "data URL",
    ),
    "response": (
        RESPONSES,
        {"model": "toy", "input": [{"role": "user", "content": [text("x")]},
                   {"role": "user", "content": [text("x"), {**FILE, "image_url": "data:,"}]}]},
        "input[1].content[1].image_url",
        "has no base64",
    ),
    "generate": ("/generate", {"text": PLACEHOLDER, "image_data": "AAAA"}, "image_data",
                 "no image"),
    "ids": ("/generate", {"input_ids": [5], "image_data": [data_url(PNG)]}, "image_data", "text"),
    "block": (
        MESSAGES,
        {"max_tokens": 4, "messages": [{"role": "user", "content": [block(SVG, "image/png")]}]},
        None,
        "messages[0].content[0].source: the file is an SVG",
    ),
    "block of an assistant": (
        MESSAGES,
        {"max_tokens": 4, "messages": [{"role": "assistant", "content": [block()]}]},
        None,
        "messages[0].content[0]: ",
    ),
    "ollama": (
        "/api/chat",
        {"model": "toy", "messages": [{"role": "user", "content": "x", "images": ["%%"]}]},
        None,
        "messages[0].images[0]: the base64 is damaged",
    ),
    "raw": (
        "/api/generate",
        {"model": "toy", "prompt": "x", "raw": True, "images": [base64_of(PNG)]},
        None,
        "chat template",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_be_read_is_a_400_that_names_the_part(
    seeing: httpx.AsyncClient, scripted: ScriptedEngine, name: str
) -> None:
    path, body, param, remedy = REFUSED[name]
    answer = await seeing.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert remedy in message, message
    if param is not None:
        assert error["param"] == param, error
    assert not scripted.requests


async def test_an_image_for_a_text_model_names_the_model(
    client: httpx.AsyncClient, scripted: ScriptedEngine
) -> None:
    for name in BODIES:
        path, body, _ = BODIES[name]
        answer = await client.post(path, json=body)
        if name in ("tool result", "output of a call"):
            assert answer.status_code == 200
            prompt = scripted.tokenizer.decode(scripted.requests[-1].prompt_ids)
            assert "(image: this model reads only text)" in prompt
        else:
            assert answer.status_code == 400 and "'toy' reads only text" in answer.text, name


async def test_a_refusal_of_the_process_names_the_part_and_its_death_costs_one_request(
    seeing: httpx.AsyncClient, stand_in: StandIn
) -> None:
    body = {"messages": [user(text("a"), part()), user(part())]}
    stand_in.refusal = Preprocessed(error="the image is truncated; send it whole", image=1)
    answer = await seeing.post(CHAT, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "messages[1].content[0].image_url"
    stand_in.refusal, stand_in.error = None, ProcessEnded("the process has ended")
    error = (await seeing.post(CHAT, json=body)).json()["error"]
    assert error["param"] == "messages" and "send smaller" in error["message"]
    stand_in.error = None
    assert (await seeing.post(CHAT, json=body)).status_code == 200


async def test_the_server_takes_its_own_output_back(
    seeing: httpx.AsyncClient, stand_in: StandIn
) -> None:
    output = {"type": "function_call_output", "call_id": "a", "output": [FILE]}
    call = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    items = [{"role": "user", "content": [FILE]}, call, output]
    first = (await seeing.post(RESPONSES, json={**LIMIT, "input": items})).json()
    listed = (await seeing.get(f"{RESPONSES}/{first['id']}/input_items")).json()["data"][::-1]
    assert listed[0]["content"] == [FILE] and listed[2]["output"] == [FILE]
    follow = {**LIMIT, "previous_response_id": first["id"], "input": "And now?"}
    assert (await seeing.post(RESPONSES, json=follow)).status_code == 200
    assert len(stand_in.requests[-1].images) == 2
    assert (await seeing.post(RESPONSES, json={**LIMIT, "input": listed})).status_code == 200
    assert [file.detail for file in stand_in.requests[-1].images] == ["low", "low"]
    body = {"messages": [user(text("x"), part(detail="high"))], "store": True}
    chat = (await seeing.post(CHAT, json=body)).json()
    stored = (await seeing.get(f"{CHAT}/{chat['id']}/messages")).json()["data"]
    parts = stored[0]["content_parts"]
    assert parts == body["messages"][0]["content"]  # type: ignore[index]
    assert (await seeing.post(CHAT, json={"messages": [user(*parts)]})).status_code == 200


async def test_bodies_with_images_may_be_larger_and_stay_bounded(
    seeing: httpx.AsyncClient, client: httpx.AsyncClient
) -> None:
    # A PNG reader ignores what follows the image.
    large = address(data_url(PNG + bytes(6 * 2**20)))
    assert (await seeing.post(CHAT, json=large)).status_code == 200
    assert (await client.post(CHAT, json=large)).status_code == 413
    too_large = await seeing.post(CHAT, json=address(data_url(PNG + bytes(17 * 2**20))))
    assert too_large.status_code == 400 and "--max-image-bytes" in too_large.text
    huge = b'{"x": "' + bytes(40 * 2**20).replace(b"\0", b"A") + b'"}'
    header = {"Content-Type": "application/json"}
    assert (await seeing.post(CHAT, content=huge, headers=header)).status_code == 413
