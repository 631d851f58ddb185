"""Flags of vLLM, SGLang and llama.cpp on our command line: those that mean the same are understood,
harmless ones are ignored with a line, the others are refused with what to do instead.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .flags import ListAction, list_text, whole_number
from .foreign_tables import (
    CHOICES_WITHOUT_EFFECT,
    LISTS_WITHOUT_EFFECT,
    NOTHING_TO_DO,
    ONE_VALUE,
    REFUSED,
    SWITCHES_WITHOUT_EFFECT,
    VALUES_WITHOUT_EFFECT,
)


def add_foreign_flags(parser: Any) -> None:
    """Add the flags that are understood beside our own. `--help` leaves them out. What is not
    understood is refused by its name.
    """
    add = partial(parser.add_argument, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    for names, (values, reason) in ONE_VALUE.items():
        add(*names, action=_Ignored, type=_only(values, reason))
    for flag in NOTHING_TO_DO:
        add(flag, action=_Ignored, nargs=0)
    for table, takes in (
        (SWITCHES_WITHOUT_EFFECT, {"nargs": 0}),
        (VALUES_WITHOUT_EFFECT, {}),
        (LISTS_WITHOUT_EFFECT, {"nargs": "+"}),
        # Its value may be left out; a model's name behind it is an error, not the value.
        (CHOICES_WITHOUT_EFFECT, {"nargs": "?", "const": "auto", "choices": ("on", "off", "auto")}),
    ):
        for names, reason in table.items():
            add(*names, action=partial(_Ignored, reason), **takes)
    for names, (setting, read) in _SAME.items():
        add(*names, dest=setting, type=read)
    add("--allowed-origins", dest="cors_origins", action=ListAction, items=r"\*|[a-z].*://.*")
    for flag, setting, value in _SWITCHES:
        add(flag, action="store_const", const=value, dest=setting)
    parser.instead_of = instead_of


def instead_of(flag: str) -> str | None:
    """Return what to do instead of giving a flag that means nothing here, or None for one that
    nobody has.
    """
    return next((text for pattern, text in REFUSED.items() if re.fullmatch(pattern, flag)), None)


class _Ignored(argparse.Action):
    """A flag that changes nothing. If there is a `reason`, it goes to standard error."""

    def __init__(self, reason: str | None = None, **settings: Any) -> None:
        super().__init__(**{**settings, "dest": argparse.SUPPRESS})
        self._reason = reason

    def __call__(
        self,
        parser: Any,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if self._reason is not None:
            print(f"{parser.prog}: {option_string} is ignored: {self._reason}", file=sys.stderr)


def _number_unless(none: int) -> Callable[[str], int | None]:
    """Return what reads a number; `none` stands for the default."""

    def read(text: str) -> int | None:
        number = whole_number(text)
        return None if number == none else number

    return read


def _repository(text: str) -> str:
    repository, _, kind = text.partition(":")
    if kind:
        raise argparse.ArgumentTypeError(
            f"download one .gguf file of {repository} (piecework pull), and name it with "
            f"--model-path; {kind} alone does not say which"
        )
    return repository


def _runner(task: str) -> str:
    """vLLM's older name: the runner that a task needs."""
    if task in ("auto", "generate"):
        return task
    if task in ("embed", "embedding", "classify", "score"):
        return "pooling"
    raise argparse.ArgumentTypeError(f"{task!r} is none of auto, generate, embed, classify, score")


def _reasoning_format(name: str) -> str:
    if name in ("none", "auto", "deepseek", "deepseek-legacy"):
        return "none" if name == "none" else "auto"
    raise argparse.ArgumentTypeError(f"{name!r} is none of none, auto, deepseek, deepseek-legacy")


def _only(values: Sequence[str], reason: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in values:
            raise argparse.ArgumentTypeError(
                f"{reason}; leave it out, or give {' or '.join(values)}, not {text}"
            )
        return text

    return check


_SAME: dict[tuple[str, ...], tuple[str, Callable[[str], Any]]] = {
    ("-m",): ("model_path", str),
    ("-hf", "-hfr", "--hf-repo"): ("model_path", _repository),
    ("-a", "--alias"): ("served_model_name", list_text),
    ("-c", "--ctx-size"): ("context_length", _number_unless(0)),
    ("-t", "--threads"): ("num_threads", _number_unless(-1)),
    ("-np", "--parallel"): ("max_running_requests", _number_unless(-1)),
    ("-s",): ("random_seed", _number_unless(-1)),
    ("--reasoning-format",): ("reasoning_parser", _reasoning_format),
    ("--task",): ("runner", _runner),
    ("-tp",): ("tp_size", whole_number),
    ("-dp",): ("dp_size", whole_number),
}
"""Flags to our setting, and what reads their value."""
_SWITCHES = (
    ("--enable-prefix-caching", "disable_radix_cache", False),
    ("--no-enable-prefix-caching", "disable_radix_cache", True),
    ("--no-cache-prompt", "disable_radix_cache", True),
    ("--no-async-scheduling", "disable_overlap_schedule", True),
    ("--enable-deterministic-inference", "batch_invariant", True),
    ("--disable-log-stats", "log_stats_interval", 0.0),
    ("--no-ui", "no_page", True),
    ("--no-webui", "no_page", True),
    *((f"--{name}", "runner", "pooling") for name in (
        "is-embedding", "embedding", "embeddings", "rerank", "reranking"
    )),
)  # fmt: skip
"""Flags without a value to our setting and its value."""
