"""Files: within their bounds, under names that nobody guesses, from nobody's web page."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from batch_fixtures import COMPLETIONS, create, line, served, upload
from http_fixtures import client_of, error_of, make_app
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine
from toy_tokenizer import toy_tokenizer

from piecework.server.config.http_limits import HttpLimits
from piecework.server.launch import http_server
from piecework.server.openai.batches import files as files_module
from piecework.server.openai.batches import storage as storage_module

FORM: dict[str, Any] = {"files": {"file": ("../../in.jsonl", b"{}")}, "data": {"purpose": "batch"}}


async def test_a_file_from_its_upload_to_its_end(scripted: ScriptedEngine, tmp_path: Path) -> None:
    content = bytes(range(256)) * 9000  # more than is kept in memory
    async with served(scripted, tmp_path) as (app, client):
        file_id = await upload(client, content)
        about = (await client.get(f"/v1/files/{file_id}")).json()
        assert about["bytes"] == len(content) and about["filename"] == "in.jsonl"
        answer = await client.get(f"/v1/files/{file_id}/content")
        assert answer.content == content and answer.headers["x-content-type-options"] == "nosniff"
        assert (await app.state.batches.storage()).bytes == len(content)
    async with served(scripted, tmp_path) as (app, client):
        storage = await app.state.batches.storage()
        assert list(storage.files) == [file_id] and storage.bytes == len(content)
        gone = (await client.delete(f"/v1/files/{file_id}")).json()
        assert gone == {"id": file_id, "object": "file", "deleted": True}
        for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content"):
            error_of(await client.get(path), 404, "file_id")
        assert storage.bytes == 0 and not list((tmp_path / "files").iterdir())


async def test_a_file_lies_where_the_server_says(scripted: ScriptedEngine, tmp_path: Path) -> None:
    async with served(scripted, tmp_path / "batches") as (_, client):
        assert (await client.post("/v1/files", **FORM)).status_code == 200
    assert {path.name for path in tmp_path.iterdir()} == {"batches"}
    assert (tmp_path / "batches" / "files").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("form", "status", "param"),
    [
        ({"files": FORM["files"]}, 400, "purpose"),
        ({**FORM, "data": {"purpose": "fine-tune"}}, 400, "purpose"),
        ({"files": {"other": b"x"}, "data": {"purpose": "batch"}}, 400, "file"),
        ({"json": {"purpose": "batch"}}, 415, "Content-Type"),
        ({**FORM, "headers": {"Origin": "https://evil.example"}}, 403, "Origin"),
    ],
)
async def test_an_upload_that_cannot_be(
    scripted: ScriptedEngine, tmp_path: Path, form: dict[str, Any], status: int, param: str
) -> None:
    async with served(scripted, tmp_path) as (app, client):
        error_of(await client.post("/v1/files", **form), status, param)
        assert not (await app.state.batches.storage()).files
        assert app.state.batches.uploads.number == 0


async def test_a_page_that_may_call_the_server_may_upload(
    scripted: ScriptedEngine, tmp_path: Path
) -> None:
    async with served(scripted, tmp_path, cors_origins="https://good.example") as (_, client):
        answer = await client.post("/v1/files", **FORM, headers={"Origin": "https://good.example"})
        assert answer.status_code == 200


async def test_bounds_of_files(
    scripted: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "MAX_FILE_BYTES", 3 * 2**19)
    monkeypatch.setattr(storage_module, "MAX_FILES", 3)
    async with served(scripted, tmp_path, batch_storage=1) as (_, client):
        for size, code in ((2**21, "body_too_large"), (2**20 + 1, "storage_full")):
            form = {**FORM, "files": {"file": b"x" * size}}
            answer = await client.post("/v1/files", **form)
            assert answer.json()["error"]["code"] == code
        for _ in range(3):
            assert (await client.post("/v1/files", **FORM)).status_code == 200
        assert "delete" in error_of(await client.post("/v1/files", **FORM), 400)["message"]


async def test_a_full_disk_is_an_error_of_one_upload(
    scripted: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with served(scripted, tmp_path) as (app, client):
        monkeypatch.setattr(shutil, "copyfileobj", full)
        error = error_of(await client.post("/v1/files", **FORM), 503)
        assert error["code"] == "disk_full" and "No space" in error["message"]
        monkeypatch.undo()
        assert (await app.state.batches.storage()).bytes == 0
        assert (await client.post("/v1/files", **FORM)).status_code == 200


async def test_what_a_batch_reads_stays(scripted: ScriptedEngine, tmp_path: Path) -> None:
    async with served(scripted, tmp_path) as (_, client):
        scripted.script.held = True
        file_id = await upload(client, [line("a")])
        await create(client, file_id)
        error = error_of(await client.delete(f"/v1/files/{file_id}"), 400, "file_id")
        assert error["code"] == "file_in_use"


async def test_who_comes_while_a_file_goes_is_told_so(
    scripted: ScriptedEngine, tmp_path: Path
) -> None:
    async with served(scripted, tmp_path) as (_, client):
        file_id = await upload(client, [line("a")])
        path = f"/v1/files/{file_id}"
        body = {"input_file_id": file_id, "endpoint": COMPLETIONS, "completion_window": "24h"}
        read, gone, again, late, batch = await asyncio.gather(
            client.get(f"{path}/content"),
            client.delete(path),
            client.delete(path),
            client.get(f"{path}/content"),
            client.post("/v1/batches", json=body),
        )
        assert json.loads(read.content) == line("a") and gone.status_code == 200
        for answer in (again, late):
            error_of(answer, 404, "file_id")
        error_of(batch, 400, "input_file_id")


@pytest.mark.parametrize("asked", ["bytes=0-1", "bytes=9-", "lines=1-2", "bytes="])
async def test_a_file_comes_whole(scripted: ScriptedEngine, tmp_path: Path, asked: str) -> None:
    async with served(scripted, tmp_path) as (_, client):
        file_id = await upload(client, b"{}")
        answer = await client.get(f"/v1/files/{file_id}/content", headers={"Range": asked})
        assert answer.status_code == 200 and answer.content == b"{}"


@pytest.mark.parametrize(
    "charset", ["undefined", "punycode", "unicode-escape", "utf-7", "utf-16-le", "idna", "hex"]
)
async def test_a_charset_whose_decoder_is_slow_or_gives_no_text(
    scripted: ScriptedEngine, tmp_path: Path, charset: str
) -> None:
    async with served(scripted, tmp_path) as (_, client):
        kind = f"multipart/form-data; boundary=x; charset={charset}"
        body = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nb\r\n--x--\r\n'
        answer = await client.post("/v1/files", content=body, headers={"Content-Type": kind})
        assert error_of(answer, 400, "Content-Type")["code"] == "invalid_form"


@pytest.mark.parametrize("charset", ["UTF-8", "latin-1", "iso-8859-1"])
async def test_charsets_of_browsers(scripted: ScriptedEngine, tmp_path: Path, charset: str) -> None:
    async with served(scripted, tmp_path) as (_, client):
        kind = f"multipart/form-data; boundary=x; charset={charset}"
        body = '--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\n'
        body += 'Content-Disposition: form-data; name="file"; filename="é"\r\n\r\n{}\r\n--x--\r\n'
        headers = {"Content-Type": kind}
        answer = await client.post("/v1/files", content=body.encode(charset), headers=headers)
        assert answer.json()["filename"] == "é"


async def test_files_expire(scripted: ScriptedEngine, tmp_path: Path) -> None:
    async with served(scripted, tmp_path) as (app, client):
        file_id = await upload(client, b"x")
        storage = await app.state.batches.storage()
        storage.clock = lambda: storage.files[file_id].expires_at + 1
        error_of(await client.get(f"/v1/files/{file_id}"), 404, "file_id")


async def test_a_folder_has_one_server(scripted: ScriptedEngine, tmp_path: Path) -> None:
    async with served(scripted, tmp_path) as (_, client):
        await upload(client, b"x")
        async with served(ScriptedEngine(toy_tokenizer()), tmp_path) as (_, other):
            error = error_of(await other.post("/v1/files", **FORM), 503)
    assert "--batch-dir" in error["message"]


def test_a_file_is_no_folder(scripted: ScriptedEngine, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").touch()
    with pytest.raises(ValueError, match="is a file; name a folder"):
        make_app(scripted, batch_dir=str(tmp_path / "in.jsonl"))


async def test_a_folder_that_may_not_be_read_ends_no_server(
    scripted: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(self: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", denied)
    async with served(scripted, tmp_path / "batches") as (_, client):
        assert (await client.get("/health")).status_code == 200


async def test_files_and_batches_can_be_off(scripted: ScriptedEngine) -> None:
    async with client_of(make_app(scripted, batch_dir="none")) as client:
        for answer in (
            await client.post("/v1/files", **FORM),
            await client.get("/v1/files"),
            await client.get("/v1/batches"),
        ):
            assert "--batch-dir" in error_of(answer, 404)["message"]


def test_a_file_may_be_larger_than_all_bodies_that_are_held(
    scripted: ScriptedEngine, tmp_path: Path
) -> None:
    server = http_server(
        make_app(scripted, batch_dir=str(tmp_path)), HttpLimits(max_unfinished_bodies=1)
    )
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        form = {**FORM, "files": {"file": b"x" * 2**22}}
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/files"
        assert httpx.post(url, **form, timeout=30).json()["bytes"] == 2**22
    finally:
        server.should_exit = True
        thread.join(10)


PARTS = st.binary(max_size=60) | st.sampled_from(
    [
        b"--b\r\n",
        b"--b--\r\n",
        b'Content-Disposition: form-data; name="file"; filename="x"\r\n\r\n',
        b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
        b"Content-Disposition: form-data\r\n\r\n",
        b"\r\n",
    ]
)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    parts=st.lists(PARTS, max_size=8),
    boundary=st.sampled_from(["b", "", "é", '"', "b; charset=hex"]),
)
async def test_whatever_is_uploaded_is_answered(
    scripted: ScriptedEngine, tmp_path: Path, parts: list[bytes], boundary: str
) -> None:
    async with served(scripted, tmp_path) as (app, client):
        answer = await client.post(
            "/v1/files",
            content=b"".join(parts),
            headers=[(b"Content-Type", f"multipart/form-data; boundary={boundary}".encode())],
        )
        assert answer.status_code in (200, 400), answer.text
        assert app.state.batches.uploads.number == 0
