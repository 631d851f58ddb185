"""`piecework completion` in a real bash, and for the other shells."""

from __future__ import annotations

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


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_every_flag(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "max-running-requests" in script(shell, capsys)
