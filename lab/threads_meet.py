"""What a decode costs where the system puts two threads of a step on one CPU: tokens a second of
one request, left alone and with the engine's threads brought together twenty times a second.

python -m piecework.lab.threads_meet --model-path smollm2-135m
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Sequence

from ..runtime.config.engine import EngineConfig
from ..runtime.engine.build import build_engine
from ..runtime.process.parent import ENVIRONMENT
from .ranks import LOADS, run_load

_SECONDS = 0.05
_LOAD = LOADS["single"]


def bring_together(end: threading.Event) -> None:
    """The two threads of this process that have computed most, on the first CPU, and then on any
    again.
    """
    cpus = os.sched_getaffinity(0)
    busiest = sorted(map(int, os.listdir("/proc/self/task")), key=_ticks)[-2:]
    while not end.wait(_SECONDS):
        for allowed in ({min(cpus)}, cpus):
            for thread in busiest:
                os.sched_setaffinity(thread, allowed)


def _ticks(thread: int) -> int:
    with open(f"/proc/self/task/{thread}/stat") as file:
        return sum(map(int, file.read().rpartition(") ")[2].split()[11:13]))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--model-path", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(argv)
    os.environ.update({**ENVIRONMENT, **os.environ})
    config = EngineConfig(model_path=given.model_path, max_total_tokens=8192)
    engine = build_engine(config, progress=False)
    run_load(engine, _LOAD, 0)
    alone, together = [], []
    for seed in range(1, given.rounds + 1):
        alone.append(run_load(engine, _LOAD, seed))
        end = threading.Event()
        meeting = threading.Thread(target=bring_together, args=(end,))
        meeting.start()
        together.append(run_load(engine, _LOAD, given.rounds + seed))
        end.set()
        meeting.join()
    engine.startup.stop()
    for name, seconds in (("left alone", alone), ("brought together", together)):
        print(f"{name}: {_LOAD.tokens / min(seconds):.0f} tokens/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
