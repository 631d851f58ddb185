"""`piecework bench embeddings`."""

from __future__ import annotations

import argparse
from typing import Any

from ...runtime.config.engine import DTYPES
from .flags import add_flag, add_json, add_measurement, given, positive

_TEXT = """\
Measure how many texts per second become vectors, tokenised and computed as one batch in this
process, and compare with sentence-transformers, which must be installed. The two alternate; the
fastest round of each counts.
"""
_EXAMPLES = """\
examples:
  %(prog)s /path/to/all-MiniLM-L6-v2
  %(prog)s /path/to/all-MiniLM-L6-v2 --batch-size 128 --words 100 --no-peer
"""


def add_parser(subparsers: Any) -> None:
    parser = add_measurement(
        subparsers,
        "embeddings",
        "texts per second of an embedder, compared with sentence-transformers; no server",
        _TEXT,
        _EXAMPLES,
        _run,
    )
    parser.add_model_argument()
    parser.add_argument(
        "--model-path", metavar="PATH", default=argparse.SUPPRESS, help="folder of an embedder"
    )
    add_flag(parser, "--dtype", "number format; default: auto, as stored", choices=DTYPES)
    add_flag(parser, "--batch-size N", "texts in a batch; default: 32", positive)
    add_flag(parser, "--words N", "maximum words of a text; default: 24", positive)
    add_flag(parser, "--rounds N", "batches of each program; default: 20", positive)
    add_flag(parser, "--num-threads N", "compute threads; default: one per core", positive)
    parser.add_argument(
        "--no-peer",
        dest="peer",
        action="store_false",
        help="do not compare with sentence-transformers",
    )
    add_json(parser)


def _run(arguments: argparse.Namespace) -> int:
    from ...bench.embeddings import EmbeddingsSettings, run
    from ...bench.report import Report

    chosen = {name: value for name, value in vars(arguments).items() if value is not None}
    return run(given(EmbeddingsSettings, argparse.Namespace(**chosen)), Report(arguments.json))
