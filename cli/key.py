"""`piecework key`: makes an API key, and the line that `--api-keys` knows it by."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from dataclasses import asdict, fields
from typing import Any

from ..server.config.keys import Key, hash_of
from .core.flags import ArgumentParser

_BYTES = 32


def add_parser(commands: Any) -> None:
    key: ArgumentParser = commands.add_parser(
        "key",
        help="make an API key and its line for serve --api-keys",
        description="Make an API key. Its line for the file of `piecework serve --api-keys` goes "
        "to standard output, the key itself to standard error: it is not kept anywhere.",
        epilog="%(prog)s team-a --requests-per-minute 60 >> keys.jsonl",
    )
    key.add_argument("name", metavar="NAME", help="by which logs tell it")
    key.add_argument(
        "--models",
        default=None,
        metavar="LIST",
        help="models that it may use (a,b); default: all",
        type=lambda text: text.split(","),
    )
    for name, text in (
        ("requests-per-minute", "requests that may begin in a minute; default: no limit"),
        ("tokens-per-minute", "tokens of prompts and answers in a minute; default: no limit"),
        ("concurrency", "requests at once; default: no limit"),
    ):
        key.add_argument(f"--{name}", type=int, default=None, metavar="N", help=text)
    key.add_argument("--priority", type=int, default=0, metavar="N", help="default: 0")
    key.add_argument("--admin", action="store_true", help="may use every endpoint")
    key.set_defaults(func=_key, parser=key)


def _key(arguments: argparse.Namespace) -> int:
    secret = f"sk-{secrets.token_urlsafe(_BYTES)}"
    asked: dict[str, Any] = {item.name: getattr(arguments, item.name, None) for item in fields(Key)}
    line = asdict(Key(**asked | {"sha256": hash_of(secret.encode())}))
    print(json.dumps({name: value for name, value in line.items() if value}))
    print(secret, file=sys.stderr)
    return 0
