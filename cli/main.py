"""The `piecework` command. Imports the modules of a subcommand only when it runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ..version import __version__
from . import bench, cache, chat, completion, config, explain, generate, key, models, pull, serve
from .core.flags import EXIT_USER_ERROR, ArgumentParser, report
from .core.settings import parse, with_sources

EXIT_INTERRUPTED = 130
# Commands of other programs, and our commands for the same purpose.
_ELSEWHERE = {
    "run": "`piecework chat MODEL` chats with a model, `piecework serve MODEL` serves it",
    "list": "`piecework models` lists the models on this machine",
    "ps": "GET /v1/models lists the models of a running server",
}
_COMMANDS = (
    serve, config, chat, pull, models, key, generate, explain, cache, bench, completion,
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 for success, 2 for a user error, 1 otherwise."""
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] in _ELSEWHERE:
        return report(
            "piecework", ValueError(f"there is no command {words[0]}: {_ELSEWHERE[words[0]]}")
        )
    parser = build_parser()
    arguments = parse(parser, argv, os.environ)
    chosen = getattr(arguments, "parser", parser)
    if "func" not in arguments:
        chosen.print_help(sys.stderr)
        return EXIT_USER_ERROR
    try:
        code: int = arguments.func(arguments)
        return code
    except ValueError as error:
        return report(chosen.prog, with_sources(error, arguments))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def build_parser() -> ArgumentParser:
    """Return a parser of all commands. It imports neither torch nor the web stack."""
    parser = ArgumentParser(
        prog="piecework", description="An OpenAI-compatible server for language models."
    )
    parser.add_argument("--version", action="version", version=f"piecework {__version__}")
    parser.set_defaults(root=parser)  # `completion` reads all commands.
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(commands)
    version = commands.add_parser(
        "version", help="print the versions of piecework, Python, torch and transformers"
    )
    version.set_defaults(func=_version, parser=version)
    return parser


def _version(arguments: argparse.Namespace) -> int:
    from importlib.metadata import version

    python = ".".join(map(str, sys.version_info[:3]))
    print(
        f"piecework {__version__} (python {python}, torch {version('torch')}, transformers "
        f"{version('transformers')})"
    )
    return 0
