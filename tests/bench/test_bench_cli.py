"""The command lines of `piecework bench`: flags reach the measurement, help teaches, mistakes are
one line.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from scripted_server import ScriptedServer
from tiny_encoders import make_tiny_encoder

from piecework.cli.bench import add_measurements
from piecework.cli.core.flags import ArgumentParser

COMMANDS = ["gsm8k", "serving"]
PARSE = (
    "import sys\n"
    "from piecework.cli.bench import add_measurements\n"
    "from piecework.cli.core.flags import ArgumentParser\n"
    "parser = ArgumentParser()\n"
    "add_measurements(parser.add_subparsers())\n"
)


def bench(*argv: str) -> int:
    parser = ArgumentParser(prog="piecework bench")
    add_measurements(parser.add_subparsers(required=True))
    arguments = parser.parse_args(argv)
    code: int = arguments.func(arguments)
    return code


def error_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What is printed on stderr, given that it is one line and the exit code 2."""
    try:
        code: object = bench(*argv)
    except SystemExit as ended:
        code = ended.code
    printed = capsys.readouterr()
    assert (code, printed.out, printed.err.count("\n")) == (2, "", 1)
    assert printed.err.startswith(f"piecework bench {argv[0]}: error: ")
    return printed.err


@pytest.fixture
def questions(tmp_path: Path) -> str:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "How many?", "answer": "#### 4"}\n' * 7)
    return str(path)


def test_gsm8k(server: ScriptedServer, questions: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--num-shots",
        "2",
        "--num-questions",
        "5",
        "--max-new-tokens",
        "9",
        "--parallel",
        "3",
        "--data-path",
        questions,
    ]
    assert (
        bench("gsm8k", "--base-url", f"{server.url}/v1", "--api", "chat", "--model", "mine", *flags)
        == 0
    )
    printed = capsys.readouterr()
    assert printed.out.startswith("Accuracy: 1.000\nInvalid: 0.000\nLatency: ")
    assert "\r" not in printed.err
    assert len(server.requests) == 5
    path, body = server.requests[0]
    assert (path, body["model"], body["max_tokens"]) == ("/v1/chat/completions", "mine", 9)
    assert body["messages"][0]["content"].count("Question: How many?\nAnswer:") == 3


def test_gsm8k_compares(
    server: ScriptedServer, questions: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        bench("gsm8k", "--base-url", server.url, "--compare", server.url, "--data-path", questions)
        == 0
    )
    assert (
        "Accuracy difference: +0.0000, standard error 0.0000 (paired, 7 questions"
        in capsys.readouterr().out
    )


