"""OpenVINO GenAI's continuous batching behind OpenAI's completions, for comparisons alone:

    pip install openvino-genai aiohttp
    python lab/openvino_server.py FILE.gguf --threads 2 --port 8000

The file stands alone, so that it runs in an environment of its own without this package. It takes
greedy requests with text or token ids, and answers when an answer is complete.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import threading
from typing import Any

import numpy as np
import openvino
import openvino_genai
from aiohttp import web


class Engine:
    """A pipeline, and the thread that runs its steps while there are requests."""

    def __init__(self, model: str, threads: int, cache_gib: int, batched: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_batched_tokens = cache_gib, batched
        scheduler.max_num_seqs, scheduler.enable_prefix_caching = 64, False
        properties = {"INFERENCE_NUM_THREADS": threads}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            model, scheduler, "CPU", properties
        )
        self.tokenizer = self.pipeline.get_tokenizer()
        self._numbers = itertools.count()
        self._arrived = threading.Condition()
        self._waiting: list[tuple[Any, Any, Any]] = []
        threading.Thread(target=self._run, daemon=True).start()

    def ids(self, prompt: str | list[int]) -> np.ndarray[Any, Any]:
        if isinstance(prompt, str):
            return np.array(self.tokenizer.encode(prompt).input_ids.data)
        return np.array([prompt], np.int64)

    async def generate(self, ids: np.ndarray[Any, Any], most: int) -> list[int]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = most, True, False
        done = asyncio.get_running_loop().create_future()
        with self._arrived:
            self._waiting.append((ids, config, done))
            self._arrived.notify()
        made: list[int] = await done
        return made

    def _run(self) -> None:
        running: list[tuple[Any, list[int], Any]] = []
        while True:
            with self._arrived:
                while not self._waiting and not running:
                    self._arrived.wait()
                arrived, self._waiting = self._waiting, []
            for ids, config, done in arrived:
                number = next(self._numbers)
                handle = self.pipeline.add_request(number, openvino.Tensor(ids), config)
                running.append((handle, [], done))
            self.pipeline.step()
            running = [each for each in running if not self._is_over(*each)]

    def _is_over(self, handle: Any, made: list[int], done: Any) -> bool:
        while handle.can_read():
            for output in handle.read().values():
                made += output.generated_ids
        if handle.get_status() == openvino_genai.GenerationStatus.RUNNING:
            return False
        done.get_loop().call_soon_threadsafe(done.set_result, made)
        return True


def application(engine: Engine) -> web.Application:
    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        ids = engine.ids(body["prompt"])
        made = await engine.generate(ids, body["max_tokens"])
        taken = ids.shape[1]
        usage = {
            "prompt_tokens": taken,
            "completion_tokens": len(made),
            "total_tokens": taken + len(made),
        }
        text = engine.tokenizer.decode(made)
        choice = {"index": 0, "text": text, "finish_reason": "length", "logprobs": None}
        return web.json_response({"id": "0", "choices": [choice], "usage": usage})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "openvino"}]})

    made = web.Application()
    made.add_routes([web.post("/v1/completions", complete), web.get("/v1/models", models)])
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a GGUF file, or a folder that optimum-intel exported")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache-gib", type=int, default=2)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args()
    engine = Engine(given.model, given.threads, given.cache_gib, given.max_num_batched_tokens)
    web.run_app(application(engine), host="127.0.0.1", port=given.port, print=None)


if __name__ == "__main__":
    main()
