"""Where the API key comes from: a flag, a file or the environment, and who else gets to see it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest
from server_process import ready
from tiny_models import make_tiny_model

from piecework.cli import main as cli
from piecework.cli import serve as serve_command
from piecework.cli.flags import ServerConfig
from piecework.runtime.config import EngineConfig
from piecework.server.api_key import take_api_key

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
    with pytest.raises(ValueError, match="leave one of them out"):
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


def test_no_process_shows_the_key_of_a_file_or_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a command line, in the engine's environment, in what the server tells of itself or in what
    it prints.
    """
    model = str(make_tiny_model(tmp_path / "model"))
    monkeypatch.setenv("PIECEWORK_API_KEY", KEY)
    with ready(model) as server:
        assert server.client.get("/v1/models").status_code == 401
        allowed = server.client.get(
            "/server_info", headers={"Authorization": f"Bearer {KEY}".encode()}
        )
        assert (
            allowed.status_code == 200
            and KEY not in allowed.text
            and "api_key" not in allowed.json()
        )
        engine = psutil.Process(server.engine().pid)
        assert "PIECEWORK_API_KEY" not in engine.environ()
        for process in (engine, psutil.Process(server.process.pid)):
            assert KEY not in " ".join(process.cmdline())
        server.process.terminate()
        _, out, err = server.finish()
    assert KEY not in out + err


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
