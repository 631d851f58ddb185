"""Parsers and flag types that all measurements share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar, cast

from ...bench.target import Api
from ..core.flags import report

DEFAULT_URL = "http://127.0.0.1:30000"
T = TypeVar("T")


def add_measurement(
    subparsers: Any,
    name: str,
    summary: str,
    text: str,
    examples: str,
    run: Callable[[argparse.Namespace], int],
) -> Any:
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=text,
        epilog=examples,
        formatter_class=Formatter,
        usage="%(prog)s [flags]",
        allow_abbrev=False,
    )

    parser.add_config_file_argument()

    def command(arguments: argparse.Namespace) -> int:
        try:
            return run(arguments)
        except ValueError as error:
            return report(parser.prog, error)

    parser.set_defaults(func=command, parser=parser)
    return parser


class Formatter(argparse.RawDescriptionHelpFormatter):
    """A formatter that keeps line ends and has a wide column for flags."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)


def add_flag(
    group: Any,
    flag: str,
    help: str,
    read: Callable[[str], Any] = str,
    default: Any = None,
    **settings: Any,
) -> None:
    """Add a flag with a value. `flag` is its name and metavar, for example `--seed N`.

    The default is appended to a help text that does not name it.
    """
    if default is not None and "default: " not in help:
        shown = f"{default:g}" if isinstance(default, float) else default
        help = f"{help}; default: {shown}" if help else f"default: {shown}"
    name, _, metavar = flag.partition(" ")
    named = {"metavar": metavar} if metavar else {}
    group.add_argument(name, type=read, default=default, help=help, **named, **settings)


def add_json(parser: Any) -> None:
    add_flag(
        parser,
        "--json FILE",
        "also write the result as JSON; -: to standard output, with the text on standard error",
    )


def positive(text: str) -> int:
    return integer(text, 1)


def count(text: str) -> int:
    return integer(text, 0)


def integer(text: str, least: int) -> int:
    value = int(text) if text.lstrip("-").isdecimal() else least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return value


def given(settings: type[T], arguments: argparse.Namespace, **others: Any) -> T:
    """Make a settings dataclass from the flags named like its fields, and `others`."""
    names = {item.name for item in fields(cast(Any, settings))} & vars(arguments).keys()
    return settings(**{name: getattr(arguments, name) for name in names} | others)


def add_target(parser: Any, *, api: bool = True) -> None:
    group = parser.add_argument_group("server")
    add_flag(
        group, "--base-url URL", f"URL of the server; default: {DEFAULT_URL}", str, DEFAULT_URL
    )
    if api:
        add_flag(
            group,
            "--api API",
            "endpoint: completion (/v1/completions), chat (/v1/chat/completions) or generate "
            "(SGLang's /generate); default: completion",
            Api,
            Api.COMPLETION,
            choices=list(Api),
        )
    add_flag(group, "--model NAME", "model to ask; default: the first that the server lists")
    add_flag(group, "--api-key KEY", "sent as `Authorization: Bearer KEY`; default: none")
    add_flag(group, "--timeout S", "maximum seconds of one request", float, 600.0)
    group.add_argument(
        "--no-keep-alive",
        dest="keep_alive",
        action="store_false",
        help="open a connection for each request, for servers that reset used ones",
    )
    add_json(parser)


def add_servers(parser: Any, help: str) -> None:
    """Add `--server NAME=COMMAND`, which gives pairs in `servers`."""
    parser.add_argument(
        "--server",
        dest="servers",
        action="append",
        type=_server,
        default=[],
        metavar="NAME=COMMAND",
        help=help,
    )


def _server(text: str) -> tuple[str, str]:
    label, _, command = text.partition("=")
    if not label or not command.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=COMMAND")
    return label, command


def add_gsm8k_file(group: Any, more: str = "") -> None:
    add_flag(
        group,
        "--data-path FILE",
        "JSONL file with question and answer per line; default: GSM8K's test set, downloaded once "
        "to ~/.cache/piecework" + more,
    )


def numbers(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))


def ratio(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value
