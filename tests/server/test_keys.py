"""`--api-keys`: who may ask, for what, and how much."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_fixtures import MODEL, client_of, error_of, make_app
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine

from piecework.cli.main import main
from piecework.server.auth.accounts import Accounts, Bucket
from piecework.server.config.keys import Key, hash_of, read_keys

SECRET = "sk-very-secret"
OTHER = "sk-another"
ASKED = {"model": MODEL, "prompt": "hello", "max_tokens": 4}


def entry(secret: str = SECRET, name: str = "team", **limits: Any) -> dict[str, Any]:
    return {"name": name, "sha256": hash_of(secret.encode()), **limits}


def keys_file(folder: Path, *entries: dict[str, Any]) -> Path:
    path = folder / "keys.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in entries))
    return path


class Asking:
    """An application over a scripted engine, asked with a key."""

    def __init__(self, engine: ScriptedEngine, path: Path, **settings: Any) -> None:
        self.app = make_app(engine, api_keys=str(path), **settings)
        self.accounts: Accounts = self.app.state.accounts
        self.now = self.accounts.now()
        self.accounts.now = lambda: self.now

    def client(self, secret: str = SECRET) -> httpx.AsyncClient:
        return client_of(self.app, headers={"Authorization": f"Bearer {secret}"})

    async def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        async with self.client() as client:
            return await client.post(path, json={**ASKED, **body})


@pytest.mark.parametrize(
    "text",
    [
        "- name: a\n  sha256: {hash}\n  models: [m]\n  concurrency: 2\n",
        "keys:\n- {{name: a, sha256: {hash}, models: [m], concurrency: 2}}\n",
        '\n{{"name": "a", "sha256": "{hash}", "models": ["m"], "concurrency": 2}}\n\n',
    ],
)
def test_a_file_is_yaml_or_lines_of_json(tmp_path: Path, text: str) -> None:
    path, digest = tmp_path / "keys", hash_of(b"k")
    path.write_text(text.format(hash=digest))
    assert read_keys(str(path)) == {
        digest: Key(name="a", sha256=digest, models=("m",), concurrency=2)
    }


HASH = "0" * 64


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds no list of keys"),
        ("[]", "has no keys"),
        ("keys: 1", "holds no list of keys"),
        ("- name: [", ":1: "),
        ("- a", "key 1: a key is a mapping"),
        (f"- {{name: a, sha256: '{HASH}'}}\n- {{name: b}}", "key 2: sha256 is missing"),
        (f"- {{name: a, sha256: '{HASH}', concurency: 1}}", "did you mean concurrency?"),
        (f"- {{name: a, sha256: '{HASH}', concurrency: 0}}", "concurrency must be a whole number"),
        (f"- {{name: a, sha256: '{HASH}', concurrency: true}}", "concurrency must be a whole num"),
        (f"- {{name: a, sha256: '{HASH}', models: m}}", "models must be a list of names"),
        (f"- {{name: a, sha256: '{HASH}', priority: 1.5}}", "priority must be a whole number"),
        (f"- {{name: a, sha256: '{HASH}', admin: 1}}", "admin must be true or false"),
        (f"- {{name: 'a b', sha256: '{HASH}'}}", "name must be 1 to 64 letters"),
        (f"- {{name: a, sha256: {hash_of(b'')}}}", "sha256 is that of an empty key"),
        ("- {name: a, sha256: secret}", "sha256 must be the 64 small hexadecimal digits"),
        (f"- {{name: a, sha256: '{HASH}'}}\n- {{name: b, sha256: '{HASH}'}}", "key 2: b has the"),
        (f'{{"name": "a", "sha256": "{HASH}"}}\nx', ":2: this line is no JSON object"),
        ('{"a": ' * 100_000, ":1: this line is no JSON object"),
        ("[" * 2000, "is no YAML"),
        ("- !!bool maybe", "is no YAML"),
        ("- !!timestamp soon", "is no YAML"),
        ("#" * (2**20 + 1), "is too large"),
    ],
    ids=lambda text: text[:24],
)
def test_a_wrong_file_is_refused_with_its_place(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ValueError) as raised:
        read_keys(str(path))
    assert told in str(raised.value) and "\n" not in str(raised.value)


def test_the_command_makes_a_key_that_its_line_knows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["key", "team", "--models", "a,b", "--concurrency", "2"]) == 0
    line, secret = capsys.readouterr()
    path = tmp_path / "keys.jsonl"
    path.write_text(line)
    (key,) = read_keys(str(path)).values()
    assert key == Key(
        name="team", sha256=hash_of(secret.strip().encode()), models=("a", "b"), concurrency=2
    )
    assert len(secret) > 40 and secret.strip() not in line
    assert main(["key", "a b"]) == 2 and main(["key", "a", "--concurrency", "0"]) == 2


@given(
    st.integers(1, 600),
    st.lists(st.tuples(st.floats(-100, 100), st.integers(1, 5)), max_size=30),
)
def test_an_allowance_is_never_exceeded_whatever_the_clock_does(
    per_minute: int, steps: list[tuple[float, int]]
) -> None:
    """At most the allowance, and what the minutes earned that passed."""
    now = highest = taken = 0.0
    bucket = Bucket(per_minute, now)
    for seconds, count in steps:
        now += seconds
        highest = max(highest, now)
        if bucket.seconds_until(count, now) == 0:
            bucket.take(count, now)
            taken += count
    assert taken <= per_minute + highest * per_minute / 60 + 1e-6


async def test_keys_of_the_file_and_the_one_key_are_taken_and_no_others(
    scripted: ScriptedEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asking = Asking(scripted, keys_file(tmp_path, entry()), api_key="master")
    caplog.set_level(logging.DEBUG)
    for secret, status in ((SECRET, 200), ("master", 200), (OTHER, 401), ("", 401)):
        async with asking.client(secret) as client:
            assert (await client.post("/v1/completions", json=ASKED)).status_code == status
    async with client_of(asking.app, headers={"x-api-key": SECRET}) as client:
        assert (await client.get("/v1/models")).status_code == 200
    assert SECRET not in caplog.text


async def test_requests_beyond_a_minute_s_are_refused_until_they_are_earned(
    scripted: ScriptedEngine, tmp_path: Path
) -> None:
    asking = Asking(scripted, keys_file(tmp_path, entry(requests_per_minute=2)))
    first, second, third = [await asking.post() for _ in range(3)]
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-reset-requests"] == "30.000s"
    assert "x-ratelimit-limit-tokens" not in first.headers
    assert second.status_code == 200
    assert error_of(third, 429)["code"] == "rate_limit_exceeded"
    assert third.headers["retry-after"] == "30"
    assert third.headers["x-ratelimit-remaining-requests"] == "0"
    asking.now += 30
    assert (await asking.post()).status_code == 200
    asking.now -= 10_000
    assert (await asking.post()).status_code == 429


async def test_a_refusal_is_in_the_shape_of_its_family(
    scripted: ScriptedEngine, tmp_path: Path
) -> None:
    asking = Asking(scripted, keys_file(tmp_path, entry(requests_per_minute=1)))
    body = {"messages": [{"role": "user", "content": "a"}]}
    assert (await asking.post("/v1/messages", **body)).status_code == 200
    refused = await asking.post("/v1/messages", **body)
    assert refused.status_code == 429 and refused.json()["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_counted_as_usage_has_them(
    scripted: ScriptedEngine, tmp_path: Path, stream: bool
) -> None:
    asking = Asking(scripted, keys_file(tmp_path, entry(tokens_per_minute=1000)))
    usage = (await asking.post(n=3)).json()["usage"]
    await asking.post(n=3, stream=stream)
    left = (await asking.post("/tokenize")).headers["x-ratelimit-remaining-tokens"]
    assert int(left) == 1000 - 2 * usage["total_tokens"]


async def test_an_overdrawn_allowance_is_waited_for(
    scripted: ScriptedEngine, tmp_path: Path
) -> None:
    asking = Asking(scripted, keys_file(tmp_path, entry(tokens_per_minute=60)))
    used = (await asking.post(max_tokens=100, ignore_eos=True)).json()["usage"]["total_tokens"]
    refused = await asking.post()
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) == used - 60 + 1
    asking.now += used - 60 + 1
    assert (await asking.post()).status_code == 200


async def test_a_cancelled_stream_gives_its_place_and_its_tokens_back(
    scripted: ScriptedEngine, tmp_path: Path
) -> None:
    path = keys_file(tmp_path, entry(concurrency=1, tokens_per_minute=1000))
    asking = Asking(scripted, path)
    scripted.script.held = True
    running = asyncio.create_task(asking.post(stream=True))
    while not scripted.running:
        await asyncio.sleep(0.001)
    refused = await asking.post()
    assert refused.status_code == 429 and "1 requests at once" in refused.text
    running.cancel()
    await asyncio.wait([running])
    scripted.script.held = False
    for _ in range(1000):
        if (await asking.post()).status_code == 200:
            break
        await asyncio.sleep(0.001)
    (account,) = asking.accounts._by_hash.values()
    assert not account.active


async def test_an_error_gives_its_place_back(scripted: ScriptedEngine, tmp_path: Path) -> None:
    asking = Asking(scripted, keys_file(tmp_path, entry(concurrency=1)))
    for body in ({"max_tokens": -1}, {"model": "none"}, {"prompt": 7}, {}):
        status = (await asking.post(**body)).status_code
        assert status == (200 if not body else 404 if "model" in body else 400)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"model": MODEL, "input": "a"}),
        ("/generate", {"text": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/api/chat", {"messages": [{"role": "user", "content": "a"}]}),
        ("/api/generate", {"prompt": "a"}),
        ("/api/show", {}),
        ("/v1/completions", {"prompt": "a", "model": None}),
    ],
)
async def test_a_model_that_is_not_the_key_s_does_not_exist_for_it(
    scripted: ScriptedEngine, tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    asking = Asking(scripted, keys_file(tmp_path, entry(models=["other"])))
    async with asking.client() as client:
        refused = await client.post(path, json={"model": MODEL, **body})
        assert refused.status_code == 404 and not scripted.requests
        assert (await client.get("/v1/models")).json()["data"] == []
        for names in ("tags", "ps"):
            assert (await client.get(f"/api/{names}")).json()["models"] == []
        anthropic = {"anthropic-version": "2023-06-01"}
        assert (await client.get("/v1/models", headers=anthropic)).json()["data"] == []
        assert (await client.get(f"/v1/models/{MODEL}")).status_code == 404


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/flush_cache"),
        ("GET", "/flush_cache"),
        ("POST", "/abort_request"),
        ("GET", "/server_info"),
        ("GET", "/v1/files"),
        ("POST", "/v1/batches"),
        ("POST", "/v1/models/load"),
        ("POST", "/new_control_endpoint"),
    ],
)
async def test_what_is_everybody_s_is_for_admins(
    scripted: ScriptedEngine, tmp_path: Path, method: str, path: str
) -> None:
    path_of_keys = keys_file(tmp_path, entry(), entry(OTHER, "boss", admin=True))
    asking = Asking(scripted, path_of_keys, batch_dir="none")
    async with asking.client() as client:
        assert error_of(await client.request(method, path), 403)["code"] == (
            "insufficient_permissions"
        )
    async with asking.client(OTHER) as client:
        assert (await client.request(method, path)).status_code not in (401, 403)


async def test_a_key_at_its_limits_may_end_what_runs(
    scripted: ScriptedEngine, tmp_path: Path
) -> None:
    path = keys_file(tmp_path, entry(concurrency=1, requests_per_minute=1))
    asking = Asking(scripted, path, responses_store="memory")
    scripted.script.held = True
    body = {"model": MODEL, "input": "Hi", "background": True}
    async with asking.client() as client:
        begun = (await client.post("/v1/responses", json=body)).json()
        assert (await client.post("/v1/responses", json=body)).status_code == 429
        ended = await client.post(f"/v1/responses/{begun['id']}/cancel")
        assert ended.status_code == 200 and ended.json()["status"] == "cancelled"
    assert not scripted.running


@pytest.mark.parametrize(("asked", "runs"), [(0, 5), (100, 5), (-3, 2)])
async def test_a_request_cannot_raise_its_priority(
    scripted: ScriptedEngine, tmp_path: Path, asked: int, runs: int
) -> None:
    asking = Asking(scripted, keys_file(tmp_path, entry(priority=5)))
    await asking.post(priority=asked)
    assert scripted.requests[-1].priority == runs


@pytest.mark.parametrize("shared", [False, True])
async def test_prefixes_are_shared_by_key_and_salt_on_each_api(
    scripted: ScriptedEngine, tmp_path: Path, shared: bool
) -> None:
    path = keys_file(tmp_path, entry(), entry(OTHER, "others"))
    asking = Asking(scripted, path, kv_share="all" if shared else "key")
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    groups = set()
    for secret in (SECRET, OTHER):
        for salt in (None, "one", "two"):
            tenants, clients = set(), set()
            async with asking.client(secret) as client:
                for url, body in (
                    ("/v1/completions", ASKED),
                    ("/generate", {"input_ids": [1, 2]}),
                    ("/v1/chat/completions", chat),
                    ("/v1/messages", chat),
                    ("/v1/responses", {"model": MODEL, "input": "a"}),
                ):
                    salted = {} if salt is None else {"cache_salt": salt}
                    if url == "/generate":
                        salted = {"sampling_params": salted}
                    asked = {**body, **salted}
                    answer = await client.post(url, json=asked)
                    assert answer.status_code == 200, answer.text
                    tenants.add(scripted.requests[-1].tenant)
                    # Kept prefixes are divided among keys in both cases.
                    clients.add(scripted.requests[-1].client)
            assert len(tenants) == 1
            assert clients == {"others" if secret == OTHER else "team"}
            groups |= tenants
    assert len(groups) == (3 if shared else 6)
    async with asking.client() as client:
        for salt in ("", "x" * 257, 7):
            answer = await client.post("/v1/completions", json={**ASKED, "cache_salt": salt})
            assert error_of(answer, 400, "cache_salt")


async def test_a_file_that_is_read_again_changes_limits_and_forgets_no_use(
    scripted: ScriptedEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = keys_file(tmp_path, entry(requests_per_minute=2))
    asking = Asking(scripted, path)
    assert [(await asking.post()).status_code for _ in range(3)] == [200, 200, 429]
    path.write_text("broken")
    await asking.accounts.reload()
    assert "the API keys stay as they were" in caplog.text
    assert (await asking.post()).status_code == 429
    keys_file(tmp_path, entry(requests_per_minute=3))
    await asking.accounts.reload()
    assert [(await asking.post()).status_code for _ in range(2)] == [200, 429]
    keys_file(tmp_path, entry(OTHER))
    await asking.accounts.reload()
    assert (await asking.post()).status_code == 401


async def test_ten_thousand_keys_and_guesses_cost_little(
    scripted: ScriptedEngine, tmp_path: Path
) -> None:
    """Of guesses nothing is kept."""
    entries = [entry(f"key-{number}", f"k{number}") for number in range(10_000)]
    asking = Asking(scripted, keys_file(tmp_path, *entries))
    for number in range(100):
        assert asking.accounts.find(f"guess-{number}".encode()) is None
    assert len(asking.accounts._by_hash) == 10_000
    assert asking.accounts.find(b"key-9999") is not None
