"""The `piecework` command: reads the command line, then imports what the chosen command needs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from .. import __version__
from ..runtime.config import EngineConfig
from .args import EXIT_USER_ERROR, ArgumentParser, ServerConfig, add_config_arguments, report, server_config

EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0, or 2 where the user can mend it, 1 where something broke."""
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    chosen = getattr(arguments, "parser", parser)
    if unknown:
        chosen.reject(unknown)
    if "func" not in arguments:
        chosen.print_help(sys.stderr)
        return EXIT_USER_ERROR
    try:
        code: int = arguments.func(arguments)
        return code
    except ValueError as error:
        return report(chosen.prog, error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def build_parser() -> ArgumentParser:
    """Every command that exists. Needs neither torch nor the web stack, so that `--help` comes at once."""
    parser = ArgumentParser(prog="piecework", description="An OpenAI-compatible server for language models.")
    parser.add_argument("--version", action="version", version=f"piecework {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_serve(commands)
    _add_bench(commands)
    version = commands.add_parser("version", help="print the versions of piecework and of what it runs on")
    version.set_defaults(func=_version, parser=version)
    return parser


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a model through the OpenAI API",
        usage="%(prog)s --model-path PATH [flags]",
        description="Serve a model through the OpenAI API and SGLang's native one. Without flags: a small model on this machine only.",
        epilog="The server answers /health with 503 while the model loads, and with 200 once it is ready. "
        "SIGTERM or Ctrl-C lets running requests finish; a second one ends at once.",
    )
    add_config_arguments(serve, EngineConfig, ServerConfig)
    serve.set_defaults(func=_serve, parser=serve)


def _add_bench(commands: Any) -> None:
    from ..bench.cli import add_bench_parsers

    bench = commands.add_parser(
        "bench", help="measure a server", description="Measure any OpenAI-compatible server: what it answers, how fast, and what it leaks."
    )
    bench.set_defaults(parser=bench)
    add_bench_parsers(bench.add_subparsers(title="measurements", metavar="MEASUREMENT"))


def _serve(arguments: argparse.Namespace) -> int:
    config = server_config(arguments)
    from .launch import serve

    return serve(config)


def _version(arguments: argparse.Namespace) -> int:
    from importlib.metadata import version

    python = ".".join(map(str, sys.version_info[:3]))
    print(f"piecework {__version__} (python {python}, torch {version('torch')}, transformers {version('transformers')})")
    return 0
