"""Where the API key comes from: a flag, a file or the environment, and who else gets to see it."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import pytest
from http_fixtures import wait_for
from server_process import ready
from tiny_models import make_tiny_model

from piecework.cli import main as cli
from piecework.cli import serve as serve_command
from piecework.cli.core.flags import ServerConfig
from piecework.runtime.config.engine import EngineConfig
from piecework.server.config.api_key import take_api_key
from piecework.server.config.keys import hash_of

KEY = "sésame-1"


def key_of(**settings: str) -> str | None:
    return ServerConfig(engine=EngineConfig(), **settings).api_key  # type: ignore[arg-type]


def write(folder: Path, content: bytes) -> str:
    path = folder / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    return str(path)


@pytest.mark.parametrize("content", [KEY, f"{KEY}\n", f"  {KEY}\r\n\n"])
def test_a_file_holds_the_key_whatever_is_around_it(tmp_path: Path, content: str) -> None:
    assert key_of(api_key_file=write(tmp_path, content.encode())) == KEY


@pytest.mark.parametrize(
    ("content", "reason"), [(b"", "is empty"), (b" \n", "is empty"), (b"a\nb", "more than one "
"line"), (b"a\0b", "control"),
                            (b"\xff", "UTF-8"), (b"k" * 100_000, "bytes")]
)  # fmt: skip
def test_a_file_without_a_usable_key_is_refused(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    with pytest.raises(ValueError, match=f"^--api-key-file .*{reason}"):
        key_of(api_key_file=write(tmp_path, content))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be read: No such file"):
        key_of(api_key_file=str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"cannot be read: Is a directory"):
        key_of(api_key_file=str(tmp_path))


def test_a_file_that_everybody_can_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, b"key")
    key_of(api_key_file=path)
    assert not caplog.records
    Path(path).chmod(0o644)
    key_of(api_key_file=path)
    assert "can be read by every user" in caplog.text


def test_two_keys_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="omit one of them"):
        key_of(api_key="a", api_key_file=write(tmp_path, b"b"))


def test_the_variable_is_taken_away_when_it_is_read() -> None:
    environment = {"PIECEWORK_API_KEY": f" {KEY}\n", "HOME": "/"}
    assert take_api_key(environment) == KEY
    assert environment == {"HOME": "/"}
    assert take_api_key(environment) is None
    with pytest.raises(ValueError, match="PIECEWORK_API_KEY is empty"):
        take_api_key({"PIECEWORK_API_KEY": ""})


@pytest.mark.parametrize("flags", [["--api-key", "flag"], ["--api-key-file", "FILE"], []], ids=str)
def test_a_flag_goes_before_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    seen: list[str | None] = []

    def begin(command: object) -> object:
        raise ValueError("far enough")

    def config(arguments: object) -> ServerConfig:
        made = original(arguments)  # type: ignore[arg-type]
        seen.append(made.api_key)
        return made  # type: ignore[return-value]

    original = serve_command.serving_config
    monkeypatch.setattr(serve_command, "serving_config", config)
    monkeypatch.setattr(serve_command, "spawned", begin)
    monkeypatch.setenv("PIECEWORK_API_KEY", "variable")
    given = [write(tmp_path, b"file\n") if flag == "FILE" else flag for flag in flags]
    assert cli.main(["serve", *given]) == 2
    assert seen == [
        {"--api-key": "flag", "--api-key-file": "file"}.get(flags[0] if flags else "", "variable")
    ]


class Life(NamedTuple):
    """What a server with a key of the environment and a file of keys showed."""

    statuses: dict[str, int]
    told: dict[str, object]
    engine_variables: set[str]
    shown: str


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Life:
    folder = tmp_path_factory.mktemp("keys")
    keys = folder / "keys.jsonl"
    keys.write_text(json.dumps({"name": "a", "sha256": hash_of(b"first")}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIECEWORK_API_KEY", KEY)
        with ready(str(make_tiny_model(folder / "model")), "--api-keys", str(keys)) as server:

            def get(path: str, key: str) -> httpx.Response:
                headers = {"Authorization": f"Bearer {key}".encode()} if key else {}
                return server.client.get(path, headers=headers)

            statuses = {key: get("/v1/models", key).status_code for key in ("", "first", KEY)}
            keys.write_text(json.dumps({"name": "b", "sha256": hash_of(b"sk-second")}))
            server.process.send_signal(signal.SIGHUP)
            wait_for(lambda: get("/v1/models", "sk-second").status_code == 200)
            statuses["first, then"] = get("/v1/models", "first").status_code
            told = get("/server_info", KEY).json()
            engine = psutil.Process(server.engine().pid)
            variables = set(engine.environ())
            lines = [*engine.cmdline(), *psutil.Process(server.process.pid).cmdline()]
            server.process.terminate()
            _, out, err = server.finish()
    return Life(statuses, told, variables, " ".join([*lines, out, err, json.dumps(told)]))


def test_no_process_shows_the_key_of_a_file_or_a_variable(life: Life) -> None:
    """On a command line, in the engine's environment, in what the server tells of itself or in what
    it prints.
    """
    assert "PIECEWORK_API_KEY" not in life.engine_variables
    assert not {"api_key", "api_keys"} & life.told.keys()
    assert KEY not in life.shown and "sk-second" not in life.shown


def test_a_file_of_keys_is_read_again_at_sighup(life: Life) -> None:
    assert life.statuses == {"": 401, "first": 200, KEY: 200, "first, then": 401}


def test_an_empty_variable_does_not_open_the_server(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIECEWORK_API_KEY", "")
    monkeypatch.setattr(
        subprocess, "Popen", lambda *_, **__: pytest.fail("nothing is to be started")
    )
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve"])
    assert ended.value.code == 2
    assert "PIECEWORK_API_KEY is empty" in capfd.readouterr().err
