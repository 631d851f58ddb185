"""Command-line flags made from the config dataclasses."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import difflib
import json
import re
import sys
from collections.abc import Callable, Collection, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, NoReturn, get_args, get_type_hints

from ...runtime.config.engine import EngineConfig
from ...runtime.config.foreign_names import SAME, own_value
from ...server.config.server import ServerConfig
from .printable import printable

EXIT_USER_ERROR = 2
# As vLLM reads them: 1k is 1,000 tokens, 1K is 1,024.
_MULTIPLES = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}


class ArgumentParser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` with errors of one line and without abbreviated flags.

    A script with an abbreviated flag would break when a new flag begins alike.

    Attributes:
        instead_of: Returns advice for a flag that is not ours, or None if there is none.
        takes_settings: Whether variables and a file set flags too (`cli/core/settings.py`).
        models: Parser for an entry of `models:` in that file; None if the file may have none.
    """

    instead_of: Callable[[str], str | None] = staticmethod(lambda flag: None)
    takes_settings = False
    models: ArgumentParser | None = None
    _takes_model = False

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("allow_abbrev", False)
        settings.setdefault("formatter_class", HelpFormatter)
        super().__init__(**settings)

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USER_ERROR, f"{self.prog}: error: {message}\n")

    def add_model_argument(self) -> None:
        """Add MODEL, a positional argument that means `--model-path MODEL`."""
        self._takes_model = True
        self.add_argument(
            "model",
            nargs="?",
            default=argparse.SUPPRESS,
            metavar="MODEL",
            help="the same as --model-path MODEL",
        )

    def add_config_file_argument(self) -> None:
        """Add `--config FILE`, and let `PIECEWORK_*` variables set all flags."""
        self.takes_settings = True
        self.add_argument(
            "--config",
            default=argparse.SUPPRESS,
            metavar="FILE",
            help="YAML file with flags as keys (port: 8000); flags and variables such as "
            "PIECEWORK_PORT override it; default: none",
        )

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Return no options: `-t 2` must not match `-tp`."""
        return []

    def settle(self, arguments: argparse.Namespace, unknown: Sequence[str]) -> None:
        """Move MODEL, wherever it stands, to `arguments.model_path`.

        Exits with code 2 if other `unknown` arguments are left.
        """
        unknown = [*vars(arguments).pop("left", []), *unknown]
        words: dict[str, list[str]] = vars(arguments).pop("last_words", {})
        given = [arguments.model] if self._takes_model and "model" in arguments else []
        if self._takes_model and not any(argument.startswith("-") for argument in unknown):
            # If flags stand before MODEL, argparse does not find it.
            given, unknown = [*given, *unknown[: 1 - len(given)]], unknown[1 - len(given) :]
        if unknown:
            self.reject(unknown)
        names = words.get("served_model_name", [])
        if self._takes_model and names and not given and "model_path" not in arguments:
            # The last of several names is MODEL: `--served-model-name a MODEL`.
            arguments.served_model_name, given = ",".join(names[:-1]), [names[-1]]
        for model in given:
            # Measurements have the flag's default, None, in the arguments.
            if getattr(arguments, "model_path", None) not in (None, model):
                self.error(
                    f"MODEL {model} and --model-path {arguments.model_path} differ; give one"
                )
            arguments.model_path = model

    def reject(self, unknown: Sequence[str]) -> NoReturn:
        """Exit with code 2 and name the known flag that is closest to the first unknown one."""
        flags = [argument.partition("=")[0] for argument in unknown if argument.startswith("-")]
        if not flags:
            self.error(f"unexpected argument {unknown[0]!r}")
        if (instead := self.instead_of(flags[0])) is not None:
            self.error(f"{flags[0]} is not a flag of piecework: {instead}")
        known = [
            name
            for action in self._actions
            if action.help is not argparse.SUPPRESS  # Flags of other servers are hidden.
            for name in action.option_strings
        ]
        # All short flags are similar, and a wrong guess is worse than none.
        is_long = flags[0].startswith("--")
        close = difflib.get_close_matches(flags[0], known, n=1, cutoff=0.82) if is_long else []
        self.error(
            f"unknown flag {flags[0]}; "
            + (f"did you mean {close[0]}?" if close else f"`{self.prog} --help` lists them")
        )


class ListAction(argparse.Action):
    """A flag with a comma-separated list. Several words (`1 2 4`) and a JSON list work too.

    Words that do not match `items` are left for `ArgumentParser.settle`.
    """

    def __init__(self, items: str, **settings: Any) -> None:
        super().__init__(**{**settings, "nargs": "+", "type": list_text})
        self._items = items

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        own = 1
        while own < len(values) and re.fullmatch(self._items, values[own]):
            own += 1
        setattr(namespace, self.dest, ",".join(values[:own]))
        namespace.left = [*getattr(namespace, "left", []), *values[own:]]
        if own > 1:
            namespace.last_words = {**getattr(namespace, "last_words", {}), self.dest: values[:own]}


def list_text(text: str) -> str:
    """Return a comma-separated list. A JSON list `["a", "b"]`, as vLLM writes it, becomes `a,b`."""
    if not text.startswith("["):
        return text
    try:
        found = json.loads(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON list") from None
    return ",".join(map(str, found))


class HelpFormatter(argparse.HelpFormatter):
    """A formatter with wide columns for flags. It hides the names of other servers."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        foreign = {_flag(name) for name, own in SAME.items() if own == action.dest}
        shown = copy.copy(action)
        shown.option_strings = [name for name in action.option_strings if name not in foreign]
        return super()._format_action_invocation(shown)


