"""The parameter `prediction`: where it is accepted, and what a client cannot do with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest
from http_fixtures import client_of, make_app
from scripted_engine import INFO, ScriptedEngine
from toy_tokenizer import toy_tokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
CHAT = "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi."}]}
COMPLETION = "/v1/completions", {"prompt": "Hi."}


def _expected(content: Any) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": content}}


@pytest.fixture
def scripted() -> ScriptedEngine:
    """An engine with room for the declaration of a tool."""
    engine = ScriptedEngine(toy_tokenizer())
    engine.info = replace(INFO, context_length=1024)
    return engine


@pytest.mark.parametrize(
    "path, body, others",
    [(*CHAT, {}), (*CHAT, {"n": 3}), (*CHAT, {"tools": [TOOL]}), (*COMPLETION, {"n": 3})],
    ids=["chat", "several", "tools", "completion"],
)
async def test_every_choice_has_the_prediction(
    client: httpx.AsyncClient,
    scripted: ScriptedEngine,
    path: str,
    body: dict[str, Any],
    others: dict[str, Any],
) -> None:
    parts = [{"type": "text", "text": "A fox"}, {"type": "text", "text": " here."}]
    for content in ("A fox here.", parts):
        scripted.requests.clear()
        answer = await client.post(path, json={**body, **others, **_expected(content)})
        assert answer.status_code == 200, answer.text
        assert len(scripted.requests) == others.get("n", 1)
        for request in scripted.requests:
            assert scripted.tokenizer.decode(list(request.prediction_ids)) == "A fox here."


@pytest.mark.parametrize("path, body", [CHAT, COMPLETION], ids=["chat", "completion"])
@pytest.mark.parametrize(
    "content",
    [
        "fox " * (1 << 20),
        [{"type": "text", "text": "fox " * (1 << 10)}] * (1 << 10),
        "fox " * 9000,
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}],
        7,
        None,
    ],
    ids=["4 MB", "4 MB in parts", "longer than the context", "an image", "a number", "nothing"],
)
async def test_bad_predictions_are_refused(
    client: httpx.AsyncClient,
    scripted: ScriptedEngine,
    path: str,
    body: dict[str, Any],
    content: Any,
) -> None:
    answer = await client.post(path, json={**body, **_expected(content)})
    if answer.status_code != 413:
        assert answer.status_code == 400
        assert "prediction" in answer.json()["error"]["message"]
    assert not scripted.requests
    assert (await client.post(path, json=body)).status_code == 200


async def test_a_prediction_of_4_mb_is_not_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    tokenizer = toy_tokenizer()
    encode = type(tokenizer).encode

    def counted(self: Any, text: str, **others: Any) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, **others)

    monkeypatch.setattr(type(tokenizer), "encode", counted)
    async with client_of(make_app(ScriptedEngine(tokenizer))) as client:
        path, body = CHAT
        answer = await client.post(path, json={**body, **_expected("fox " * (1 << 20))})
    assert answer.status_code in (400, 413)
    assert sum(lengths) < 10_000
