"""`piecework key`: make an API key and its line for the file of `--api-keys`."""

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
        description="Make an API key. Prints the line for the file of `piecework serve --api-keys` "
        "to standard output, and the key itself to standard error. The key is not stored.",
        epilog="%(prog)s team-a --requests-per-minute 60 >> keys.jsonl",
    )
    key.add_argument("name", metavar="NAME", help="name of the key in logs")
    key.add_argument(
        "--models",
        default=None,
        metavar="LIST",
        help="models that the key may use (a,b); default: all",
        type=lambda text: text.split(","),
    )
    for name, text in (
        ("requests-per-minute", "requests per minute; default: no limit"),
        ("tokens-per-minute", "prompt and answer tokens per minute; default: no limit"),
        ("concurrency", "concurrent requests; default: no limit"),
    ):
        key.add_argument(f"--{name}", type=int, default=None, metavar="N", help=text)
    key.add_argument(
        "--priority",
        type=int,
        default=0,
        metavar="N",
        help="highest priority of its requests; default: 0",
    )
    key.add_argument("--admin", action="store_true", help="let the key use every endpoint")
    key.set_defaults(func=_key, parser=key)


def _key(arguments: argparse.Namespace) -> int:
    secret = f"sk-{secrets.token_urlsafe(_BYTES)}"
    asked: dict[str, Any] = {item.name: getattr(arguments, item.name, None) for item in fields(Key)}
    line = asdict(Key(**asked | {"sha256": hash_of(secret.encode())}))
    print(json.dumps({name: value for name, value in line.items() if value}))
    print(secret, file=sys.stderr)
    return 0
