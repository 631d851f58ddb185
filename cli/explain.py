"""`piecework explain`: what becomes of a model's forward, as tables, JSON and a picture; no server is started."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from ..runtime.graphs.explain import GraphError, explain, lengths_of_file, lengths_of_prompts
from ..runtime.graphs.explain_text import lines
from .flags import engine_config, report

EXIT_FAILED = 1


def run(arguments: argparse.Namespace, prompts: Sequence[str] | None) -> int:
    """Exit code 0; 1 where the model cannot run in pieces. `prompts`: of the data set that was asked for."""
    config = engine_config(arguments)
    if arguments.svg is not None and not Path(arguments.svg).absolute().parent.is_dir():
        raise ValueError(f"--svg {arguments.svg}: there is no such folder")
    logging.basicConfig(format="%(levelname)s: %(message)s")
    lengths = None
    if arguments.lengths is not None:
        lengths = lengths_of_file(arguments.lengths)
    elif prompts is not None:
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
