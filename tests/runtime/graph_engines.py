"""Engines with few graphs of small sizes, the answers that they must give, and an inbox that serves
them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.core.generation import GenerateRequest
from piecework.runtime.core.messages import Shutdown, StepOutput
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.engine.build import Engine, build_engine
from piecework.runtime.engine.loop import Loop
from piecework.runtime.engine.text import TextEngine
from piecework.runtime.llm import LLM, Completion
from piecework.runtime.process.ipc import decode, encode
from piecework.runtime.process.mailbox import Mailbox

SIZES = [4, 16, 33]
AROUND = [size + offset for size in SIZES for offset in (-1, 0, 1)]
PROMPTS = [[(17 * i + 3 * j) % 400 for j in range(length)] for i, length in enumerate(AROUND)]
PARAMS = SamplingParams(
    temperature=0.0, max_new_tokens=4, ignore_eos=True, logprobs=5, prompt_logprobs=0
)
LAYERS = 2


def settings(**others: Any) -> dict[str, Any]:
    return {
        "dtype": "float32",
        "max_total_tokens": 512,
        "context_length": 128,
        "num_threads": 1,
        # The number of its proposals depends on measured times.
        "speculative_algorithm": "none",
    } | others


def engine(path: Path, **others: Any) -> LLM:
    return LLM(str(path), **settings(**others))


def pieces(**others: Any) -> dict[str, Any]:
    sizes = ",".join(map(str, SIZES))
    flags = {
        "piecewise_cuda_graph": True,
        "piecewise_cuda_graph_compiler": "eager",
        "piecewise_cuda_graph_tokens": sizes,
    }
    return flags | {"cuda_graph_backend_decode": "disabled"} | others


def assert_same(ours: Completion, eager: Completion) -> None:
    assert ours.token_ids == eager.token_ids
    said, wanted = (
        [entry.logprob for entry in [*(c.prompt_logprobs or []), *c.logprobs] if entry is not None]
        for c in (ours, eager)
    )
    assert said == pytest.approx(wanted, abs=1e-4)


def check_answers(llm: LLM, expected: list[Completion]) -> None:
    for prompt, wanted in zip(PROMPTS, expected, strict=True):
        assert_same(llm.generate([prompt], PARAMS)[0], wanted)


def logits(llm: LLM, prompt: list[int]) -> torch.Tensor:
    """[len(prompt), vocabulary]: of every position, through the engine's own forward."""
    runner: Any = llm.core._runner
    forward, kept = runner.forward, []
    runner.forward = lambda batch: (kept.append(forward(batch).clone()), kept[-1])[1]
    try:
        llm.generate([prompt], SamplingParams(temperature=0.0, max_new_tokens=1))
    finally:
        runner.forward = forward
    (hidden,) = kept
    with torch.inference_mode():
        result: torch.Tensor = runner.compute_logits(hidden)
    return result


class Inbox:
    """The other end of an engine process: requests come at given looks into it, and Shutdown once
    all are answered.
    """

    def __init__(self, arrivals: list[tuple[int, list[int]]]) -> None:
        self._arrivals, self._looks = list(arrivals), 0
        self._due: list[Any] = []
        self._sent = 0
        self.tokens: dict[str, list[int]] = {}
        self._open = len(arrivals)
        self.startup_pending: Callable[[], bool] = lambda: False

    def serve(self, engine: Engine) -> dict[str, list[int]]:
        self.startup_pending = lambda: engine.startup.pending
        Loop(TextEngine(engine), Mailbox(cast("Any", self))).run()
        return self.tokens

    def poll(self, patience: int | None) -> bool:
        self._looks += 1
        while self._arrivals and self._arrivals[0][0] < self._looks:
            prompt, rid = self._arrivals.pop(0)[1], str(self._sent)
            self._due.append(
                GenerateRequest(
                    rid=rid, input_ids=prompt, params=PARAMS, arrival_time=float(self._looks)
                )
            )
            self._sent += 1
        if not self._open and not self.startup_pending():
            self._due.append(Shutdown())
            self._open = 1
        return bool(self._due)

    def receive(self) -> Any:
        return encode(self._due.pop(0))

    def send(self, frames: Any) -> bool:
        message = decode(frames)
        for output in message.outputs if isinstance(message, StepOutput) else []:
            self.tokens.setdefault(output.rid, []).extend(output.token_ids)
            self._open -= output.finish_reason is not None
        return True


def look_when_done(path: Path) -> int:
    """How many looks into the inbox it takes until all is captured."""
    config = EngineConfig(
        model_path=str(path),
        **settings(**pieces(cuda_graph_backend_decode="full", cuda_graph_bs="1,2")),
    )
    inbox = Inbox([])
    inbox.serve(build_engine(config, progress=False))
    return inbox._looks
