"""Command-line flags made from the config dataclasses, and the settings of the HTTP server."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any, NoReturn, get_args, get_type_hints

from ..runtime.config import EngineConfig, option
from ..runtime.foreign_names import SAME, own_value
from ..server.api_key import checked_key, read_api_key
from ..server.http.limits import HttpLimits

LOG_LEVELS = ("debug", "info", "warning", "error")
SERVER = "server"
_LEAST_WATCHDOG = 3
"""Seconds: an engine gives a sign of life every second."""
EXIT_USER_ERROR = 2
_MULTIPLES = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
"""As vLLM reads them: 1k is 1,000 tokens, 1K is 1,024."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonServerConfig(HttpLimits):
    """Settings of one server, its engine's included, that do not depend on what it serves. Raises `ValueError` with a remedy."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 takes requests from other machines", group=SERVER, metavar="ADDRESS")
    port: int = option(30000, "port to listen on; 0 takes a free one", group=SERVER, metavar="N")
    api_key: str | None = option(
        None,
        "requests must carry this key as `Authorization: Bearer KEY`; /health stays open; every user of this machine sees a flag: "
        "give it by --api-key-file or PIECEWORK_API_KEY instead; default: no key",
        group=SERVER,
        metavar="KEY",
    )
    api_key_file: str | None = option(None, "a file that holds the key, instead of --api-key; default: none", group=SERVER, metavar="FILE")
    cors_origins: str = option(
        "",
        "origins (https://a.example,http://localhost:5173) whose pages may call this server from a browser, * for all; default: none",
        group=SERVER,
        metavar="LIST",
    )
    served_model_name: str = option(
        "", "the model's name in requests and in /v1/models; default: the last part of --model-path", group=SERVER, metavar="NAME"
    )
    max_queued_requests: int = option(
        512, "requests that may wait beyond those running; more are answered 503 with Retry-After", group=SERVER, metavar="N"
    )
    drain_timeout: float = option(
        30.0, "seconds that running requests get to finish when the server is told to stop", group=SERVER, metavar="SECONDS"
    )
    watchdog_timeout: float = option(
        300.0,
        "seconds without a sign of life after which the engine process is taken to hang, and is started again; 0: never",
        group=SERVER,
        metavar="SECONDS",
    )
    log_level: str = option("info", "how much to log; debug logs every HTTP request too", group=SERVER, choices=LOG_LEVELS)
    engine: Any

    def __post_init__(self) -> None:
        HttpLimits.__post_init__(self)
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port must lie between 0 and 65535, got {self.port}")
        if self.max_queued_requests < 0:
            raise ValueError(f"--max-queued-requests must be at least 0, got {self.max_queued_requests}")
        if not 0 <= self.drain_timeout < float("inf"):
            raise ValueError(f"--drain-timeout must be 0 or more seconds, got {self.drain_timeout}")
        if self.watchdog_timeout != 0 and not _LEAST_WATCHDOG <= self.watchdog_timeout < float("inf"):
            raise ValueError(
                f"--watchdog-timeout must be 0, which watches nothing, or at least {_LEAST_WATCHDOG} seconds, got {self.watchdog_timeout}"
            )
        if self.log_level not in LOG_LEVELS:
            raise ValueError(f"--log-level must be one of {', '.join(LOG_LEVELS)}, got {self.log_level}")
        if self.api_key is not None and self.api_key_file is not None:
            raise ValueError("--api-key and --api-key-file both give a key; leave one of them out")
        if self.api_key is not None:
            object.__setattr__(self, "api_key", checked_key(self.api_key, "--api-key"))
        if self.api_key_file is not None:
            object.__setattr__(self, "api_key", read_api_key(self.api_key_file))
            object.__setattr__(self, "api_key_file", None)
        parse_origins(self.cors_origins)
        if not self.served_model_name:
            object.__setattr__(self, "served_model_name", _last_name(self.engine.model_path))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(CommonServerConfig):
    """Settings of a server of a language model."""

    chat_template: str | None = option(
        None, "Jinja template that turns a chat into a prompt, or a file with it; default: the model's own", group=SERVER, metavar="FILE"
    )
    engine: EngineConfig = field(default_factory=EngineConfig)


def parse_origins(text: str) -> list[str]:
    """What `--cors-origins` lists. Raises `ValueError` for what no browser sends as its origin."""
    origins = [origin.strip() for origin in text.split(",") if origin.strip()]
    for origin in origins:
        if origin != "*" and re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s*]+", origin) is None:
            raise ValueError(f"--cors-origins: {origin!r} is no origin such as https://a.example or http://localhost:5173, without a path")
    return origins


def _last_name(model_path: str) -> str:
    return os.path.basename(os.path.abspath(model_path)).removesuffix(".gguf") or model_path


class ArgumentParser(argparse.ArgumentParser):
    """argparse whose errors are one line, and whose flags must be written out, so that a new flag breaks no script."""

    instead_of: Callable[[str], str | None] = staticmethod(lambda flag: None)
    """What to do instead of giving a flag that is not ours, where that is known."""
    _takes_model = False

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("allow_abbrev", False)
        settings.setdefault("formatter_class", HelpFormatter)
        super().__init__(**settings)

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USER_ERROR, f"{self.prog}: error: {message}\n")

    def add_model_argument(self) -> None:
        """MODEL as the first argument, for `--model-path MODEL`."""
        self._takes_model = True
        self.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help="the same as --model-path MODEL")

    def settle(self, arguments: argparse.Namespace, unknown: Sequence[str]) -> None:
        """MODEL, wherever it stands, becomes `arguments.model_path`; ends with exit code 2 for what is `unknown` otherwise."""
        given = [arguments.model] if self._takes_model and "model" in arguments else []
        if self._takes_model and not any(argument.startswith("-") for argument in unknown):
            # argparse takes an optional argument for missing where flags stand before it.
            given, unknown = [*given, *unknown[: 1 - len(given)]], unknown[1 - len(given) :]
        if unknown:
            self.reject(unknown)
        for model in given:
            if getattr(arguments, "model_path", model) != model:
                self.error(f"{model} and --model-path {arguments.model_path} are two models; give one")
            arguments.model_path = model

    def reject(self, unknown: Sequence[str]) -> NoReturn:
        """End with exit code 2, naming the flag that is closest to the first unknown one."""
        flags = [argument.partition("=")[0] for argument in unknown if argument.startswith("-")]
        if not flags:
            self.error(f"unexpected argument {unknown[0]!r}")
        if (instead := self.instead_of(flags[0])) is not None:
            self.error(f"{flags[0]} is no flag here: {instead}")
        known = [name for action in self._actions for name in action.option_strings]
        close = difflib.get_close_matches(flags[0], known, n=1)
        self.error(f"unknown flag {flags[0]}; " + (f"did you mean {close[0]}?" if close else f"`{self.prog} --help` lists them"))


class HelpFormatter(argparse.HelpFormatter):
    """Room for long flag names, of which only our own are shown."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        foreign = {_flag(name) for name in SAME}
        shown = copy.copy(action)
        shown.option_strings = [name for name in action.option_strings if name not in foreign]
        return super()._format_action_invocation(shown)


