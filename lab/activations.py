"""What activations of 8 bits cost in precision: `python -m piecework.lab.activations MODEL ...`.

Of each model (a folder or .gguf file, `=q4_0` behind it to quantise it on load) the log-probability
of GSM8K's worked answers, each behind its question: in float32, and on the CPU's own kernels with
activations of 16 and of 8 bits. A row a model, in nats a token: the mean in float32; by how much
the others differ from it, with the mean absolute difference of single tokens in parentheses; and
the difference of the two, with its standard error. With `--llama-cpp`, a folder of llama.cpp's
libraries, the rows of .gguf files end with llama.cpp's own log-probabilities of the same tokens.
Rows of 576 do not hold formats of blocks of 256 columns: `python -m piecework.lab.padded_gguf`
makes them longer.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from ..bench.datasets import Question, load_gsm8k
from ..runtime.config.engine import CPU_ACTIVATIONS
from ..runtime.core.sampling_params import SamplingParams
from ..runtime.files.resolve import find_model
from ..runtime.llm import LLM
from ..runtime.tokenizer.tokenizer import Tokenizer
from .llama_cpp import LlamaCpp

_EXACT: dict[str, Any] = {"dtype": "float32", "attention_backend": "torch"}
_SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "max_total_tokens": 32_768,
    # Pieces have other last bits, and come in while answers are measured.
    "disable_piecewise_cuda_graph": True,
}


@dataclasses.dataclass
class Answers:
    """Worked answers behind their questions, in a model's tokens."""

    texts: list[list[int]]
    begins: list[int]  # where each answer begins in its text

    @classmethod
    def of(cls, tokenizer: Tokenizer, questions: Sequence[Question]) -> Answers:
        heads = [tokenizer.encode(f"Question: {each.question}\nAnswer:") for each in questions]
        # Encoded apart from its question, an answer has the same tokens behind any question.
        texts = [
            head + tokenizer.encode(f" {each.answer}")
            for head, each in zip(heads, questions, strict=True)
        ]
        return cls(texts, [len(head) for head in heads])

    def logprobs(self, llm: LLM) -> list[float]:
        """Return those of the answers' tokens, one answer after another."""
        told = llm.generate(self.texts, SamplingParams(max_new_tokens=0, prompt_logprobs=0))
        return [
            token.logprob
            for begin, one in zip(self.begins, told, strict=True)
            for token in (one.prompt_logprobs or [])[begin:]
            if token is not None
        ]

    def peer_logprobs(self, peer: LlamaCpp, path: str) -> list[float]:
        """Return llama.cpp's, as `logprobs` does."""
        told = peer.logprobs(path, self.texts)
        return [
            each for begin, one in zip(self.begins, told, strict=True) for each in one[begin - 1 :]
        ]


def measure(model: str, questions: Sequence[Question], peer: LlamaCpp | None = None) -> str:
    """Return the row of one model."""
    path, _, kind = model.partition("=")
    settings = _SETTINGS | ({"quantization": kind} if kind else {})
    llm = LLM(path, **settings, **_EXACT)
    answers = Answers.of(llm.tokenizer, questions)
    exact = answers.logprobs(llm)
    bf16, int8 = (
        _differences(answers.logprobs(LLM(path, **settings, cpu_activations=each)), exact)
        for each in CPU_ACTIVATIONS[1:]
    )
    apart = _differences(int8, bf16)
    error = statistics.stdev(apart) / math.sqrt(len(apart))
    cells = [_cell(bf16), _cell(int8), f"{statistics.fmean(apart):+.4f} ± {error:.4f}"]
    if peer:
        file = str(find_model(path))
        is_same = not kind and file.endswith(".gguf")
        cells.append(
            _cell(_differences(answers.peer_logprobs(peer, file), exact)) if is_same else ""
        )
    return _row(model, f"{statistics.fmean(exact):.4f}", *cells)


def _cell(differences: Sequence[float]) -> str:
    return f"{statistics.fmean(differences):+.4f} ({statistics.fmean(map(abs, differences)):.4f})"


def _differences(found: Sequence[float], exact: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(found, exact, strict=True)]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.activations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("models", nargs="+", metavar="MODEL[=QUANTIZATION]")
    parser.add_argument("--data-path", metavar="FILE", help="GSM8K's questions, JSONL")
    parser.add_argument("--answers", type=int, default=24, metavar="N", help="default: 24")
    parser.add_argument("--llama-cpp", metavar="FOLDER", help="llama.cpp's libraries")
    arguments = parser.parse_args(argv)
    questions = load_gsm8k(arguments.data_path)[: arguments.answers]
    peer = LlamaCpp(arguments.llama_cpp) if arguments.llama_cpp else None
    heads = ["model", "float32", *CPU_ACTIVATIONS[1:], "int8 less bf16"]
    heads += ["llama.cpp"] if peer else []
    print(_row(*heads))
    print(_row(*["---"] * len(heads)))
    for model in arguments.models:
        print(measure(model, questions, peer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
