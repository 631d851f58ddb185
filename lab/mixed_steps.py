"""How long answers wait beside a long prompt, in the time of one thread.

    OMP_NUM_THREADS=1 python -m piecework.lab.mixed_steps

It computes a prompt alone and beside answers, with and without a goal for the time of such steps
(`--mixed-step-seconds`). The processor's time of the thread stands for the time that passes, so the
figures hardly depend on what else the machine does. `prompts_beside_answers` measures servers.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from statistics import median
from typing import NamedTuple

from ..runtime.core.generation import GenerateRequest
from ..runtime.core.sampling_params import SamplingParams
from ..runtime.engine.prompt_pace import PromptPace
from ..runtime.llm import LLM

_BEFORE = 30  # Decodes before the prompt arrives.


class Turn(NamedTuple):
    """Seconds of a prompt, of a decode before it, and of the steps that computed it."""

    prompt: float
    decode: float
    steps: list[float]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.mixed_steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=2000, help="of the prompt")
    parser.add_argument("--goals", type=float, nargs="+", default=[0.0, 0.2])
    parser.add_argument("--answers", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--rounds", type=int, default=2, help="after one that warms up")
    given = parser.parse_args()
    # The engine takes the times of steps by this clock.
    time.perf_counter = time.thread_time
    llm = LLM(
        given.model,
        num_threads=1,
        max_total_tokens=16384,
        disable_radix_cache=True,
        speculative_algorithm="none",
    )
    paces = {goal: PromptPace(goal, clock=time.thread_time) for goal in given.goals}
    found: dict[tuple[int, float], list[Turn]] = {}
    for number in range(given.rounds + 1):
        for answers, (goal, pace) in itertools.product(given.answers, paces.items()):
            llm.core._pace = pace
            turn = _turn(llm, answers, given.tokens)
            if number:
                found.setdefault((answers, goal), []).append(turn)
    for (answers, goal), turns in found.items():
        print(
            f"{answers} answers, goal {goal} s: prompt {median(turn.prompt for turn in turns):.2f} "
            f"s, decode {1000 * median(turn.decode for turn in turns):.0f} ms, "
            f"steps {1000 * median(median(turn.steps) for turn in turns):.0f} ms, "
            f"longest {1000 * median(max(turn.steps) for turn in turns):.0f} ms"
        )
    return 0


def _turn(llm: LLM, answers: int, tokens: int) -> Turn:
    core = llm.core
    names = [f"answer {number}" for number in range(answers)]
    for name in names:
        core.add(_request(name, 16, 1000))
    before, steps, ended = list[float](), list[float](), False
    for _ in range(_BEFORE if answers else 0):
        began = time.thread_time()
        core.step()
        before.append(time.thread_time() - began)
    core.add(_request("prompt", tokens, 1))
    while not ended:
        began = time.thread_time()
        ended = any(output.rid == "prompt" for output in core.step().outputs)
        steps.append(time.thread_time() - began)
    core.abort(names)
    while core.has_work:
        core.step()
    return Turn(sum(steps), median(before or [0.0]), steps)


def _request(name: str, length: int, tokens: int) -> GenerateRequest:
    return GenerateRequest(
        rid=name,
        input_ids=[random.randrange(1000, 30_000) for _ in range(length)],
        params=SamplingParams(temperature=0, max_new_tokens=tokens, ignore_eos=True),
        arrival_time=time.monotonic(),
    )


if __name__ == "__main__":
    raise SystemExit(main())