class _ModelPath(argparse.Action):
    """Collect every `--model-path` in `model_paths`; the last one is `model_path`."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        namespace.model_path = values
        namespace.model_paths = [*getattr(namespace, "model_paths", []), values]


def add_config_arguments(
    parser: argparse.ArgumentParser, *configs: type, without: Collection[str] = ()
) -> None:
    """Add a flag for every `option()` field of the configs, except the fields in `without`.

    If two configs have the same field, there is one flag, with the choices of both.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    seen: dict[str, argparse.Action] = {}
    for config in configs:
        types = get_type_hints(config)
        for item in _options(config):
            if item.name in without:
                continue
            if item.name in seen:
                earlier, own = seen[item.name], item.metadata["choices"]
                if earlier.choices is not None and own is not None:
                    earlier.choices = tuple(dict.fromkeys((*earlier.choices, *own)))
                continue
            heading = item.metadata["group"]
            if heading not in groups:
                groups[heading] = parser.add_argument_group(heading)
            foreign = [_flag(name) for name, own in SAME.items() if own == item.name]
            seen[item.name] = groups[heading].add_argument(
                _flag(item.name), *foreign, **_argument(item, types[item.name])
            )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def option_names(config: type) -> set[str]:
    """Return the names of a config's fields that are flags."""
    return {item.name for item in _options(config)}


def _options(config: type) -> list[dataclasses.Field[Any]]:
    found = [item for item in dataclasses.fields(config) if "group" in item.metadata]
    # A class's own fields come first, then those of the classes that it extends.
    return sorted(found, key=lambda item: item.name not in vars(config)["__annotations__"])


def _argument(item: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """Return the keyword arguments of `add_argument` for one field.

    A flag that is not given is missing in the namespace.
    """
    text = item.metadata["help"].replace("%", "%%")
    shared: dict[str, Any] = {"dest": item.name, "default": argparse.SUPPRESS}
    if hint is bool and item.default:
        return {**shared, "action": argparse.BooleanOptionalAction, "help": text}
    if bool in (hint, *get_args(hint)):
        return {**shared, "action": "store_true", "help": text}
    if item.default not in (None, ""):
        text += f"; default: {item.default}"
    if item.name == "model_path":
        shared["action"] = _ModelPath
    if item.metadata["items"] is not None:
        metavar = item.metadata["metavar"]
        return {**shared, "action": ListAction, "items": item.metadata["items"],
                "metavar": metavar, "help": text}  # fmt: skip
    settings = {
        "choices": item.metadata["choices"],
        "metavar": item.metadata["metavar"],
        "help": text,
    }
    return {**shared, **settings, "type": _value_type(item.name, hint)}


def _value_type(name: str, hint: Any) -> Callable[[str], Any]:
    """Return the function that parses an option's value. If None is allowed, `auto` means None."""
    kinds = get_args(hint) or (hint,)
    if str in kinds:
        return partial(own_value, name)
    read = whole_number if int in kinds else _number
    return partial(_or_auto, read) if type(None) in kinds else read


def _or_auto(read: Callable[[str], Any], text: str) -> Any:
    return None if text == "auto" else read(text)


def whole_number(text: str) -> int:
    """Parse `4096`, `4k` (4,000) or `4K` (4,096)."""
    found = re.fullmatch(r"([+-]?\d+(?:\.\d+)?)([kKmM]?)", text)
    number = Fraction(found[1]) * _MULTIPLES.get(found[2], 1) if found is not None else None
    if number is None or number.denominator != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return number.numerator


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """Return the engine's settings of a parsed command line. Raises `ValueError`."""
    return EngineConfig(**given(arguments, EngineConfig))


def server_config(arguments: argparse.Namespace) -> ServerConfig:
    """Return the server's settings of a parsed command line. Raises `ValueError`."""
    return ServerConfig(engine=engine_config(arguments), **given(arguments, ServerConfig))


def check_model(config: EngineConfig) -> None:
    """Raise `ValueError` if the model cannot be served, before slow imports and loading."""
    from ...runtime.files.resolve import resolve_model_path
    from ...runtime.loader.check import check_engine

    check_engine(resolve_model_path(config.model_path), config)


def refuse_flags(
    arguments: argparse.Namespace, foreign: Sequence[type], own: Sequence[type], reason: str
) -> None:
    """Raise `ValueError` for the first flag that only the `foreign` configs have.

    Flags set by variables are allowed, because a variable may be meant for another command.
    `reason` completes the message.
    """
    sources = getattr(arguments, "sources", {})
    known = {item.name for config in own for item in _options(config)}
    for config in foreign:
        for name in given(arguments, config):
            if name not in known and not sources.get(name, "").startswith("PIECEWORK_"):
                raise ValueError(f"{_flag(name)} {reason}; leave it out")


def given(arguments: argparse.Namespace, config: type) -> dict[str, Any]:
    """Return the values in `arguments` for the fields of `config`."""
    names = option_names(config)
    return {name: value for name, value in vars(arguments).items() if name in names}


def report(prog: str, message: object) -> int:
    """Print an error as one line on stderr. Returns the exit code for user errors."""
    print(
        f"{prog}: error: {printable(' '.join(str(message).split()))}", file=sys.stderr, flush=True
    )
    return EXIT_USER_ERROR