def test_serving(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = [
        "--num-prompts",
        "6",
        "--request-rate",
        "200",
        "--max-concurrency",
        "2",
        "--num-warmups",
        "0",
        "--seed",
        "5",
    ]
    prompts = [
        "--dataset",
        "shared-prefix",
        "--prefix-len",
        "4",
        "--random-input-len",
        "6",
        "--random-output-len",
        "3",
        "--vocab-size",
        "90",
    ]
    out = tmp_path / "out.json"
    assert (
        bench(
            "serving",
            "--base-url",
            server.url,
            *load,
            *prompts,
            "--vocab-size",
            "90",
            "--ignore-eos",
            "--no-stream",
            "--json",
            str(out),
        )
        == 0
    )
    told = json.loads(out.read_text())
    assert (
        told["completed"],
        told["prompt_tokens"],
        told["output_tokens"],
        told["request_rate"],
    ) == (6, 60, 18, "200.0")
    bodies = [body for _, body in server.requests]
    assert len({tuple(body["prompt"][:4]) for body in bodies}) == 1
    assert all(
        body["ignore_eos"] and "stream" not in body and max(body["prompt"]) < 90 for body in bodies
    )
    printed = capsys.readouterr()
    assert "TTFT" in printed.out and "\r" not in printed.err


@pytest.mark.parametrize(("api", "kind"), [("completion", list), ("generate", list), ("chat", str)])
def test_random_prompts_are_token_ids_where_the_api_takes_them(
    server: ScriptedServer, api: str, kind: type
) -> None:
    assert (
        bench(
            "serving",
            "--base-url",
            server.url,
            "--api",
            api,
            "--num-prompts",
            "1",
            "--random-input-len",
            "5",
        )
        == 0
    )
    body = server.requests[0][1]
    assert isinstance(
        body["messages"][0]["content"]
        if api == "chat"
        else body.get("prompt") or body["input_ids"],
        kind,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_the_key_goes_with_every_request(
    server: ScriptedServer, questions: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.key, server.reply = "secret", lambda prompt: "A B C"
    flags = {
        "gsm8k": ["--data-path", questions],
        "serving": ["--num-prompts", "3"],
    }
    assert "--api-key" in error_of(capsys, command, "--base-url", server.url, *flags[command])
    assert bench(command, "--base-url", server.url, "--api-key", "secret", *flags[command]) == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_a_server_that_is_not_there(
    nobody: str, questions: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data-path", questions] if command == "gsm8k" else []
    error = error_of(capsys, command, "--base-url", nobody, *flags)
    assert f"no server answers at {nobody}" in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["gsm8k", "--data-path", "/nowhere.jsonl"], "--data-path /nowhere.jsonl: No such file"),
        (["gsm8k", "--base-url", "localhost"], "no URL of a server"),
        (
            ["gsm8k", "--json", "/nowhere/out.json"],
            "--json /nowhere/out.json: there is no such folder",
        ),
        (["gsm8k", "--parallel", "0"], "--parallel: '0' is not a whole number of at least 1"),
        (["gsm8k", "--api", "grpc"], "--api"),
        (["serving", "--request-rate", "-3"], "requests per second above 0, or inf"),
        (["serving", "--random-range-ratio", "2"], "a number from 0 to 1"),
        (["serving", "--num-prompts", "many"], "a whole number"),
        (
            ["serving", "--api", "chat", "--prompt-kind", "token-ids"],
            "does not work with --api chat",
        ),
        (["serving", "--dataset", "sharegpt-file", "--num-prompts", "x"], "a whole number"),
    ],
)
def test_mistakes_are_one_line(
    argv: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error in error_of(capsys, *argv)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench(command, "--help")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"examples:\n  piecework bench {command} " in text
    assert "--base-url" in text and "default:" in text


def test_the_parser_needs_no_heavy_import() -> None:
    heavy = (
        "{'aiohttp', 'numpy', 'torch', 'tqdm', 'psutil', 'msgspec', 'fastapi', "
        "'prometheus_client', 'urllib.request'}"
    )
    done = subprocess.run(
        [sys.executable, "-c", PARSE + f"print(sorted({heavy} & set(sys.modules)))"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "[]\n", done.stderr


def test_an_interrupt_ends_it_at_once(server: ScriptedServer) -> None:
    server.delay = 30.0
    code = (
        PARSE
        + "arguments = parser.parse_args(sys.argv[1:])\ntry: arguments.func(arguments)\nexcept "
        "KeyboardInterrupt: sys.exit(130)\n"
    )
    argv = ["serving", "--base-url", server.url, "--num-prompts", "4", "--num-warmups", "0"]
    # A shell starts what runs in the background with SIGINT ignored, and so its children; here it
    # is to be heard.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        [sys.executable, "-c", code, *argv], stderr=subprocess.PIPE, preexec_fn=heard
    ) as process:
        end = time.monotonic() + 30
        while server.running < 4 and time.monotonic() < end:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=10)
    assert process.returncode == 130 and b"Traceback" not in error


def test_embeddings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny_encoder(tmp_path, "bert")
    result = tmp_path / "result.json"
    flags = ["--batch-size", "3", "--rounds", "1", "--no-peer", "--json", str(result)]
    assert bench("embeddings", "--model-path", str(folder), *flags) == 0
    assert "| piecework | " in capsys.readouterr().out
    assert json.loads(result.read_text())["texts_per_second"]["piecework"] > 0
