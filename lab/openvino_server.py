"""OpenVINO GenAI's continuous batching behind OpenAI's completions:

    pip install openvino-genai aiohttp
    python -m piecework.lab.openvino_server FILE.gguf --threads 2 --port 8000

Of this package it imports `completions.py` alone, so an environment of its own needs no torch.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import numpy as np
import openvino
import openvino_genai

from .completions import Call, Engine, serve


class OpenVino(Engine):
    """A pipeline with 2 GiB of cache and steps of 512 tokens, as is its default for chunks."""

    def __init__(self, model: str, threads: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_batched_tokens = 2, 512
        scheduler.max_num_seqs, scheduler.enable_prefix_caching = 64, False
        properties = {"INFERENCE_NUM_THREADS": threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            model, scheduler, "CPU", properties
        )
        self._tokenizer = self._pipeline.get_tokenizer()
        self._numbers = itertools.count()
        self._running: list[tuple[Any, list[int], Call]] = []
        super().__init__()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).input_ids.data[0].tolist()
        return ids

    def add(self, call: Call) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = call.most, True, False
        ids = openvino.Tensor(np.array([call.ids], np.int64))
        self._running.append(
            (self._pipeline.add_request(next(self._numbers), ids, config), [], call)
        )

    def step(self) -> bool:
        self._pipeline.step()
        self._running = [each for each in self._running if not self._is_over(*each)]
        return bool(self._running)

    @staticmethod
    def _is_over(handle: Any, made: list[int], call: Call) -> bool:
        while handle.can_read():
            for output in handle.read().values():
                made += output.generated_ids
        if handle.get_status() == openvino_genai.GenerationStatus.RUNNING:
            return False
        call.finish(made)
        return True


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.openvino_server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="a GGUF file, or a folder that optimum-intel exported")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args()
    serve(OpenVino(given.model, given.threads), given.port)


if __name__ == "__main__":
    main()
