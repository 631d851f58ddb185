"""`piecework chat`, in a pipe and on a terminal, with a server that says what the test scripts."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import pty
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvicorn
from http_fixtures import make_app, serve, wait_for
from scripted_engine import REPLY, ScriptedEngine
from tiny_models import make_tiny_model
from toy_tokenizer import toy_tokenizer

from piecework.cli.chat.client import ChatClient, ChatError, Part
from piecework.cli.chat.conversation import Conversation
from piecework.cli.chat.session import Session
from piecework.cli.core.flags import report
from piecework.cli.core.printable import printable
from piecework.cli.main import main

KEY = "sesame"
COMMAND = [sys.executable, "-m", "piecework", "chat", "--base-url"]


@pytest.fixture(scope="module")
def scripted() -> ScriptedEngine:
    return ScriptedEngine(toy_tokenizer())


@pytest.fixture(scope="module")
def url(scripted: ScriptedEngine) -> Iterator[str]:
    with serve(make_app(scripted, api_key=KEY)) as url:
        yield url


class Shown:
    """A screen that reads what a test lists, and keeps what is shown."""

    def __init__(self, *inputs: str) -> None:
        self._inputs = iter(inputs)
        self.answers: list[str] = []
        self.notes: list[str] = []
        self.on_content: Any = lambda text: None
        self._text = ""

    def read(self) -> str:
        text = next(self._inputs, None)
        if text is None:
            raise EOFError
        return text

    def reasoning(self, text: str) -> None:
        self.notes.append(f"thinks {text}")

    def content(self, text: str) -> None:
        self._text += text
        self.on_content(text)

    def end(self) -> None:
        self.answers.append(self._text)
        self._text = ""

    def note(self, text: str) -> None:
        self.notes.append(text)

    def status(self, text: str) -> None:
        pass


class Recording(ChatClient):
    """Answers `answer N`, and keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1", None)
        self.asked: list[tuple[str, list[dict[str, str]], dict[str, Any]]] = []
        self.error: ChatError | None = None

    def models(self) -> list[str]:
        return ["m", "n"]

    def answer(self, model: str, messages: Any, settings: Any) -> Iterator[Part]:
        self.asked.append((model, messages, dict(settings)))
        if self.error is not None:
            raise self.error
        yield Part("reasoning", "hm")
        yield Part("content", f"answer {len(self.asked)}")
        yield Part("usage", "", 3)


def chat(*inputs: str, client: Recording | None = None) -> tuple[Recording, Shown]:
    client, screen = client or Recording(), Shown(*inputs)
    Session(client, "m", Conversation(), screen).run()
    return client, screen


def asked(client: Recording) -> list[str]:
    return [" ".join(message["content"] for message in said) for _, said, _ in client.asked]


def test_a_question_brings_what_was_said_before_but_no_thoughts() -> None:
    client, screen = chat("a", "b")
    assert asked(client) == ["a", "a answer 1 b"]
    assert screen.answers == ["answer 1", "answer 2"] and "thinks hm" in screen.notes
    assert any(note.startswith("3 tokens, ") for note in screen.notes)


@pytest.mark.parametrize(
    ("inputs", "last"),
    [
        (["a", "b", "/retry"], "a answer 1 b"),
        (["a", "b", "/undo", "c"], "a answer 1 c"),
        (["a", "/clear", "b"], "b"),
        (["/system be brief", "a"], "be brief a"),
        (["/system be brief", "/system", "a"], "a"),
        (["/home/x is a path"], "/home/x is a path"),
    ],
)
def test_a_command_changes_what_is_said(inputs: list[str], last: str) -> None:
    assert asked(chat(*inputs)[0])[-1] == last


def test_settings_and_models_go_with_the_next_question() -> None:
    client, _ = chat("/set temperature 0.3", "/set seed 7", "/set seed", "/model n", "a")
    assert client.asked[-1][0] == "n" and client.asked[-1][2] == {"temperature": 0.3}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/sve x", "/sve is not a command; /help lists commands"),
        ("/set temprature 1", "did you mean temperature?"),
        ("/model o", "o is not served; choose one of m, n"),
        ("/undo", "there is no question yet"),
        ("/retry", "there is no question yet"),
        ("/save", "give a file name"),
        ("/load /nowhere", "/nowhere cannot be read: No such file or directory"),
        ("/load ~no.such.user/x", "~no.such.user/x begins with an unknown user"),
        ("/save ~no.such.user/x", "~no.such.user/x begins with an unknown user"),
    ],
)
def test_a_mistake_is_one_line_and_the_chat_goes_on(line: str, told: str) -> None:
    client, screen = chat(line, "a")
    assert told in screen.notes[0] and asked(client) == ["a"]


