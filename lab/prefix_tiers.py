"""What a disk below the KV cache is worth: the first token after a restart, agents that take turns,
and prompts that never repeat.

    python -m piecework.lab.prefix_tiers
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..runtime.core.generation import GenerateRequest
from ..runtime.core.messages import StepOutput
from ..runtime.core.sampling_params import SamplingParams
from ..runtime.distributed.ranks import ALONE
from ..runtime.engine import text

_SHORT = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
_TURN = SamplingParams(temperature=0.0, max_new_tokens=32, ignore_eos=True)


class Engine:
    """A text engine in this process."""

    def __init__(self, model: str, folder: Path | None, **settings: Any) -> None:
        disk = None if folder is None else f"{folder}:32G"
        # Compiling pieces would take the cores meanwhile.
        own = {"model_path": model, "kv_disk": disk, "piecewise_cuda_graph": False}
        self._engine = text.build({**own, **settings}, ALONE)
        self._numbers = 0

    def ask(self, prompts: Sequence[list[int]], params: SamplingParams) -> tuple[float, int]:
        """Return the seconds that the prompts took together, and their cached tokens."""
        began, cached = time.perf_counter(), dict[str, int]()
        for prompt in prompts:
            self._numbers += 1
            rid = str(self._numbers)
            cached[rid] = 0
            asked = GenerateRequest(rid=rid, input_ids=prompt, params=params)
            list(self._engine.handle(asked))
        unfinished = set(cached)
        while unfinished:
            for message in self._engine.step():
                for output in message.outputs if isinstance(message, StepOutput) else ():
                    assert output.error is None, output.error
                    cached[output.rid] = output.cached_tokens
                    if output.finish_reason is not None:
                        unfinished.discard(output.rid)
        return time.perf_counter() - began, sum(cached.values())

    def rest(self) -> None:
        """Write what an idle engine writes."""
        while self._engine.work() is not None:
            list(self._engine.step())

    def use_up_budget(self) -> None:
        """Spend the time that a new engine may take to save evicted blocks."""
        tiers = self._engine._tiers
        if tiers is not None and tiers.budget.may_save:
            tiers.budget.spend(2.0)

    def end(self) -> None:
        self._engine.close()


def _prompt(chance: random.Random, length: int) -> list[int]:
    return [chance.randrange(1000, 30_000) for _ in range(length)]


def _restart(given: argparse.Namespace, folder: Path) -> None:
    """Print the time to the first token of a known prompt, computed and after a restart."""
    chance, computed, loaded = random.Random(1), list[float](), list[float]()
    for _ in range(given.rounds):
        prompt = _prompt(chance, given.tokens)
        first = Engine(given.model_path, folder, context_length=given.tokens + 64)
        first.ask([_prompt(chance, 64)], _SHORT)
        computed.append(first.ask([prompt], _SHORT)[0])
        first.rest()
        first.end()
        second = Engine(given.model_path, folder, context_length=given.tokens + 64)
        second.ask([_prompt(chance, 64)], _SHORT)
        seconds, cached = second.ask([prompt], _SHORT)
        assert cached >= given.tokens - 16, f"only {cached} tokens were found"
        loaded.append(seconds)
        second.end()
    times = [a / b for a, b in zip(computed, loaded, strict=True)]
    print(
        f"restart, {given.tokens} tokens: {statistics.median(computed):.2f} s computed, "
        f"{statistics.median(loaded):.3f} s loaded, {statistics.median(times):.1f} times as fast"
    )


def _agents(given: argparse.Namespace, folder: Path) -> None:
    """Print the throughput of agents in turn, whose histories do not fit into the cache."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(given.rounds):
        for tiered in (True, False) if number % 2 else (False, True):
            chance = random.Random(number)
            histories = [_prompt(chance, given.history) for _ in range(given.agents)]
            engine = Engine(
                given.model_path,
                folder / str(number) if tiered else None,
                max_total_tokens=given.agents // 4 * given.history,
                context_length=given.history + 512,
            )
            for history in histories:
                engine.ask([history], _SHORT)
            taken = 0.0
            for _ in range(given.turns):
                for history in histories:
                    history += _prompt(chance, 32)
                    taken += engine.ask([history], _TURN)[0]
            seconds[tiered].append(taken)
            engine.end()
    ratios = [a / b for a, b in zip(seconds[False], seconds[True], strict=True)]
    print(
        f"{given.agents} agents of {given.history} tokens, memory for {given.agents // 4}: "
        f"{statistics.median(ratios):.2f} times the throughput of no tier"
    )


def _unique(given: argparse.Namespace, folder: Path) -> None:
    """Print the throughput of prompts that never repeat."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    engines = {
        tiered: Engine(
            given.model_path, folder if tiered else None, max_total_tokens=8192, context_length=4096
        )
        for tiered in (True, False)
    }
    chance = random.Random(7)
    for number in range(2 * given.rounds + 1):
        for tiered in (True, False) if number % 2 else (False, True):
            prompts = [_prompt(chance, 700) for _ in range(8)]
            taken, _ = engines[tiered].ask(prompts, _TURN)
            if number:
                seconds[tiered].append(taken)
            else:
                engines[tiered].use_up_budget()
    # Blocks are saved in some rounds only, which medians would leave out.
    ratio = sum(seconds[False]) / sum(seconds[True])
    print(f"prompts that never repeat: {ratio:.3f} times the throughput of no tier")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--agents", type=int, default=40)
    parser.add_argument("--history", type=int, default=4000)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--only", choices=("restart", "agents", "unique"))
    given = parser.parse_args()
    for name, measure in (("restart", _restart), ("agents", _agents), ("unique", _unique)):
        if given.only in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                measure(given, Path(folder))


if __name__ == "__main__":
    main()
