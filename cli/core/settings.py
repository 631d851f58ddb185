"""Values of flags from four sources.

The command line overrides `PIECEWORK_*` variables, which override the file of `--config`, which
overrides the default.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...server.config.api_key import VARIABLE as API_KEY
from ...server.config.api_key import take_api_key
from .flags import ArgumentParser, ListAction

if TYPE_CHECKING:
    from .config_file import Entry

PREFIX = "PIECEWORK_"
# Variables without a flag.
OTHER_VARIABLES = ("CACHE_DIR", "KERNELS", "KERNELS_DIR", "DIST_KEY", "TORCH_COMPILE_MODE")
_MODELS = "models"
# Alternative flags: a source that sets one of them overrides the others too.
_ONE_OF: tuple[frozenset[str], ...] = (frozenset({"api_key", "api_key_file"}),)
_SWITCH = {"true": True, "yes": True, "on": True, "1": True}
_SWITCH |= {"false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True, slots=True)
class Setting:
    """A parsed value and its source: `FILE:LINE` or the name of a variable."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """One entry of `models:`: settings by flag name, and the `FILE:LINE` where it begins."""

    settings: Mapping[str, Setting]
    where: str


def parse(
    parser: ArgumentParser, argv: Sequence[str] | None, environment: MutableMapping[str, str]
) -> argparse.Namespace:
    """Parse a command line, and fill in values of the environment and of the file of `--config`.

    In the result, `sources` names the source of each value that no flag gave, and `models` has the
    entries of `models:` in the file. If a value is wrong, exits with code 2 and one line.
    """
    arguments = _parse(parser, argv)
    chosen: ArgumentParser = getattr(arguments, "parser", parser)
    if not chosen.takes_settings:
        return arguments
    models: list[ModelSettings] = []
    try:
        _warn_of_misspelt(parser, environment)
        layers = [_of_environment(chosen, environment)]
        if (path := getattr(arguments, "config", None)) is not None:
            settings, models = _of_file(chosen, path)
            layers.append(settings)
    except ValueError as error:
        chosen.error(" ".join(str(error).split()))
    arguments.sources, arguments.models = {}, models
    if any(layers):
        for action in chosen._actions:
            action.default = argparse.SUPPRESS
        settled = set(vars(_parse(parser, argv)))
        for layer in layers:
            new = {name: one for name, one in layer.items() if not _is_settled(name, settled)}
            for name, setting in new.items():
                setattr(arguments, name, setting.value)
                arguments.sources[name] = setting.source
            settled |= new.keys()
    return arguments


def with_sources(error: ValueError, arguments: argparse.Namespace) -> str:
    """Return the message, with the sources of the settings that it names."""
    message = str(error)
    sources: dict[str, str] = getattr(arguments, "sources", {})
    named = [
        f"{flag} is from {source}"
        for name, source in sources.items()
        if re.search(rf"{(flag := '--' + name.replace('_', '-'))}(?![\w-])", message)
    ]
    return f"{message} ({', '.join(named)})" if named else message


def _parse(parser: ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    arguments, unknown = parser.parse_known_args(argv)
    getattr(arguments, "parser", parser).settle(arguments, unknown)
    return arguments


def _is_settled(name: str, settled: set[str]) -> bool:
    return name in settled or any(name in group and group & settled for group in _ONE_OF)


def _of_environment(
    parser: ArgumentParser, environment: MutableMapping[str, str]
) -> dict[str, Setting]:
    """Return the flags of one command that variables set. Raises `ValueError`.

    The API key is removed from the environment, so that no child process inherits it.
    """
    found: dict[str, Setting] = {}
    for key, action in settable(parser).items():
        variable = variable_of(key)
        if variable == API_KEY:
            if (secret := take_api_key(environment)) is not None:
                found[action.dest] = Setting(secret, variable)
        elif text := environment.get(variable):
            if action.dest in found:
                raise ValueError(
                    f"{found[action.dest].source} and {variable} are the same setting; set only one"
                )
            found[action.dest] = Setting(_read(action, text, variable), variable)
    return found


def _of_file(parser: ArgumentParser, path: str) -> tuple[dict[str, Setting], list[ModelSettings]]:
    from .config_file import read_config_file

    mapping = read_config_file(path)
    each_model = parser.models
    models = next((entry for entry in mapping.entries if entry.key == _MODELS), None)
    if models is None or each_model is None:
        return _settings(parser, mapping.entries), []
    settings = _settings(parser, [entry for entry in mapping.entries if entry is not models])
    given = models.value
    if not given or isinstance(given, str) or any(isinstance(one, str) for one in given):
        raise ValueError(f"{models.where}: {_MODELS} must be a list of mappings, one per model")
    entries: list[Any] = given
    return settings, [
        ModelSettings(_settings(each_model, one.entries), one.where) for one in entries
    ]


def _settings(parser: ArgumentParser, entries: Iterable[Entry]) -> dict[str, Setting]:
    """Return the values of a mapping in a file, by flag name.

    Raises `ValueError` with the line of the first wrong entry.
    """
    known = settable(parser)
    found: dict[str, Setting] = {}
    for entry in entries:
        if entry.key not in known:
            raise ValueError(f"{entry.where}: {_unknown(entry.key, parser, known)}")
        action = known[entry.key]
        if action.dest in found:
            other = found[action.dest].source
            raise ValueError(
                f"{entry.where}: {entry.key} is already set under another name at {other}; give one"
            )
        if entry.value is not None:
            value = _read(action, entry.value, f"{entry.where}: {entry.key}")
            found[action.dest] = Setting(value, entry.where)
    return found


def _unknown(key: str, parser: ArgumentParser, known: Iterable[str]) -> str:
    flag = f"--{key.replace('_', '-')}"
    if (instead := parser.instead_of(flag)) is not None:
        return f"{key} is not a setting of piecework: {instead}"
    close = difflib.get_close_matches(key, list(known), n=1)
    closest = f"did you mean {close[0]}?" if close else f"`{parser.prog} --help` lists them"
    return f"unknown key {key}; {closest}"


def settable(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the flags of a command by name with `_`, without --help, --version and --config."""
    found = {}
    for action in parser._actions:
        if action.dest in (argparse.SUPPRESS, "help", "version", "config"):
            continue
        for flag in action.option_strings:
            negative = isinstance(action, argparse.BooleanOptionalAction) and (
                flag.startswith("--no-")
            )
            if flag.startswith("--") and not negative:
                found[flag[2:].replace("-", "_")] = action
    return found


