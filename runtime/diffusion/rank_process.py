"""The ranks of a diffusion engine other than the first: `python -m
piecework.runtime.diffusion.rank_process`, started by `start_ranks`, their job as the first line of
their standard input.

Each has the whole pipeline, does what rank 0 tells it, and ends when rank 0 does.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...kernels.collectives import CollectiveError
from ...kernels.detect import detect
from ..core.image_params import DiffusionParams
from ..distributed.channel import Follower
from ..distributed.processes import EXIT_USER_ERROR, follower, start_processes
from ..distributed.ranks import ALONE, EngineEnded, RankEnded, Ranks
from ..files.resolve import find_model
from ..process.logs import set_up_logging
from ..process.parent import end_with_parent, read_line
from .clock import Clock
from .config import DiffusionConfig
from .model import DiffusionModel, check_ranks
from .scheduler import ImageScheduler

logger = logging.getLogger(__name__)


def start_ranks(config: DiffusionConfig, when_lost: Callable[[str], None] | None = None) -> Ranks:
    """The ranks of an engine, seen from rank 0, which this process is; the others begin to load.

    `when_lost`: as in `distributed.processes.start_ranks`. Raises `ValueError` for ranks that the
    machine or the pipeline cannot have.
    """
    if config.num_ranks == 1:
        return ALONE
    check_ranks(Path(find_model(config.model_path)), config.num_ranks)
    detect(config.device).check_ranks(config.num_ranks)
    return start_processes(
        __name__, asdict(config), config.num_ranks, when_lost, seconds=config.dist_timeout
    )


def follow(model: DiffusionModel, ranks: Follower) -> None:
    """Do with this rank's pipeline what rank 0 does with its own, until that ends."""
    scheduler = ImageScheduler(model)

    def generate(params: list[DiffusionParams]) -> None:
        model.generate(params, Clock(model.platform), lambda done, total: None)

    doing: dict[str, Callable[..., Any]] = {
        "generate": generate,
        "add": scheduler.add,
        "abort": scheduler.abort,
        "step": scheduler.step,
        "give_back_memory": model.give_back_memory,
    }
    while True:
        call, arguments = ranks.next_call()
        doing[call](*arguments)


def main() -> int:
    # Rank 0 decides when it ends, whoever stops a group of processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    job = json.loads(read_line())
    config, rank = DiffusionConfig(**job["config"]), job["rank"]
    # What all ranks would say, rank 0 says.
    set_up_logging("CRITICAL", rank=rank)
    end_with_parent()
    ranks = follower(job)
    try:
        try:
            model = DiffusionModel(config, ranks)
        except ValueError as error:
            ranks.fail(str(error))
            return EXIT_USER_ERROR
        follow(model, ranks)
    except (EngineEnded, RankEnded):
        return 0
    except CollectiveError:
        return 1  # Rank 0 finds it out, too.
    except Exception as error:
        logger.critical("%s", error, exc_info=error)
    return 1


if __name__ == "__main__":
    # Not through the interpreter's end, where a group may wait for the others.
    code = main()
    sys.stderr.flush()
    os._exit(code)