def test_a_chat_is_kept_and_read_in(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    chat("/system s", "/set top_p 0.5", "a", f"/save {path}")
    assert path.stat().st_mode & 0o777 == 0o600
    client, screen = chat(f"/load {path}", "b", f"/save {path}")
    assert asked(client) == ["s a answer 1 b"] and client.asked[0][2] == {"top_p": 0.5}
    assert len(json.loads(path.read_text())["turns"]) == 2
    _, screen = chat(f"/save {path}")
    assert "exists; choose" in screen.notes[0]
    for content in ('{"system": 1}', '{"system": "", "turns": [], "settings": ["seed"]}'):
        path.write_text(content)
        assert "was not written by /save" in chat(f"/load {path}")[1].notes[0]


def test_a_full_disk_leaves_what_was_saved_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "chat.json", tmp_path / "other.json"
    conversation = Conversation("s")
    conversation.save(str(path))
    before = path.read_text()

    def fill(content: Any, file: Any, **_: Any) -> None:
        file.write("{")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(json, "dump", fill)
    for name in (path, other):
        with pytest.raises(ValueError, match=r"cannot be written: No space left on device"):
            conversation.save(str(name))
    assert path.read_text() == before and [*tmp_path.iterdir()] == [path]


def test_a_question_without_an_answer_can_be_asked_again() -> None:
    client = Recording()
    client.error = ChatError("500: it broke")
    _, screen = chat("a", "b", client=client)
    assert screen.notes == ["error: 500: it broke; /retry asks again"] * 2
    assert asked(client) == ["a", "b"]


def test_a_server_s_text_cannot_steer_the_terminal() -> None:
    assert printable("\x1b[2Ja\rb\x07\x9b1m\u202ec\n\t漢\u3000字") == "[2Jab1mc\n\t漢\u3000字"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<http://x/%1b]52;c;aGVsbG8=%1b\\>", "http://x/]52;c;aGVsbG8=\\"),
        ("a &#x202e;b &#27;c &#x9b;d", "a b \ufffdc \ufffdd"),
        ("<div>\n<b>bold</b>\n</div>", "<div> <b>bold</b> </div>"),
    ],
)
def test_what_markdown_writes_in_other_signs_cannot_either(text: str, shown: str) -> None:
    pytest.importorskip("prompt_toolkit")
    from rich.console import Console

    from piecework.cli.chat.rich_screen import Answer

    told = io.StringIO()
    Console(file=told, width=60).print(Answer(text))
    assert told.getvalue().strip() == shown


def test_an_error_that_ends_a_command_cannot_either(capsys: pytest.CaptureFixture[str]) -> None:
    assert report("piecework", "it has \x1b]52;c;aGVsbG8=\x07 and\nmore") == 2
    assert capsys.readouterr().err == "piecework: error: it has ]52;c;aGVsbG8= and more\n"


def test_a_key_may_be_any_text(scripted: ScriptedEngine) -> None:
    key = "sésame 漢"
    with serve(make_app(scripted, api_key=key)) as url:
        assert ChatClient(url, key).models() == ["toy"]


def test_an_error_of_the_server_is_told_in_its_words(url: str) -> None:
    with pytest.raises(ChatError, match=r"401: The API key is missing or wrong"):
        ChatClient(url, "wrong").models()
    question = [{"role": "user", "content": "a"}]
    with pytest.raises(ChatError, match=r"400: .*top_p"):
        list(ChatClient(url, KEY).answer("toy", question, {"top_p": 9}))