def variable_of(key: str) -> str:
    """Return the name of the variable for a key: `PIECEWORK_PORT` for `port`."""
    return PREFIX + key.upper()


def _read(action: argparse.Action, given: Any, where: str) -> Any:
    """Parse a text, or a list of texts, as the flag does. Raises `ValueError`."""
    takes_list = isinstance(action, ListAction)
    if isinstance(given, list) and takes_list and all(isinstance(one, str) for one in given):
        given = ",".join(given)
    if isinstance(given, list):
        raise ValueError(f"{where} takes one value, not a list")
    if action.nargs == 0:
        return _switched(action, given, where)
    try:
        value = action.type(given) if callable(action.type) else given
    except (argparse.ArgumentTypeError, ValueError, TypeError) as error:
        reason = error if isinstance(error, argparse.ArgumentTypeError) else f"invalid: {given!r}"
        raise ValueError(f"{where}: {reason}") from None
    if action.choices is not None and value not in action.choices:
        choices = ", ".join(map(str, action.choices))
        raise ValueError(f"{where}: {given!r} is not one of {choices}")
    return value


def _switched(action: argparse.Action, text: str, where: str) -> Any:
    """Return the value of a flag without argument for `true` or `false`."""
    on = _SWITCH.get(text.lower())
    if on is None:
        raise ValueError(f"{where}: {text!r} must be true or false")
    if isinstance(action, argparse.BooleanOptionalAction):
        return on
    if not isinstance(action.const, bool):
        if not on:
            raise ValueError(f"{where}: false has no meaning; leave the key out")
        return action.const
    return action.const if on else not action.const


def _warn_of_misspelt(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> None:
    """Print a warning for each variable that looks like a misspelt name."""
    known = {variable_of(key) for command in _commands(parser) for key in settable(command)}
    known |= {PREFIX + name for name in OTHER_VARIABLES}
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.88)
            if close:
                message = f"warning: {name} is not read; did you mean {close[0]}?"
                print(f"{parser.prog}: {message}", file=sys.stderr, flush=True)


def _commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _commands(command)
