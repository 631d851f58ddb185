"""The `piecework` command: reads the command line, then imports what the chosen command needs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .. import __version__
from . import bench, cache, chat, completion, config, explain, generate, key, models, pull, serve
from .core.flags import EXIT_USER_ERROR, ArgumentParser, report
from .core.settings import parse, with_sources

EXIT_INTERRUPTED = 130
_ELSEWHERE = {
    "run": "`piecework chat MODEL` talks with a model, `piecework serve MODEL` serves it",
    "list": "`piecework models` lists the models on this machine",
    "ps": "GET /v1/models of a server lists the models that it serves",
}
"""Commands of other programs, and ours for the same purpose."""
_COMMANDS = (
    serve, config, chat, pull, models, key, generate, explain, cache, bench, completion,
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0, or 2 where the user can mend it, 1 where something
    broke.
    """
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] in _ELSEWHERE:
        return report("piecework", ValueError(f"no command {words[0]}: {_ELSEWHERE[words[0]]}"))
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
    """Every command that exists. Needs neither torch nor the web stack, so that `--help` comes at
    once.
    """
    parser = ArgumentParser(
        prog="piecework", description="An OpenAI-compatible server for language models."
    )
    parser.add_argument("--version", action="version", version=f"piecework {__version__}")
    parser.set_defaults(root=parser)  # For `completion`, which describes all commands.
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(commands)
    version = commands.add_parser(
        "version", help="print the versions of piecework and of what it runs on"
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
