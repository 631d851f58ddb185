"""`piecework completion` in a real bash, and for the other shells."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from piecework.cli.main import main

ASKED = {
    "piecework se": "serve",
    "piecework serve --max-runn": "--max-running-requests",
    "piecework serve --dtype fl": "float16 float32",
    "piecework serve --port 1 --log-level deb": "debug",
    "piecework bench serv": "serving",
    "piecework bench serving --api ch": "chat",
    "piecework serve --config here": "here.yaml",
    "piecework serve her": "here.yaml",
    "piecework cache ex": "export",
    "piecework serve --swap-sp": "",
}
"""A line as it is typed, and the words that it is completed to."""
_DRIVER = """
. ./script
function=$(complete -p piecework | sed 's/.*-F \\([^ ]*\\).*/\\1/')
while read -ra COMP_WORDS; do
    COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 )); COMPREPLY=()
    "$function" piecework "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
    echo "${COMPREPLY[*]}"
done
"""


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return str(capsys.readouterr().out)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_bash_completes_commands_flags_choices_and_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script").write_text(script("bash", capsys))
    (tmp_path / "here.yaml").touch()
    done = subprocess.run(
        ["bash", "--norc", "-c", _DRIVER],
        cwd=tmp_path,
        input="".join(f"{line}\n" for line in ASKED),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stderr == ""
    assert dict(zip(ASKED, done.stdout.split("\n"), strict=False)) == ASKED


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish here")
def test_fish_completes_commands_flags_choices_and_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script").write_text(script("fish", capsys))
    (tmp_path / "here.yaml").touch()
    asked = "; ".join(f"complete -C '{line}' | cut -f 1 | string join ' '; echo" for line in ASKED)
    done = _run("fish", tmp_path, "--no-config", "-c", f"source script; {asked}")
    assert done.stderr == ""
    told = [" ".join(lines.split()) for lines in done.stdout.split("\n\n")]
    assert dict(zip(ASKED, told, strict=False)) == ASKED


_ZSH_DRIVER = """
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "fpath=($PWD \\$fpath); autoload -Uz compinit; compinit -u -D
tell() { print -r -- \\$BUFFER >> told; BUFFER= }; zle -N tell; bindkey '^X' tell
bindkey '^I' expand-or-complete; : > begun"
while [[ ! -e begun ]]; do sleep 0.05; done
while read -r line; do zpty -w -n shell $line$'\t\x18'; zpty -r -t shell out; done
while (( $(wc -l < told) < $1 )); do zpty -r -t shell out; sleep 0.05; done
"""
"""Types each line and a tab into a shell of its own, and has it write down what is there then."""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh here")
def test_zsh_completes_commands_flags_choices_and_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "_piecework").write_text(script("zsh", capsys))
    (tmp_path / "here.yaml").touch()
    (tmp_path / "told").touch()
    asked = {line: word for line, word in ASKED.items() if len(word.split()) == 1}
    lines = "".join(f"{line}\n" for line in asked)
    _run("zsh", tmp_path, "-f", "-c", _ZSH_DRIVER, "driver", str(len(asked)), lines=lines)
    told = [line.split()[-1] for line in (tmp_path / "told").read_text().splitlines()]
    assert dict(zip(asked, told, strict=True)) == asked


def _run(
    shell: str, folder: Path, *arguments: str, lines: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [shell, *arguments],
        cwd=folder,
        env={**os.environ, "HOME": str(folder), "TERM": "dumb"},
        input=lines,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_every_flag(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "max-running-requests" in script(shell, capsys)