def add_config_arguments(parser: argparse.ArgumentParser, *configs: type) -> None:
    """A flag for every `option()` field of the config dataclasses, under the headings that the fields name.

    A field that an earlier config has too is one flag, the earlier one's.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    seen: set[str] = set()
    for config in configs:
        types = get_type_hints(config)
        for item in _options(config):
            if item.name in seen:
                continue
            seen.add(item.name)
            heading = item.metadata["group"]
            if heading not in groups:
                groups[heading] = parser.add_argument_group(heading)
            foreign = [_flag(name) for name, own in SAME.items() if own == item.name]
            groups[heading].add_argument(_flag(item.name), *foreign, **_argument(item, types[item.name]))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _options(config: type) -> list[dataclasses.Field[Any]]:
    return [item for item in dataclasses.fields(config) if "group" in item.metadata]


def _argument(item: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """The keyword arguments of `add_argument` for one field; flags that are not given stay out of the namespace."""
    text = item.metadata["help"].replace("%", "%%")
    shared = {"dest": item.name, "default": argparse.SUPPRESS}
    if hint is bool and item.default:
        return {**shared, "action": argparse.BooleanOptionalAction, "help": text}
    if bool in (hint, *get_args(hint)):
        return {**shared, "action": "store_true", "help": text}
    if item.default not in (None, ""):
        text += f"; default: {item.default}"
    settings = {"choices": item.metadata["choices"], "metavar": item.metadata["metavar"], "help": text}
    return {**shared, **settings, "type": _value_type(item.name, hint)}


def _value_type(name: str, hint: Any) -> Callable[[str], Any]:
    """What reads the value of one option; where None is to choose for this machine, `auto` says so."""
    kinds = get_args(hint) or (hint,)
    if str in kinds:
        return partial(own_value, name)
    read = _whole_number if int in kinds else _number
    return partial(_or_auto, read) if type(None) in kinds else read


def _or_auto(read: Callable[[str], Any], text: str) -> Any:
    return None if text == "auto" else read(text)


def _whole_number(text: str) -> int:
    """`4096`, `4k` (4,000) or `4K` (4,096)."""
    found = re.fullmatch(r"([+-]?\d+(?:\.\d+)?)([kKmM]?)", text)
    number = Fraction(found[1]) * _MULTIPLES.get(found[2], 1) if found is not None else None
    if number is None or number.denominator != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return number.numerator


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """The engine's settings of a parsed command line. Raises `ValueError` with a remedy."""
    return EngineConfig(**given(arguments, EngineConfig))


def server_config(arguments: argparse.Namespace) -> ServerConfig:
    """The server's settings of a parsed command line. Raises `ValueError` with a remedy."""
    return ServerConfig(engine=engine_config(arguments), **given(arguments, ServerConfig))


def refuse_flags(arguments: argparse.Namespace, foreign: Sequence[type], own: Sequence[type], reason: str) -> None:
    """Raises `ValueError` for the first flag given that only the `foreign` configs have; `reason` says what does not fit."""
    known = {item.name for config in own for item in _options(config)}
    for config in foreign:
        for name in given(arguments, config):
            if name not in known:
                raise ValueError(f"{_flag(name)} {reason}; leave it out")


def given(arguments: argparse.Namespace, config: type) -> dict[str, Any]:
    """What the command line says of the fields of one config."""
    names = {item.name for item in _options(config)}
    return {name: value for name, value in vars(arguments).items() if name in names}


def report(prog: str, message: object) -> int:
    """Print one line on stderr for the user; returns the exit code that belongs to it."""
    print(f"{prog}: error: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
    return EXIT_USER_ERROR
