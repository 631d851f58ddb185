"""Adapters (LoRA) here and in llama.cpp, with the same GGUF files, which take turns:

    python -m piecework.lab.adapter_peers llama-build/bin --rounds 3

The first column is a server of Piecework. The second one is llama.cpp's library in one process,
without a server: a step computes one token of all sequences with the same adapter, as llama-server
does. Both have one thread. A row has the median processor time of an output token, prompts
included, and the median ratio of both in a round with the least and the highest one. Processor time
says more than the clock on a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import shlex
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import psutil

from ..bench.server_process import first_token, running_server
from ..bench.target import Target
from ..runtime.files.gguf_reader import FastGGUFReader
from ..runtime.files.resolve import resolve_model_path
from .adapter_load import write_adapter
from .llama_cpp import LlamaCpp
from .peers_in_turn import processor_time

_REQUESTS = 8
# The adapter of each request; None: the base model.
CASES: dict[str, list[int | None]] = {
    "one request, an adapter": [0],
    "8 requests, base model": [None] * _REQUESTS,
    "8 requests, one adapter": [0] * _REQUESTS,
    "8 requests, 8 adapters": list(range(_REQUESTS)),
}
_POINTER = ctypes.c_void_p


class Library:
    """llama.cpp with a model and its adapters."""

    def __init__(self, folder: str, model: Path, adapters: list[Path], threads: int) -> None:
        self._llama = llama = LlamaCpp(folder)
        loaded, self._context = llama.load(str(model), 4096, 2048, _REQUESTS, threads)
        self._vocabulary = llama.vocabulary(loaded)
        self._adapters = [
            llama.library.llama_adapter_lora_init(loaded, str(path).encode()) for path in adapters
        ]
        if not all(self._adapters):
            raise ValueError("llama.cpp cannot load an adapter")

    def generate(self, prompts: list[list[int]], adapters: list[int | None], length: int) -> int:
        """Return the number of output tokens."""
        self._llama.clear(self._context)
        groups = [
            [place for place, each in enumerate(adapters) if each == adapter]
            for adapter in dict.fromkeys(adapters)
        ]
        last = [0] * len(prompts)
        for step in range(length):
            for group in groups:
                self._choose(adapters[group[0]])
                rows, wanted = list[tuple[int, int, int]](), []
                for place in group:
                    prompt = prompts[place]
                    begin = len(prompt) + step - 1
                    new = [(last[place], begin, place)]
                    rows += new if step else [(id_, at, place) for at, id_ in enumerate(prompt)]
                    wanted.append(len(rows) - 1)
                found = self._llama.decode(self._context, self._vocabulary, rows, wanted)
                for place, token in zip(group, found, strict=True):
                    last[place] = token
        return length * len(prompts)

    def _choose(self, adapter: int | None) -> None:
        chosen = [] if adapter is None else [self._adapters[adapter]]
        pointers, scales = (_POINTER * 1)(*chosen), (ctypes.c_float * 1)(1.0)
        count = ctypes.c_size_t(len(chosen))
        self._llama.library.llama_set_adapters_lora(self._context, pointers, count, scales)


def _ask(target: Target, prompt: list[int], adapter: int | None, length: int) -> int:
    body = {
        "model": target.model if adapter is None else f"a{adapter}",
        "prompt": prompt,
        "max_tokens": length,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{target.base_url}/v1/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


def _times(
    target: Target,
    process: psutil.Process,
    library: Library,
    adapters: list[int | None],
    turn: int,
    given: argparse.Namespace,
) -> tuple[float, float]:
    """Return the processor seconds of an output token of both."""
    # The first token differs, so no prompt begins like another one.
    prompts = [
        [100 + 20 * turn + number, *range(1000, 999 + given.input_len)]
        for number in range(len(adapters))
    ]
    with ThreadPoolExecutor(len(prompts)) as pool:
        began = processor_time(process)
        lengths = [given.output_len] * len(prompts)
        own = sum(pool.map(_ask, [target] * len(prompts), prompts, adapters, lengths))
        spent = processor_time(process) - began
    began = time.process_time()
    other = library.generate(prompts, adapters, given.output_len)
    return spent / own, (time.process_time() - began) / other


def _measure(given: argparse.Namespace) -> None:
    model = Path(resolve_model_path(given.model))
    reader = FastGGUFReader(model)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        paths = [folder / f"a{number}.gguf" for number in range(_REQUESTS)]
        for seed, path in enumerate(paths):
            write_adapter(reader, path, given.rank, seed)
        modules = " ".join(f"a{number}={path}" for number, path in enumerate(paths))
        command = (
            f"{shlex.quote(sys.executable)} -m piecework serve {shlex.quote(str(model))} "
            "--log-level warning --num-threads 1 "
            f"--max-loras {_REQUESTS} --lora-modules {modules} --port {{port}}"
        )
        process, port = stack.enter_context(running_server("piecework", command))
        target = Target(base_url=f"http://127.0.0.1:{port}")
        target = asyncio.run(first_token("piecework", target, process))
        library, server = Library(given.folder, model, paths, 1), psutil.Process(process.pid)
        print("| load | piecework | llama.cpp | ratio |\n|---|---|---|---|")
        for case, adapters in CASES.items():
            times = [
                _times(target, server, library, adapters, turn, given)
                for turn in range(given.rounds + 1)
            ][1:]  # The first round warms up.
            ours, theirs = (median(each) for each in zip(*times, strict=True))
            ratios = sorted(other / own for own, other in times)
            print(
                f"| {case} | {1000 * ours:.1f} ms | {1000 * theirs:.1f} ms | {median(ratios):.2f} "
                f"({ratios[0]:.2f} to {ratios[-1]:.2f}) |",
                flush=True,
            )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.adapter_peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", help="of llama.cpp's libraries")
    parser.add_argument("--model", default="smollm2-135m", help="a GGUF file or a built-in alias")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3, help="after one that warms up")
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    _measure(parser.parse_args())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
