"""llama.cpp's own library behind OpenAI's completions, where no llama-server is at hand that was
compiled for this CPU:

    npm pack @node-llama-cpp/linux-x64@3.21.1 && tar xzf node-llama-cpp-linux-x64-3.21.1.tgz
    python -m piecework.lab.llama_server package/bins/linux-x64 FILE.gguf --threads 2 --port 8000

The library of that package chooses its kernels by the CPU. Steps are those of llama-server: one
token of each running request, and up to 2,048 tokens of prompts.
"""

from __future__ import annotations

import argparse
import ctypes
from dataclasses import dataclass, field

from .completions import Call, Engine, serve
from .llama_cpp import LlamaCpp

_BATCH = 2048  # Tokens of a step, as llama-server has by default.
_POINTER = ctypes.c_void_p


@dataclass(slots=True)
class _Running:
    call: Call
    place: int  # Number of its sequence.
    given: int = 0  # Tokens of the prompt that the cache has.
    made: list[int] = field(default_factory=list)

    def next_tokens(self, most: int) -> list[int]:
        return self.made[-1:] or self.call.ids[self.given : self.given + most]


class Llama(Engine):
    """A context of `slots` sequences of `context` tokens each."""

    def __init__(self, folder: str, file: str, threads: int, slots: int, context: int) -> None:
        self._llama = llama = LlamaCpp(folder)
        self._library = llama.library
        model, self._context = llama.load(file, context * slots, _BATCH, slots, threads)
        self._vocabulary = llama.vocabulary(model)
        self._free = list(range(slots))
        self._waiting_calls: list[Call] = []
        self._running: list[_Running] = []
        super().__init__()

    def encode(self, text: str) -> list[int]:
        return [1] * max(1, len(text) // 4)  # Only the number matters.

    def add(self, call: Call) -> None:
        self._waiting_calls.append(call)

    def step(self) -> bool:
        while self._free and self._waiting_calls:
            self._running.append(_Running(self._waiting_calls.pop(0), self._free.pop()))
        parts: list[tuple[_Running, list[int]]] = []
        room = _BATCH
        # Requests that make tokens come first.
        for each in sorted(self._running, key=lambda each: not each.made):
            if tokens := each.next_tokens(room):
                parts.append((each, tokens))
                room -= len(tokens)
        self._decode(parts)
        memory = _POINTER(self._library.llama_get_memory(self._context))
        for each in [each for each in self._running if len(each.made) == each.call.most]:
            self._library.llama_memory_seq_rm(memory, each.place, -1, -1)
            self._free.append(each.place)
            self._running.remove(each)
            each.call.finish(each.made)
        return bool(self._running or self._waiting_calls)

    def _decode(self, parts: list[tuple[_Running, list[int]]]) -> None:
        """Compute the tokens of each request, and choose the next one where the prompt is done."""
        rows, chosen = list[tuple[int, int, int]](), []
        for each, tokens in parts:
            begin = each.given + max(0, len(each.made) - 1)
            rows += [(id_, begin + offset, each.place) for offset, id_ in enumerate(tokens)]
            if not each.made:
                each.given += len(tokens)
            if each.given == len(each.call.ids):
                chosen.append((each, len(rows) - 1))
        wanted = [row for _, row in chosen]
        found = self._llama.decode(self._context, self._vocabulary, rows, wanted)
        for (each, _), id_ in zip(chosen, found, strict=True):
            each.made.append(id_)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.llama_server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", help="of llama.cpp's libraries")
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--context", type=int, default=640, help="tokens of a slot")
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args()
    engine = Llama(given.folder, given.model, given.threads, given.slots, given.context)
    serve(engine, given.port)


if __name__ == "__main__":
    main()