def test_a_server_that_starts_again_is_waited_for(scripted: ScriptedEngine) -> None:
    """Nobody listens when the question is asked."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    server = uvicorn.Server(
        uvicorn.Config(
            make_app(scripted), port=port, log_level="error", timeout_graceful_shutdown=1
        )
    )
    thread = threading.Timer(0.3, server.run)
    thread.daemon = True
    thread.start()
    screen = Shown("a")
    Session(ChatClient(f"http://127.0.0.1:{port}", None), "toy", Conversation(), screen).run()
    server.should_exit = True
    thread.join(10)
    assert screen.answers[0].startswith(REPLY[:5])


def test_ctrl_c_stops_the_answer_and_keeps_what_there_is(
    url: str, scripted: ScriptedEngine
) -> None:
    screen = Shown("a")

    def stop(text: str) -> None:
        raise KeyboardInterrupt

    screen.on_content = stop
    scripted.script.delay = 0.01
    session = Session(ChatClient(url, KEY), "toy", Conversation(), screen)
    dropped = len(scripted.dropped)
    session.run()
    scripted.script.delay = 0
    assert screen.notes == ["stopped"] and len(session.conversation.turns) == 1
    wait_for(lambda: len(scripted.dropped) == dropped + 1)


def test_a_pipe_gets_answers_alone(url: str) -> None:
    done = subprocess.run(
        [*COMMAND, url],
        input='/set max_tokens 4\nhello\n"""\ntwo\nlines\n"""\n/set top_p 9\nagain\n',
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PIECEWORK_API_KEY": KEY},
    )
    first, second = done.stdout.splitlines()
    assert first and first == second
    assert done.returncode == 1 and "top_p" in done.stderr and KEY not in done.stderr


@pytest.mark.parametrize(("stream", "code"), [("| true", 1), ("<&-", 2), (">&-", 2)])
def test_a_closed_stream_is_no_traceback(url: str, stream: str, code: int) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{shlex.join([*COMMAND, url])} {stream}; exit ${{PIPESTATUS[0]}}"],
        input="hello\nagain\n",
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PIECEWORK_API_KEY": KEY},
    )
    assert done.returncode == code and "Traceback" not in done.stderr


def test_a_server_that_does_not_answer_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--base-url", "http://127.0.0.1:1"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "http://127.0.0.1:1 does not answer: Connection refused" in error


def test_a_model_that_cannot_be_served_is_told_in_the_server_s_words() -> None:
    done = subprocess.run(
        [*COMMAND[:-1], "--plain", "/nowhere"], input="", capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "the server of /nowhere ended: " in done.stderr and "does not exist" in done.stderr


@pytest.mark.slow
def test_a_server_of_its_own_ends_with_the_chat(tmp_path: Path) -> None:
    model = str(make_tiny_model(tmp_path / "model"))
    done = subprocess.run(
        [*COMMAND[:-1], model],
        input="/set max_tokens 2\nhello\n",
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PIECEWORK_DTYPE": "float32"},
    )
    assert done.returncode == 0 and "tokens, " in done.stderr
    assert not any(model in " ".join(each.info["cmdline"] or ()) for each in
                   psutil.process_iter(["cmdline"]))  # fmt: skip


class Terminal:
    """A program on a terminal of its own; `expect` waits for what it shows."""

    def __init__(self, command: list[str], **environment: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24", **environment},
            start_new_session=True,
            # A shell's jobs in the background ignore it, and so would what they start.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.close(slave)
        self.shown = ""

    def expect(self, text: str, seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < end, f"{text!r} is not in {self.shown[-2000:]!r}"
            if select.select([self._master], [], [], 0.1)[0]:
                read = os.read(self._master, 65_536).decode(errors="replace")
                self.shown += read
                if "\x1b[6n" in read:  # asks where the cursor is
                    self.type("\x1b[1;1R")
        self.shown = self.shown.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.mark.parametrize("plain", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_terminal_shows_answers_stops_them_and_ends(
    url: str, scripted: ScriptedEngine, tmp_path: Path, plain: bool
) -> None:
    command = [*COMMAND, url, *["--plain"] * plain]
    terminal = Terminal(command, PIECEWORK_API_KEY=KEY, PIECEWORK_CACHE_DIR=str(tmp_path))
    with contextlib.closing(terminal):
        terminal.expect(">>>")
        terminal.type("/set max_tokens 3\r")
        terminal.expect(">>>")
        terminal.type("hello\r")
        terminal.expect("tokens, ")
        terminal.expect(">>>")
        scripted.script.held = True
        terminal.type("wait\r")
        wait_for(lambda: bool(scripted.running))
        os.kill(terminal.process.pid, signal.SIGINT)
        terminal.expect("stopped")
        scripted.script.held = False
        terminal.expect(">>>")
        terminal.type("/exit\r")
        assert terminal.process.wait(20) == 0
    if not plain:
        history = tmp_path / "chat_history"
        assert history.stat().st_mode & 0o777 == 0o600 and "+hello" in history.read_text()


def test_an_image_goes_with_the_next_question_and_is_kept(tmp_path: Path) -> None:
    picture, kept = tmp_path / "a cat.png", tmp_path / "chat.json"
    picture.write_bytes(b"\x89PNG\r\n\x1a\nrest")
    client, screen = chat(f"/image {picture}", "What?", "And?", f"/save {kept}")
    assert screen.notes[0] == "image/png attached"
    url = "data:image/png;base64,iVBORw0KGgpyZXN0"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    assert client.asked[0][1] == [{"role": "user", "content": content}]
    assert [message["content"] for message in client.asked[1][1]] == [content, "answer 1", "And?"]
    again, _ = chat(f"/load {kept}", "/undo", "/retry", "More?")
    assert again.asked[0][1] == [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("name", "told"),
    [("", "give a file name"), ("/nowhere", "cannot be read"), (__file__, "is no PNG")],
)
def test_a_file_that_is_no_image_is_told(name: str, told: str) -> None:
    client, screen = chat(f"/image {name}", "a")
    assert told in screen.notes[0] and asked(client) == ["a"]
