"""What adapters (LoRA) add to the steps of an engine, in the time of one thread.

    OMP_NUM_THREADS=1 python -m piecework.lab.adapter_steps

It computes 32 prompts of 16 tokens and some tokens of each answer on one thread: by the base model,
with one adapter, and with eight that take turns. The processor's time of that thread hardly
depends on what else the machine does; the least time of each kind of step is printed.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from ..runtime.core.sampling_params import SamplingParams
from ..runtime.files.gguf_reader import FastGGUFReader
from ..runtime.files.resolve import resolve_model_path
from ..runtime.llm import LLM
from .adapter_load import write_adapter

_REQUESTS, _ADAPTERS, _PROMPT = 32, 8, 16


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.adapter_steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="smollm2-135m", help="a GGUF file or a built-in alias")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=9, help="of each answer")
    parser.add_argument("--rounds", type=int, default=2, help="after one that warms up")
    given = parser.parse_args()
    model = Path(resolve_model_path(given.model))
    with tempfile.TemporaryDirectory() as folder:
        paths = {f"a{number}": Path(folder) / f"a{number}.gguf" for number in range(_ADAPTERS)}
        for seed, path in enumerate(paths.values()):
            write_adapter(FastGGUFReader(model), path, given.rank, seed)
        llm = LLM(
            str(model),
            lora_modules=",".join(f"{name}={path}" for name, path in paths.items()),
            max_loras=_ADAPTERS,
            num_threads=1,
            max_total_tokens=16384,
            disable_radix_cache=True,
            speculative_algorithm="none",
        )
    _measure(llm, list(paths), given)
    return 0


def _measure(llm: LLM, names: list[str], given: argparse.Namespace) -> None:
    steps: list[tuple[bool, float]] = []
    runner: Any = llm.core._runner
    execute = runner.execute

    def timed(*arguments: Any) -> Any:
        began = time.thread_time()
        step = execute(*arguments)
        steps.append((step.has_prompts, time.thread_time() - began))
        return step

    runner.execute = timed
    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_new_tokens=given.tokens, ignore_eos=True)
    found: dict[str, tuple[list[float], list[float]]] = {}
    cases = {"base model": [""], "one adapter": names[:1], f"{len(names)} adapters": names}
    for turn in range(given.rounds + 1):
        for case, adapters in cases.items():
            steps.clear()
            prompts = [
                [rng.randrange(1000, 30_000) for _ in range(_PROMPT)] for _ in range(_REQUESTS)
            ]
            own = [adapters[number % len(adapters)] for number in range(_REQUESTS)]
            llm.generate(prompts, params, adapters=own)
            if turn:
                prompt, decode = found.setdefault(case, ([], []))
                for has_prompts, seconds in steps:
                    (prompt if has_prompts else decode).append(seconds)
    for case, (prompt, decode) in found.items():
        print(
            f"{case}: {1000 * min(prompt):.0f} ms for {_REQUESTS * _PROMPT} tokens of prompts, "
            f"{1000 * min(decode):.1f} ms for a decode of {_REQUESTS}"
        )


if __name__ == "__main__":
    raise SystemExit(main())
