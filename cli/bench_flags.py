"""What the command lines of all measurements have in common: their parsers, and the values of their flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar, cast

from .flags import report

DEFAULT_URL = "http://127.0.0.1:30000"
T = TypeVar("T")


def add_measurement(subparsers: Any, name: str, summary: str, text: str, examples: str, run: Callable[[argparse.Namespace], int]) -> Any:
    parser = subparsers.add_parser(
        name, help=summary, description=text, epilog=examples, formatter_class=Formatter, usage="%(prog)s [flags]", allow_abbrev=False
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
    parser.add_argument("--json", metavar="FILE", help="write the result there too; -: to standard output, and the text to standard error")


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
