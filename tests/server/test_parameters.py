"""The table of parameters in docs/parameters.md, the wire models and the server's behaviour agree.

`python tests/server/test_parameters.py` writes the table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from http_fixtures import client_of, make_app
from pydantic import BaseModel
from scripted_engine import ScriptedEngine

from piecework.server.anthropic.requests import MessagesRequest
from piecework.server.core.schemas import Refuses, WireModel
from piecework.server.llama_cpp.requests import CompletionBody
from piecework.server.native.requests import NativeSampling
from piecework.server.ollama.requests import OllamaOptions
from piecework.server.openai.requests import ChatCompletionRequest, CompletionRequest
from piecework.server.openai.responses.requests import ResponsesRequest
from piecework.server.pooling.requests import EmbeddingsRequest

DOCUMENT = Path(__file__).parents[2] / "docs" / "parameters.md"
FAMILIES: dict[str, type[WireModel]] = {
    "chat": ChatCompletionRequest,
    "completions": CompletionRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
    "generate": NativeSampling,
    "ollama": OllamaOptions,
    "completion": CompletionBody,
    "embeddings": EmbeddingsRequest,
}
MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}),
    "completions": ("/v1/completions", {"prompt": "Hi", "max_tokens": 1}),
    "responses": ("/v1/responses", {"model": "toy", "input": "Hi", "max_output_tokens": 1}),
    "messages": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
    "generate": ("/generate", {"text": "Hi", "sampling_params": {"max_new_tokens": 1}}),
    "ollama": ("/api/generate", {"model": "toy", "prompt": "Hi", "options": {"num_predict": 1}}),
    "completion": ("/completion", {"prompt": "Hi", "n_predict": 1}),
}
INSIDE = {"generate": "sampling_params", "ollama": "options"}
"""The member that holds the parameters of a family."""
TABLE = "<!-- table -->\n"
ODD = [7, "x", {"a": {"b": [1]}}, [None], 0.5]
"""Values of every kind: some of them are of the wrong type for any parameter."""


def table_of(model: type[WireModel]) -> dict[str, str]:
    """Each known parameter, and what becomes of it."""
    found = {}
    for name, field in model.model_fields.items():
        refused = any(isinstance(one, Refuses) for one in field.metadata)
        found[field.alias or name] = "refused" if refused else "used"
    for name, other in model.others.items():
        found[name] = "hint" if other.remedy is None else "refused"
    return found


def rows() -> str:
    tables = {family: table_of(model) for family, model in FAMILIES.items()}
    names = sorted({name for table in tables.values() for name in table})
    head = f"| parameter | {' | '.join(tables)} |\n|---|{'---|' * len(tables)}\n"
    return head + "".join(
        f"| `{name}` | {' | '.join([table.get(name, '') for table in tables.values()])} |\n"
        for name in names
    )


def test_the_document_has_the_table_of_the_wire_models() -> None:
    assert DOCUMENT.read_text().partition(TABLE)[2] == rows()


@pytest.mark.parametrize("family", list(FAMILIES))
def test_no_parameter_is_both_a_member_and_one_that_is_not_used(family: str) -> None:
    model: type[BaseModel] = FAMILIES[family]
    assert not model.model_fields.keys() & FAMILIES[family].others.keys()


async def statuses(scripted: ScriptedEngine, family: str, kind: str) -> dict[str, list[Any]]:
    """Status and parameter of the answers to each parameter of a kind, with odd values."""
    path, body = BODIES[family]
    answers: dict[str, list[Any]] = {}
    async with client_of(make_app(scripted)) as client:
        for name, what in table_of(FAMILIES[family]).items():
            for value in ODD if what == kind else ():
                said = {name: value}
                if (inside := INSIDE.get(family)) is not None:
                    said = {inside: {**body[inside], **said}}
                answer = await client.post(path, json={**body, **said})
                told = answer.status_code == 200 or name in answer.text
                answers.setdefault(name, []).append((answer.status_code, told))
    return answers


@pytest.mark.parametrize("family", list(BODIES))
async def test_a_hint_never_fails_a_request(scripted: ScriptedEngine, family: str) -> None:
    for name, found in (await statuses(scripted, family, "hint")).items():
        assert set(found) == {(200, True)}, name


@pytest.mark.parametrize("family", list(BODIES))
async def test_what_is_refused_is_refused_by_its_name(
    scripted: ScriptedEngine, family: str
) -> None:
    for name, found in (await statuses(scripted, family, "refused")).items():
        assert set(found) == {(400, True)}, name


async def test_neutral_values_of_what_is_refused_are_taken(scripted: ScriptedEngine) -> None:
    path, body = BODIES["chat"]
    async with client_of(make_app(scripted)) as client:
        for name, other in ChatCompletionRequest.others.items():
            for value in (*other.neutral, None, False, "", [], {}):
                answer = await client.post(path, json={**body, name: value})
                assert answer.status_code == 200, (name, value, answer.text)


async def test_members_that_nobody_knows_are_passed_over(scripted: ScriptedEngine) -> None:
    async with client_of(make_app(scripted)) as client:
        for path, body in BODIES.values():
            answer = await client.post(path, json={**body, "x_of_a_client": {"a": 1}})
            assert answer.status_code == 200, answer.text


if __name__ == "__main__":
    DOCUMENT.write_text(DOCUMENT.read_text().partition(TABLE)[0] + TABLE + rows())
