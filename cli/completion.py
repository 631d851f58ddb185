"""`piecework completion SHELL`: print a script that completes commands, flags and files."""

from __future__ import annotations

import argparse
from typing import Any

_SHELLS = ("bash", "zsh", "fish")
_FILES = ("FILE", "PATH")
_FOLDERS = ("FOLDER",)
_WHERE = {
    "bash": "piecework completion bash > ~/.local/share/bash-completion/completions/piecework",
    "zsh": "piecework completion zsh > ~/.zfunc/_piecework   (with ~/.zfunc in fpath)",
    "fish": "piecework completion fish > ~/.config/fish/completions/piecework.fish",
}


def add_parser(commands: Any) -> None:
    completion = commands.add_parser(
        "completion",
        help="print a completion script for bash, zsh or fish",
        description="Print a script that lets a shell complete commands, flags, their "
        "choices and files. Install it with:\n\n"
        + "\n".join(f"  {line}" for line in _WHERE.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    completion.add_argument("shell", choices=_SHELLS, metavar="SHELL", help=", ".join(_SHELLS))
    completion.set_defaults(func=_completion, parser=completion)


def _completion(arguments: argparse.Namespace) -> int:
    import shtab

    _complete_files(arguments.root)
    print(shtab.complete(arguments.root, shell=arguments.shell))
    return 0


def _complete_files(parser: argparse.ArgumentParser) -> None:
    """Mark the arguments that are files or folders."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_files(command)
        elif action.metavar in (*_FILES, "MODEL"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
