"""A text engine in the process of a test, fed with messages as its loop does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from piecework.runtime.core.control_messages import Control, Controlled
from piecework.runtime.core.generation import GenerateRequest
from piecework.runtime.core.messages import StepOutput
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.distributed.ranks import ALONE
from piecework.runtime.engine import text
from piecework.runtime.engine.text import TextEngine

PARAMS = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)


class Engine:
    """A text engine.

    Attributes:
        found: By request, its tokens so far and how many tokens of its prompt were cached.
        answers: The answers to control messages.
    """

    def __init__(self, model: Path, folder: Path | None, **settings: Any) -> None:
        defaults = {
            "model_path": str(model),
            "device": "cpu",
            "dtype": "float32",
            "max_total_tokens": 1024,
            "context_length": 256,
            "page_size": 8,
            "disable_cuda_graph": True,
            "num_threads": 1,
            "cpu_bind": "none",
            "speculative_algorithm": "none",
            "kv_disk": None if folder is None else f"{folder}:64M",
        }
        self.engine: TextEngine = text.build(defaults | settings, ALONE)
        self.numbers = 0
        self.found: dict[str, tuple[list[int], int]] = {}
        self.answers: list[Controlled] = []

    def add(self, prompt: Sequence[int], params: SamplingParams = PARAMS, **members: Any) -> str:
        rid, self.numbers = f"r{self.numbers}", self.numbers + 1
        message = GenerateRequest(rid=rid, input_ids=list(prompt), params=params, **members)
        assert not list(self.engine.handle(message))
        return rid

    def step(self) -> None:
        """Run a step. Record the tokens of requests, and the answers to control messages."""
        for message in self.engine.step():
            if isinstance(message, Controlled):
                self.answers.append(message)
            for output in message.outputs if isinstance(message, StepOutput) else ():
                assert output.error is None, output.error
                tokens = self.found.get(output.rid, ([], 0))[0] + output.token_ids
                self.found[output.rid] = tokens, output.cached_tokens
        self.engine._core.check()

    def run(self) -> dict[str, tuple[list[int], int]]:
        """Return the tokens of each request, and how many of its prompt were found."""
        while self.engine.work() is not None:
            self.step()
        return self.found

    def control(self, message: Control) -> Controlled:
        """Send a message and step until its answer."""
        assert not list(self.engine.handle(message))
        count = len(self.answers)
        while len(self.answers) == count:
            self.step()
        return self.answers[-1]

    def ask(self, prompt: Sequence[int], **members: Any) -> tuple[list[int], int]:
        rid = self.add(prompt, **members)
        return self.run()[rid]

    def end(self) -> None:
        self.engine.close()


def prompt_of(seed: int, length: int = 120) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, 300) for _ in range(length)]
