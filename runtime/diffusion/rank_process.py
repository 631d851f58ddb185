"""The other ranks of a diffusion engine: `python -m piecework.runtime.diffusion.rank_process`,
started by `start_ranks`. The job is the first line of standard input.

Each rank has the whole pipeline, executes rank 0's calls, and ends when rank 0 ends.
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
    """Start the other ranks of an engine, which begin to load. This process is rank 0.

    `when_lost`: see `distributed.processes.start_ranks`. Raise `ValueError` if the machine or the
    pipeline does not support the number of ranks.
    """
    if config.num_ranks == 1:
        return ALONE
    check_ranks(Path(find_model(config.model_path)), config.num_ranks)
    detect(config.device).check_ranks(config.num_ranks)
    return start_processes(
        __name__, asdict(config), config.num_ranks, when_lost, seconds=config.dist_timeout
    )


def follow(model: DiffusionModel, ranks: Follower) -> None:
    """Do the same with this rank's pipeline as rank 0 with its own, until rank 0 ends."""
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
    # Rank 0 decides when the ranks end, even if a whole process group is stopped.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    job = json.loads(read_line())
    config, rank = DiffusionConfig(**job["config"]), job["rank"]
    # Rank 0 logs what all ranks would log.
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
        return 1  # Rank 0 notices it too.
    except Exception as error:
        logger.critical("%s", error, exc_info=error)
    return 1


if __name__ == "__main__":
    # Skip the interpreter's exit, in which a group may wait for the other ranks.
    code = main()
    sys.stderr.flush()
    os._exit(code)
