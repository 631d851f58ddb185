"""Flags of vLLM, SGLang and llama.cpp on our command line.

A flag with an equivalent sets it. A harmless flag is ignored with one line. Any other flag is
refused with advice.
"""

from __future__ import annotations

import argparse
import json
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
    """Add the flags of other servers that are accepted. `--help` does not list them."""
    add = partial(parser.add_argument, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    for names, (values, reason) in ONE_VALUE.items():
        add(*names, action=_Ignored, type=_only(values, reason))
    for flag in NOTHING_TO_DO:
        add(flag, action=_Ignored, nargs=0)
    for table, takes in (
        (SWITCHES_WITHOUT_EFFECT, {"nargs": 0}),
        (VALUES_WITHOUT_EFFECT, {}),
        (LISTS_WITHOUT_EFFECT, {"nargs": "+"}),
        # The value is optional. A model's name after the flag is an error, not its value.
        (CHOICES_WITHOUT_EFFECT, {"nargs": "?", "const": "auto", "choices": ("on", "off", "auto")}),
    ):
        for names, reason in table.items():
            add(*names, action=partial(_Ignored, reason), **takes)
    for names, (setting, read) in _SAME.items():
        add(*names, dest=setting, type=read)
    add("-sc", "--speculative-config", action=_SpeculativeConfig)
    add("--lora-paths", dest="lora_modules", action=ListAction, items=r"[^-].*")
    add("--allowed-media-domains", dest="allow_remote_media", action=ListAction, items=r"[^-].*")
    add("--allowed-origins", dest="cors_origins", action=ListAction, items=r"\*|[a-z].*://.*")
    for flag, setting, value in _SWITCHES:
        add(flag, action="store_const", const=value, dest=setting)
    parser.instead_of = instead_of


def instead_of(flag: str) -> str | None:
    """Return advice for a flag of another server that is refused, or None for an unknown flag."""
    return next((text for pattern, text in REFUSED.items() if re.fullmatch(pattern, flag)), None)


class _Ignored(argparse.Action):
    """A flag without effect. If it has a `reason`, the reason is printed to standard error."""

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


# vLLM's methods that are algorithms here.
_METHODS = {"ngram": "ngram", "eagle3": "eagle3", "mtp": "nextn"}


class _SpeculativeConfig(argparse.Action):
    """vLLM's JSON of a method, a model and a number of tokens."""

    def __call__(
        self,
        parser: Any,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        try:
            config = json.loads(str(values))
            assert isinstance(config, dict)
        except (ValueError, AssertionError):
            parser.error(f'{option_string}: not a JSON object such as {{"method": "ngram"}}')
        method, model = config.get("method"), config.get("model")
        if method not in (None, "draft_model", *_METHODS):
            names = ", ".join(("draft_model", *_METHODS))
            parser.error(f"{option_string}: method {method!r} is not one of {names}")
        count = config.get("num_speculative_tokens")
        if count is not None and (type(count) is not int or count < 1):
            parser.error(f"{option_string}: num_speculative_tokens must be at least 1")
        if method in _METHODS:
            namespace.speculative_algorithm = _METHODS[method]
        # vLLM's layers of the model itself need no model, which may be named all the same.
        if isinstance(model, str) and method not in ("ngram", "mtp"):
            namespace.speculative_draft_model_path = model
        elif method not in _METHODS:
            parser.error(f"{option_string}: give a method, or the path of a draft model as model")
        if count is not None:
            name = "num_draft_tokens" if method == "ngram" else "num_steps"
            setattr(namespace, f"speculative_{name}", count)


def _number_unless(none: int) -> Callable[[str], int | None]:
    """Return a parser of whole numbers that returns None, the default, for `none`."""

    def read(text: str) -> int | None:
        number = whole_number(text)
        return None if number == none else number

    return read


def _repository(text: str) -> str:
    repository, _, kind = text.partition(":")
    if kind:
        raise argparse.ArgumentTypeError(
            f"{kind} does not name one file of {repository}; download a .gguf file (piecework "
            "pull), and give its path with --model-path"
        )
    return repository


def _runner(task: str) -> str:
    """Return the runner for a task of vLLM's older `--task`."""
    if task in ("auto", "generate"):
        return task
    if task in ("embed", "embedding", "classify", "score"):
        return "pooling"
    raise argparse.ArgumentTypeError(
        f"{task!r} is not one of auto, generate, embed, classify, score"
    )


def _reasoning_format(name: str) -> str:
    if name in ("none", "auto", "deepseek", "deepseek-legacy"):
        return "none" if name == "none" else "auto"
    raise argparse.ArgumentTypeError(
        f"{name!r} is not one of none, auto, deepseek, deepseek-legacy"
    )


def _only(values: Sequence[str], reason: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in values:
            raise argparse.ArgumentTypeError(
                f"{reason}; leave it out, or give {' or '.join(values)}, not {text}"
            )
        return text

    return check


# Flags of other servers: our setting, and the parser of the value.
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
    ("-md", "--model-draft"): ("speculative_draft_model_path", str),
    ("--draft", "--draft-n", "--draft-max"): ("speculative_num_steps", whole_number),
    ("--media-path",): ("allowed_local_media_path", str),
    ("-mm",): ("mmproj", str),
}
# Flags without a value: our setting, and the value to set.
_SWITCHES = (
    ("--enable-piecewise-cuda-graph", "piecewise_cuda_graph", True),
    ("--enforce-piecewise-cuda-graph", "piecewise_cuda_graph", True),
    ("--enable-prefix-caching", "disable_radix_cache", False),
    ("--no-enable-prefix-caching", "disable_radix_cache", True),
    ("--no-cache-prompt", "disable_radix_cache", True),
    ("--no-async-scheduling", "disable_overlap_schedule", True),
    ("--enable-deterministic-inference", "batch_invariant", True),
    ("--disable-log-stats", "log_stats_interval", 0.0),
    *((f"--{name}", "disable_vision", True) for name in (
        "language-only", "language-model-only", "no-mmproj", "no-mmproj-auto"
    )),
    ("--no-language-model-only", "disable_vision", False),
    ("--no-ui", "no_page", True),
    ("--no-webui", "no_page", True),
    *((f"--{name}", "runner", "pooling") for name in (
        "is-embedding", "embedding", "embeddings", "rerank", "reranking"
    )),
)  # fmt: skip
