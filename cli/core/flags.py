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
_MULTIPLES = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
"""As vLLM reads them: 1k is 1,000 tokens, 1K is 1,024."""


class ArgumentParser(argparse.ArgumentParser):
    """argparse whose errors are one line, and whose flags must be written out, so that a new flag
    breaks no script.
    """

    instead_of: Callable[[str], str | None] = staticmethod(lambda flag: None)
    """What to do instead of giving a flag that is not ours, where that is known."""
    takes_settings = False
    """Whether flags may be given by variables and by a file, too (`cli/core/settings.py`)."""
    models: ArgumentParser | None = None
    """Whose flags an entry of `models:` in such a file may have, where there may be any."""
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
        self.add_argument(
            "model",
            nargs="?",
            default=argparse.SUPPRESS,
            metavar="MODEL",
            help="the same as --model-path MODEL",
        )

    def add_config_file_argument(self) -> None:
        """`--config FILE`, and `PIECEWORK_*` variables for all flags."""
        self.takes_settings = True
        self.add_argument(
            "--config",
            default=argparse.SUPPRESS,
            metavar="FILE",
            help="YAML with flags as keys (port: 8000); flags, and variables such as "
            "PIECEWORK_PORT, go before it; default: none",
        )

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """No flag is taken for the beginning of another one: `-t 2` would set `-tp`."""
        return []

    def settle(self, arguments: argparse.Namespace, unknown: Sequence[str]) -> None:
        """MODEL, wherever it stands, becomes `arguments.model_path`; ends with exit code 2 for what
        is `unknown` otherwise.
        """
        unknown = [*vars(arguments).pop("left", []), *unknown]
        words: dict[str, list[str]] = vars(arguments).pop("last_words", {})
        given = [arguments.model] if self._takes_model and "model" in arguments else []
        if self._takes_model and not any(argument.startswith("-") for argument in unknown):
            # argparse takes an optional argument for missing where flags stand before it.
            given, unknown = [*given, *unknown[: 1 - len(given)]], unknown[1 - len(given) :]
        if unknown:
            self.reject(unknown)
        names = words.get("served_model_name", [])
        if self._takes_model and names and not given and "model_path" not in arguments:
            # Who gives several names names the model too: `--served-model-name a MODEL`.
            arguments.served_model_name, given = ",".join(names[:-1]), [names[-1]]
        for model in given:
            if getattr(arguments, "model_path", model) != model:
                self.error(
                    f"{model} and --model-path {arguments.model_path} are two models; give one"
                )
            arguments.model_path = model

    def reject(self, unknown: Sequence[str]) -> NoReturn:
        """End with exit code 2, naming the flag that is closest to the first unknown one."""
        flags = [argument.partition("=")[0] for argument in unknown if argument.startswith("-")]
        if not flags:
            self.error(f"unexpected argument {unknown[0]!r}")
        if (instead := self.instead_of(flags[0])) is not None:
            self.error(f"{flags[0]} is no flag here: {instead}")
        known = [
            name
            for action in self._actions
            if action.help is not argparse.SUPPRESS  # Flags of other servers are hidden.
            for name in action.option_strings
        ]
        # Short names are all alike, and a wrong guess is worse than none.
        is_long = flags[0].startswith("--")
        close = difflib.get_close_matches(flags[0], known, n=1, cutoff=0.82) if is_long else []
        self.error(
            f"unknown flag {flags[0]}; "
            + (f"did you mean {close[0]}?" if close else f"`{self.prog} --help` lists them")
        )


class ListAction(argparse.Action):
    """A flag whose value is a text with commas; several words (`1 2 4`) and a JSON list are read
    too. Words that do not match `items` are left for `ArgumentParser.settle`.
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
    """A list with commas between its items; `["a", "b"]` as vLLM writes lists becomes `a,b`."""
    if not text.startswith("["):
        return text
    try:
        found = json.loads(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON list") from None
    return ",".join(map(str, found))


class HelpFormatter(argparse.HelpFormatter):
    """Room for long flag names, of which only our own are shown."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        foreign = {_flag(name) for name in SAME}
        shown = copy.copy(action)
        shown.option_strings = [name for name in action.option_strings if name not in foreign]
        return super()._format_action_invocation(shown)


class _ModelPath(argparse.Action):
    """`--model-path`, which may be given more than once, with names: all are `model_paths`."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        namespace.model_path = values
        namespace.model_paths = [*getattr(namespace, "model_paths", []), values]


def add_config_arguments(
    parser: argparse.ArgumentParser, *configs: type, without: Collection[str] = ()
) -> None:
    """A flag for every `option()` field of the config dataclasses, under the headings that the
    fields name, but those of fields in `without`.

    A field that an earlier config has too is one flag, the earlier one's, with the values of both.
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
    """The names of a config's fields that are flags."""
    return {item.name for item in _options(config)}


def _options(config: type) -> list[dataclasses.Field[Any]]:
    return [item for item in dataclasses.fields(config) if "group" in item.metadata]


def _argument(item: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """The keyword arguments of `add_argument` for one field; flags that are not given stay out of
    the namespace.
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
    """What reads the value of one option; where None is to choose for this machine, `auto` says
    so.
    """
    kinds = get_args(hint) or (hint,)
    if str in kinds:
        return partial(own_value, name)
    read = whole_number if int in kinds else _number
    return partial(_or_auto, read) if type(None) in kinds else read


def _or_auto(read: Callable[[str], Any], text: str) -> Any:
    return None if text == "auto" else read(text)


def whole_number(text: str) -> int:
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


def check_model(config: EngineConfig) -> None:
    """Raises `ValueError` where the model cannot be served, before seconds of imports and minutes
    of loading.
    """
    from ...runtime.files.resolve import resolve_model_path
    from ...runtime.loader.check import check_engine

    check_engine(resolve_model_path(config.model_path), config)


def refuse_flags(
    arguments: argparse.Namespace, foreign: Sequence[type], own: Sequence[type], reason: str
) -> None:
    """Raises `ValueError` for the first flag given that only the `foreign` configs have; `reason`
    says what does not fit. Variables may be for other commands, and are no mistake.
    """
    sources = getattr(arguments, "sources", {})
    known = {item.name for config in own for item in _options(config)}
    for config in foreign:
        for name in given(arguments, config):
            if name not in known and not sources.get(name, "").startswith("PIECEWORK_"):
                raise ValueError(f"{_flag(name)} {reason}; leave it out")


def given(arguments: argparse.Namespace, config: type) -> dict[str, Any]:
    """What the command line says of the fields of one config."""
    names = option_names(config)
    return {name: value for name, value in vars(arguments).items() if name in names}


def report(prog: str, message: object) -> int:
    """Print one line on stderr for the user; returns the exit code that belongs to it."""
    print(
        f"{prog}: error: {printable(' '.join(str(message).split()))}", file=sys.stderr, flush=True
    )
    return EXIT_USER_ERROR
