"""The `piecework` command: which commands there are, and what a person sees who mistypes one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import piecework
from piecework.cli.main import build_parser, main

COMMANDS = [
    "serve", "config", "chat", "pull", "models", "key", "generate", "explain", "cache", "bench",
    "completion", "version",
]  # fmt: skip


def error_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What `piecework ARGV` prints on stderr, given that it ends with exit code 2."""
    try:
        code: object = main(argv)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def test_the_commands_are_these(capsys: pytest.CaptureFixture[str]) -> None:
    """A command is listed when it exists, and not before."""
    commands = build_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    assert list(commands) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"piecework {command}" in capsys.readouterr().out


def test_version_on_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    short = capsys.readouterr().out
    assert main(["version"]) == 0
    assert short == f"piecework {piecework.__version__}\n"
    assert capsys.readouterr().out.startswith(short.strip())


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert error_of([], capsys).startswith("usage: piecework")


def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    error = error_of(["sevre"], capsys)
    assert error.startswith("piecework: error: ") and error.count("\n") == 1 and "serve" in error


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["serve", "--prot", "1"], "unknown flag --prot; did you mean --port?"),
        (["serve", "--port", "-5"], "--port must lie between 0 and 65535, got -5"),
        (["serve", "--context-length", "0"], "--context-length must be at least 1, got 0"),
        (["serve", "--num-threads", "100000"], "--num-threads must be at most 1024, got 100000"),
        (["serve", ""], "the model's path is empty"),
        (
            ["serve", "--port", "0", "--tokenizer-path", "/nowhere"],
            "--tokenizer-path /nowhere does not exist",
        ),
        (
            ["serve", "--port", "0", "--host", "no..host"],
            "cannot listen on --host no..host: this is no host name",
        ),
        (
            ["serve", "--host", "203.0.113.1", "--port", "0"],
            "cannot listen on --host 203.0.113.1 --port 0: Cannot assign requested address",
        ),
        (["serve", "--port", "0", "--model-path", "/nowhere/at/all"], "/nowhere/at/all"),
        (
            ["serve", ".", "--kv-disk", "/var/kv", "--tp-size", "2"],
            "--kv-disk needs an engine of one rank: leave it or --tp-size out",
        ),
    ],
)
def test_what_the_user_can_mend_is_one_line(
    argv: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = error_of(argv, capsys)
    assert printed.startswith("piecework serve: error: ") and printed.count("\n") == 1
    assert error in printed


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (
            ["--chunked-prefill-size", "64"],
            "--chunked-prefill-size is for language models, but {folder} is a diffusion pipeline",
        ),
        (["--chat-template", "x"], "--chat-template is for language models"),
        (["--dtype", "auto"], "--dtype is for language models"),
        (["--warmup-mode", "request"], "--warmup-mode server"),
        (["--warmup-resolutions", "64x64"], "add --warmup"),
        (["--warmup", "--warmup-resolutions", "64"], "such as 1024x1024,512x768"),
        (["--regional-compile"], "without --enable-torch-compile; add it"),
        (["--image-url-memory", "0"], "--image-url-memory must be at least 1 MiB"),
        (["--image-url-lifetime", "nan"], "--image-url-lifetime must be more than 0"),
        (["--max-queued-requests", "-1"], "--max-queued-requests must be at least 0"),
    ],
)
def test_a_diffusion_pipeline_takes_its_own_flags_only(
    flags: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    printed = error_of(["serve", "--model-path", str(tmp_path), *flags], capsys)
    assert printed.startswith("piecework serve: error: ") and printed.count("\n") == 1
    assert error.format(folder=tmp_path) in printed


@pytest.mark.parametrize(
    "flags",
    [
        ["--enable-torch-compile"],
        ["--image-url-memory", "1"],
        ["--warmup"],
        ["--max-batch-size", "2"],
    ],
)
def test_a_language_model_takes_none_of_a_diffusion_pipeline_s(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = error_of(["serve", "--model-path", str(tmp_path), *flags], capsys)
    assert (
        f"{flags[0]} is for diffusion pipelines, but {tmp_path} is not one; leave it out" in printed
    )


@pytest.mark.parametrize("place", ["", "{folder}", "--model-path={folder}"])
def test_help_shows_only_the_flags_that_apply(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for pipeline in (False, True) if place else (False,):
        if pipeline:
            (tmp_path / "model_index.json").write_text("{}")
        with pytest.raises(SystemExit) as ended:
            main(["serve", *[place.format(folder=tmp_path)] * bool(place), "--help"])
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        assert ("--dit-precision" in shown, "--image-url-memory" in shown) == (pipeline, pipeline)
        assert ("--context-length" in shown, "--chat-template" in shown) == (
            not pipeline,
            not pipeline,
        )
        assert "--drain-timeout" in shown and "MODEL" in shown


@pytest.mark.parametrize(
    "command",
    [["serve", "--port", "0"], ["explain"], ["generate", "--prompt", "x"], ["bench", "graphs"]],
)
def test_a_model_is_named_without_a_flag(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "/nowhere/at/all" in error_of([*command, "/nowhere/at/all"], capsys)


def test_help_and_mistakes_need_no_heavy_import() -> None:
    commands = (
        ["--help"],
        ["serve", "--help"],
        ["generate", "--help"],
        ["bench", "--help"],
        ["serve", "--port", "x"],
        ["--version"],
    )
    code = (
        "import sys\nfrom piecework.cli.main import main\n"
        f"for argv in {commands!r}:\n"
        "    try: main(argv)\n    except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'diffusers', 'PIL', 'fastapi', 'uvicorn', 'pydantic', "
        "'aiohttp', 'numpy', 'zmq'}\n"
        "heavy &= set(sys.modules)\n"
        "sys.exit(f'imported {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
