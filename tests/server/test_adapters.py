"""Adapters (LoRA) as clients meet them: chosen by name on each API, loaded and unloaded while the
server answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from http_fixtures import client_of, error_of, make_app
from scripted_engine import ScriptedEngine
from server_process import ServerProcess, ready
from tiny_adapters import make_adapter
from tiny_models import make_tiny_model

from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.llm import LLM
from piecework.server.native import adapters
from tests.server.test_keys import OTHER, SECRET, Asking, entry, keys_file

PROMPT = [5, 6, 7, 8, 9, 10]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def base(folder: Path) -> Path:
    base = make_tiny_model(folder.parent / "base")
    for seed in range(4):
        make_adapter(folder / f"a{seed}", base, seed=seed, rank=4)
    return base


@pytest.fixture(scope="module")
def server(base: Path, folder: Path) -> Iterator[ServerProcess]:
    flags = ["--lora-modules", f"sql={folder / 'a0'}", f"chat={folder / 'a1'}"]
    flags += ["--lora-root", str(folder), "--max-loras", "2", "--max-total-tokens", "4096"]
    with ready(str(base), "--served-model-name", "tiny", *flags) as process:
        yield process


@pytest.fixture(scope="module")
def texts(base: Path, folder: Path) -> dict[str, str]:
    """What the base model and each adapter answer, in this process."""
    names = [f"a{number}" for number in range(4)]
    modules = ",".join(f"{name}={folder / name}" for name in names)
    llm = LLM(str(base), lora_modules=modules, dtype="float32", max_total_tokens=4096)
    params = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
    results = llm.generate([PROMPT] * 5, params, adapters=["", *names])
    found = dict(zip(["", *names], (each.text for each in results), strict=True))
    assert len(set(found.values())) == 5
    return found


def complete(server: ServerProcess, model: str) -> dict[str, Any]:
    body = {"model": model, "prompt": PROMPT, **GREEDY}
    answer = server.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_an_adapter_is_chosen_by_its_name_on_each_api(
    server: ServerProcess, texts: dict[str, str]
) -> None:
    for model, name in (("tiny", ""), ("sql", "a0"), ("tiny:chat", "a1"), ("default", "")):
        answer = complete(server, model)
        assert answer["choices"][0]["text"] == texts[name]
        assert answer["model"] == (model.removeprefix("tiny:") if name else "tiny")
    post = server.client.post
    params = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    body = {"input_ids": [PROMPT] * 3, "sampling_params": params}
    for paths, names in ((["sql", None, "chat"], ["a0", "", "a1"]), ("sql", ["a0"] * 3)):
        found = post("/generate", json={**body, "lora_path": paths}).json()
        assert [each["text"] for each in found] == [texts[name] for name in names]
    body = {"model": "tiny", "prompt": PROMPT, **GREEDY, "lora_path": "chat"}
    assert post("/v1/completions", json=body).json()["choices"][0]["text"] == texts["a1"]
    body = {
        "model": "chat",
        "prompt": PROMPT,
        "n_predict": 12,
        "temperature": 0,
        "ignore_eos": True,
    }
    assert post("/completion", json=body).json()["content"] == texts["a1"]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12}
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    asked = {"temperature": 0, "max_tokens": 12}
    wanted = client.chat.completions.create(model="sql", messages=chat["messages"], **asked)  # type: ignore[call-overload]
    text = wanted.choices[0].message.content
    message = post("/v1/messages", json={"model": "sql", "temperature": 0, **chat}).json()
    assert (message["model"], message["content"][0]["text"]) == ("sql", text)
    response = client.responses.create(
        model="sql", input="Hi", temperature=0, max_output_tokens=12, store=False
    )
    assert (response.model, response.output_text) == ("sql", text)
    ollama = {"model": "sql", "stream": False, "options": {"temperature": 0, "num_predict": 12}}
    told = post("/api/chat", json={**ollama, "messages": chat["messages"]}).json()
    assert told["message"]["content"] == text


def test_the_list_of_models_has_adapters_with_their_parent(server: ServerProcess) -> None:
    cards = {card["id"]: card for card in server.client.get("/v1/models").json()["data"]}
    assert {"tiny", "sql", "chat"} <= cards.keys()
    assert cards["sql"]["parent"] == "tiny" and cards["sql"]["root"].endswith("a0")
    assert server.client.get("/v1/models/sql").json()["id"] == "sql"
    names = [each["name"] for each in server.client.get("/api/tags").json()["models"]]
    assert {"sql:latest", "chat:latest"} <= set(names)


def test_a_model_that_is_no_adapter_is_not_found(server: ServerProcess) -> None:
    body = {"prompt": PROMPT, **GREEDY}
    for members, param in (
        ({"model": "other"}, "model"),
        ({"model": "tiny:other"}, "model"),
        ({"model": "other:sql"}, "model"),
        ({"model": "tiny", "lora_path": "other"}, "lora_path"),
    ):
        error_of(server.client.post("/v1/completions", json={**body, **members}), 404, param)
    both = {**body, "model": "sql", "lora_path": "chat"}
    error_of(server.client.post("/v1/completions", json=both), 400, "lora_path")


def test_adapters_come_and_go_while_the_server_answers(
    server: ServerProcess, texts: dict[str, str], folder: Path
) -> None:
    post = server.client.post
    for prefix in ("/v1", ""):
        loaded = post(f"{prefix}/load_lora_adapter", json={"lora_name": "new", "lora_path": "a2"})
        assert loaded.json()["loaded_adapters"]["new"] == str(folder / "a2")
        assert complete(server, "new")["choices"][0]["text"] == texts["a2"]
        body = {"lora_name": "new", "lora_path": str(folder / "a3")}
        error_of(post("/v1/load_lora_adapter", json=body), 400, "lora_name")
        assert post("/v1/load_lora_adapter", json={**body, "load_inplace": True}).status_code == 200
        assert complete(server, "new")["choices"][0]["text"] == texts["a3"]
        gone = post(f"{prefix}/unload_lora_adapter", json={"lora_name": "new"})
        assert "new" not in gone.json()["loaded_adapters"]
        body = {"model": "new", "prompt": PROMPT}
        error_of(post("/v1/completions", json=body), 404, "model")


def test_an_adapter_of_two_names_stays_until_both_are_gone(
    server: ServerProcess, texts: dict[str, str]
) -> None:
    post = server.client.post
    for name in ("one", "two"):
        body = {"lora_name": name, "lora_path": "a2"}
        assert post("/v1/load_lora_adapter", json=body).status_code == 200
    body = {"lora_name": "one", "lora_path": "a3", "load_inplace": True}
    assert post("/v1/load_lora_adapter", json=body).status_code == 200
    assert complete(server, "two")["choices"][0]["text"] == texts["a2"]
    for name in ("two", "one"):
        assert post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code == 200
        error_of(post("/v1/completions", json={"model": name, "prompt": PROMPT}), 404, "model")


async def test_many_loads_under_traffic_change_no_text(
    server: ServerProcess, texts: dict[str, str]
) -> None:
    wanted = {"sql": texts["a0"], "chat": texts["a1"], "tiny": texts[""]}
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        done = asyncio.Event()

        async def ask(model: str) -> int:
            count = 0
            while not done.is_set():
                body = {"model": model, "prompt": PROMPT, **GREEDY}
                answer = (await client.post("/v1/completions", json=body)).json()
                assert answer["choices"][0]["text"] == wanted[model]
                count += 1
            return count

        jobs = [asyncio.create_task(ask(model)) for model in wanted]
        for number in range(20):
            body = {"lora_name": f"n{number}", "lora_path": f"a{2 + number % 2}"}
            assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 200
            body = {"model": f"n{number}", "prompt": PROMPT, **GREEDY}
            answer = (await client.post("/v1/completions", json=body)).json()
            assert answer["choices"][0]["text"] == texts[f"a{2 + number % 2}"]
            body = {"lora_name": f"n{number}"}
            assert (await client.post("/v1/unload_lora_adapter", json=body)).status_code == 200
        done.set()
        assert all(await asyncio.gather(*jobs))
        models = (await client.get("/v1/models")).json()["data"]
        assert {card["id"] for card in models} == {"tiny", "sql", "chat"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_name": "x", "lora_path": "../base"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "/etc"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "."}, "lora_path"),
        ({"lora_name": "x", "lora_path": "a\0"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "missing"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "pickled"}, "lora_path"),
        ({"lora_name": "tiny", "lora_path": "a2"}, "lora_name"),
        ({"lora_name": "default", "lora_path": "a2"}, "lora_name"),
        ({"lora_name": "a:b", "lora_path": "a2"}, "lora_name"),
        ({"lora_name": "../x", "lora_path": "a2"}, "lora_name"),
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "a2", "pinned": True}, "pinned"),
    ],
)
def test_an_adapter_that_cannot_be_loaded_names_its_parameter(
    server: ServerProcess, folder: Path, body: dict[str, Any], param: str
) -> None:
    pickled = folder / "pickled"
    pickled.mkdir(exist_ok=True)
    (pickled / "adapter_config.json").write_bytes((folder / "a2/adapter_config.json").read_bytes())
    (pickled / "adapter_model.bin").write_bytes(b"\x80\x04.")
    error_of(server.client.post("/v1/load_lora_adapter", json=body), 400, param)
    unknown = server.client.post("/v1/unload_lora_adapter", json={"lora_name": "x"})
    error_of(unknown, 404, "lora_name")


async def test_the_number_of_adapters_is_bounded(
    scripted: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "_MOST_ADAPTERS", 0)
    (tmp_path / "y").mkdir()
    async with client_of(make_app(scripted, lora_root=str(tmp_path))) as client:
        body = {"lora_name": "x", "lora_path": "y"}
        answer = await client.post("/v1/load_lora_adapter", json=body)
        assert "unload one" in error_of(answer, 400, "lora_name")["message"]


async def test_only_administrators_change_adapters_and_only_below_a_folder(
    scripted: ScriptedEngine, tmp_path: Path
) -> None:
    path = keys_file(tmp_path, entry(), entry(OTHER, "admins", admin=True))
    asking = Asking(scripted, path)
    body = {"lora_name": "x", "lora_path": "y"}
    for url in ("/v1/load_lora_adapter", "/load_lora_adapter", "/v1/unload_lora_adapter"):
        async with asking.client(SECRET) as client:
            assert (await client.post(url, json=body)).status_code == 403
        async with asking.client(OTHER) as client:
            answer = await client.post(url, json=body)
            assert "--lora-root" in error_of(answer, 400)["message"]
    async with client_of(make_app(scripted)) as client:
        answer = await client.post("/unload_lora_adapter", json={"lora_name": "x"})
        assert "--lora-root" in error_of(answer, 400)["message"]
