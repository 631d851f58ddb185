"""Engines of several ranks against one process, and passes on against off, on this machine:

python -m piecework.lab.ranks --model-path smollm2-135m --engine one: --engine tp2:tp_size=2

Each engine runs in a process of its own, without a server, and waits while the others are measured:
they take turns within each round, so that whatever else the machine does meets all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from ..runtime.config.engine import EngineConfig
from ..runtime.core.generation import GenerateRequest
from ..runtime.core.sampling_params import SamplingParams
from ..runtime.distributed.processes import start_ranks
from ..runtime.engine.build import Engine, build_engine
from ..runtime.process.parent import ENVIRONMENT

_START_SECONDS = 600.0
_DECODED = 64


class Load(NamedTuple):
    """Requests that come at once; what counts are tokens that came out, or prompts' where nothing
    is decoded.
    """

    requests: int
    prompt: int
    decoded: int

    @property
    def tokens(self) -> int:
        return self.requests * (self.decoded - 1 or self.prompt)


LOADS = {
    "single": Load(1, 32, _DECODED),
    "batch8": Load(8, 32, _DECODED),
    "batch32": Load(32, 32, _DECODED),
    "prefill": Load(4, 512, 1),
    "prefill2k": Load(1, 2048, 1),
}


def run_load(
    engine: Engine, load: Load, seed: int, temperature: float = 0.0, top_p: float = 1.0
) -> float:
    """Seconds from the first token of all to the last, or from the beginning where each request
    gets one alone. Prompts are random.
    """
    draw = np.random.default_rng(seed)
    engine.core.flush_cache()
    params = SamplingParams(
        max_new_tokens=load.decoded, ignore_eos=True, temperature=temperature, top_p=top_p
    )
    began = time.perf_counter()
    for number in range(load.requests):
        ids = draw.integers(3, engine.runner.vocab_size, load.prompt).tolist()
        engine.core.add(GenerateRequest(rid=f"{seed} {number}", input_ids=ids, params=params))
    without = set(range(load.requests)) if load.decoded > 1 else set()
    while engine.core.has_work:
        for output in engine.core.step().outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
            if without and output.token_ids:
                without.discard(int(output.rid.split()[1]))
                if not without:
                    began = time.perf_counter()
    return time.perf_counter() - began


def _serve(settings: dict[str, Any], parent: Connection) -> None:
    """In a process of its own: an engine that runs the loads that it is told."""
    config = EngineConfig(**settings)
    engine = build_engine(config, progress=False, ranks=(ranks := start_ranks(config)))
    engine.startup.complete()
    parent.send(engine.runner.info().graphs.distinct_pieces)
    while (told := parent.recv()) is not None:
        name, seed = told
        parent.send(run_load(engine, LOADS[name], seed))
    engine.startup.stop()
    ranks.close()


class _Engine:
    def __init__(self, settings: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(settings, theirs))
        self._process.start()
        theirs.close()
        self._heard(_START_SECONDS)

    def seconds(self, name: str, seed: int) -> float:
        self._connection.send((name, seed))
        return self._heard(_START_SECONDS)

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join(30)

    def _heard(self, seconds: float) -> float:
        if not self._connection.poll(seconds):
            raise ValueError(f"an engine says nothing for {seconds:g} s")
        try:
            heard: float = self._connection.recv()
        except EOFError:
            raise ValueError("an engine has ended; its error stands above") from None
        return heard


def measure(
    engines: dict[str, dict[str, Any]], loads: Sequence[str], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round by load and engine. Raises `ValueError` where one does not start."""
    running: dict[str, _Engine] = {}
    # As in a server.
    os.environ.update({**ENVIRONMENT, **os.environ})
    try:
        for name, settings in engines.items():
            running[name] = _Engine(settings)
        found: dict[str, dict[str, list[float]]] = {}
        for load in loads:
            for engine in running.values():
                engine.seconds(load, 0)
            found[load] = {name: [] for name in running}
            for number in range(1, rounds + 1):
                for name, engine in running.items():
                    found[load][name].append(engine.seconds(load, number))
        return found
    finally:
        for engine in running.values():
            engine.end()


def table(found: dict[str, dict[str, list[float]]]) -> Iterator[str]:
    """As Markdown: tokens a second of the best round, and how many times the first engine's; behind
    it the median of the rounds' own ratios.
    """
    names = list(next(iter(found.values())))
    yield "| tokens/s | " + " | ".join([names[0], *(f"{name} | " for name in names[1:])]) + " |"
    yield "|---" * (2 * len(names)) + "|"
    for load, seconds in found.items():
        first = seconds[names[0]]
        cells = [load, f"{LOADS[load].tokens / min(first):,.1f}"]
        for name in names[1:]:
            paired = statistics.median(
                one / other for one, other in zip(first, seconds[name], strict=True)
            )
            best = min(seconds[name])
            cells.append(f"{LOADS[load].tokens / best:,.1f}")
            cells.append(f"{min(first) / best:.2f}x ({paired:.2f}x)")
        yield "| " + " | ".join(cells) + " |"


def _engine(text: str) -> tuple[str, dict[str, Any]]:
    """NAME:FIELD=VALUE;FIELD=VALUE of `EngineConfig`."""
    name, _, rest = text.partition(":")
    known, settings = {each.name for each in fields(EngineConfig)}, {}
    for pair in filter(None, rest.split(";")):
        key, _, value = pair.partition("=")
        if key not in known:
            raise argparse.ArgumentTypeError(f"{text!r}: there is no setting {key!r}")
        try:
            settings[key] = json.loads(value)
        except ValueError:
            settings[key] = value
    return name, settings


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model-path", default="smollm2-135m")
    parser.add_argument(
        "--engine",
        type=_engine,
        action="append",
        metavar="NAME:SETTING=VALUE;...",
        help="settings as LLM's; the first is what others are compared with; default: one process, "
        "and two ranks",
    )
    parser.add_argument("--dummy", action="store_true", help="random weights of config.json")
    parser.add_argument("--loads", default="single,batch8,batch32,prefill")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(argv)
    loads = given.loads.split(",")
    if unknown := [name for name in loads if name not in LOADS]:
        parser.error(f"--loads {unknown[0]}: take some of {','.join(LOADS)}")
    shared = {"model_path": given.model_path, "startup": "full", "disable_radix_cache": True}
    shared |= {"piecewise_cuda_graph": True, "max_total_tokens": 8192}
    if given.dummy:
        shared["load_format"] = "dummy"
    engines = given.engine or [("one", {}), ("tp2", {"tp_size": 2})]
    try:
        found = measure({name: shared | own for name, own in engines}, loads, given.rounds)
    except ValueError as error:
        parser.error(str(error))
    print("\n".join(table(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
