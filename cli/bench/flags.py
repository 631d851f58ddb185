"""What the command lines of all measurements have in common: their parsers, and the values of their
flags.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar, cast

from ...bench.target import Api
from ..flags import report

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

    def command(arguments: argparse.Namespace) -> int:
        try:
            return run(arguments)
        except ValueError as error:
            return report(parser.prog, error)

    parser.set_defaults(func=command, parser=parser)
    return parser


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line ends of texts, with room for long flag names."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)


def add_json(parser: Any) -> None:
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the result there too; -: to standard output, and the text to standard error",
    )


def positive(text: str) -> int:
    return integer(text, 1)


def count(text: str) -> int:
    return integer(text, 0)


def integer(text: str, least: int) -> int:
    value = int(text) if text.lstrip("-").isdecimal() else least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} should be a whole number, at least {least}")
    return value


def given(settings: type[T], arguments: argparse.Namespace, **others: Any) -> T:
    """A settings dataclass from the flags of its fields' names, and `others`."""
    names = {item.name for item in fields(cast(Any, settings))} & vars(arguments).keys()
    return settings(**{name: getattr(arguments, name) for name in names} | others)


def add_target(parser: Any, *, api: bool = True) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--base-url", default=DEFAULT_URL, metavar="URL", help=f"default: {DEFAULT_URL}"
    )
    if api:
        group.add_argument(
            "--api",
            type=Api,
            choices=list(Api),
            metavar="API",
            default=Api.COMPLETION,
            help="completion (/v1/completions), chat (/v1/chat/completions) or generate (SGLang's "
            "/generate); default: completion",
        )
    group.add_argument("--model", metavar="NAME", help="default: the first that the server lists")
    group.add_argument(
        "--api-key", metavar="KEY", help="sent as `Authorization: Bearer KEY`; default: none"
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds that one request may take; default: 600",
    )
    group.add_argument(
        "--no-keep-alive",
        dest="keep_alive",
        action="store_false",
        help="a connection for each request, for servers that reset used ones",
    )
    add_json(parser)


def add_gsm8k_file(group: Any, more: str = "") -> None:
    group.add_argument(
        "--data-path",
        metavar="FILE",
        help="JSONL with question and answer on each line; default: GSM8K's test set, downloaded "
        "once to ~/.cache/piecework" + more,
    )


def numbers(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))


def ratio(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} should be a number from 0 to 1")
    return value
