"""`piecework explain`: what becomes of a model's forward, as tables, JSON and a picture; no server
is started.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

from ..runtime.config import EngineConfig
from .flags import add_config_arguments, check_model, engine_config, report
from .foreign_flags import add_foreign_flags

EXIT_FAILED = 1
_SHOTS = 5
"""Worked examples before each question, as in `piecework bench gsm8k`."""


def add_parser(commands: Any) -> None:
    explain = commands.add_parser(
        "explain",
        help="show what becomes of a model: its pieces, sizes, times, memory and padding",
        usage="%(prog)s [MODEL] [flags]",
        description="Cut a model's forward as `serve --piecewise-cuda-graph` does, and show its "
        "distinct pieces, where it is cut, what "
        "compiling and capturing takes, and what lists of sizes waste on padding. Takes serve's "
        "flags of model, memory and graphs. "
        "Starts no server; what it compiles is in the cache for the next one.",
    )
    shown = explain.add_argument_group("what is shown")
    shown.add_argument("--json", action="store_true", help="print JSON instead of tables")
    shown.add_argument("--svg", metavar="FILE", help="draw the cut forward into FILE")
    source = shown.add_mutually_exclusive_group()
    source.add_argument(
        "--lengths",
        metavar="FILE",
        help="compute padding on these numbers of tokens; default: the lengths that servers of "
        "this model have seen",
    )
    source.add_argument(
        "--dataset", choices=["gsm8k"], help="compute padding on the prompts of a data set"
    )
    shown.add_argument(
        "--data-path", metavar="FILE", help="the data set's file; default: downloaded once"
    )
    explain.add_model_argument()
    add_config_arguments(explain, EngineConfig)
    add_foreign_flags(explain)
    explain.set_defaults(func=_explain, parser=explain)


def _explain(arguments: argparse.Namespace) -> int:
    """Exit code 0; 1 where the model cannot run in pieces."""
    config = engine_config(arguments)
    if arguments.data_path is not None and arguments.dataset is None:
        raise ValueError("--data-path goes with --dataset")
    if arguments.svg is not None and not Path(arguments.svg).absolute().parent.is_dir():
        raise ValueError(f"--svg {arguments.svg}: there is no such folder")
    check_model(config)
    from ..compilation.errors import GraphError
    from ..runtime.graphs.explain import explain, lengths_of_file, lengths_of_prompts
    from ..runtime.graphs.explain_text import lines

    logging.basicConfig(format="%(levelname)s: %(message)s")
    lengths = None
    if arguments.lengths is not None:
        lengths = lengths_of_file(arguments.lengths)
    elif arguments.dataset is not None:
        from ..bench.datasets import few_shot_prompts, load_gsm8k

        questions = load_gsm8k(arguments.data_path)
        prompts = few_shot_prompts(questions, _SHOTS, len(questions))
        lengths = lengths_of_prompts(config, arguments.dataset, prompts)
    try:
        told = explain(config, lengths)
    except GraphError as error:
        report(arguments.parser.prog, error)
        return EXIT_FAILED
    if arguments.json:
        print(json.dumps(told.to_json(), indent=2))
    else:
        sys.stdout.writelines(f"{line.rstrip()}\n" for line in lines(told))
    if arguments.svg is not None:
        try:
            Path(arguments.svg).write_text(told.svg)
        except OSError as error:
            raise ValueError(f"--svg {arguments.svg}: {error.strerror}") from None
    return 0
