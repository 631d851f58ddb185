"""What activations of 8 bits cost in precision: `python -m piecework.lab.activations MODEL ...`.

Of each model (a folder or .gguf file, `=q4_0` behind it to quantise it on load) the log-probability
of GSM8K's worked answers, each behind its question: in float32, and on the CPU's own kernels with
activations of 16 and of 8 bits. A row a model, in nats a token: the mean in float32; by how much
the others differ from it, with the mean absolute difference of single tokens in parentheses; and
the difference of the two, with its standard error. Rows of 576 do not hold formats of blocks of
256 columns: `python -m piecework.lab.padded_gguf` makes them longer.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from ..bench.datasets import Question, load_gsm8k
from ..runtime.config.engine import CPU_ACTIVATIONS
from ..runtime.core.sampling_params import SamplingParams
from ..runtime.llm import LLM

_EXACT: dict[str, Any] = {"dtype": "float32", "attention_backend": "torch"}
_SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "max_total_tokens": 32_768,
    # Pieces have other last bits, and come in while answers are measured.
    "disable_piecewise_cuda_graph": True,
}


def answer_logprobs(llm: LLM, questions: Sequence[Question]) -> list[float]:
    """Of the tokens of each answer behind those of its question, one after another."""
    heads = [llm.tokenizer.encode(f"Question: {each.question}\nAnswer:") for each in questions]
    # Apart from its question, so that each answer has the same tokens in all of it.
    texts = [
        head + llm.tokenizer.encode(f" {each.answer}")
        for head, each in zip(heads, questions, strict=True)
    ]
    told = llm.generate(texts, SamplingParams(max_new_tokens=0, prompt_logprobs=0))
    return [
        token.logprob
        for head, one in zip(heads, told, strict=True)
        for token in (one.prompt_logprobs or [])[len(head) :]
        if token is not None
    ]


def measure(model: str, questions: Sequence[Question]) -> str:
    """The row of one model."""
    path, _, kind = model.partition("=")
    settings = _SETTINGS | ({"quantization": kind} if kind else {})
    exact = answer_logprobs(LLM(path, **settings, **_EXACT), questions)
    bf16, int8 = (
        _differences(answer_logprobs(LLM(path, **settings, cpu_activations=each), questions), exact)
        for each in CPU_ACTIVATIONS[1:]
    )
    cells = [
        f"{statistics.fmean(each):+.4f} ({statistics.fmean(map(abs, each)):.4f})"
        for each in (bf16, int8)
    ]
    apart = _differences(int8, bf16)
    error = statistics.stdev(apart) / math.sqrt(len(apart))
    cells.append(f"{statistics.fmean(apart):+.4f} ± {error:.4f}")
    return _row(model, f"{statistics.fmean(exact):.4f}", *cells)


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
    arguments = parser.parse_args(argv)
    questions = load_gsm8k(arguments.data_path)[: arguments.answers]
    print(_row("model", "float32", *CPU_ACTIVATIONS[1:], "int8 less bf16"))
    print(_row(*["---"] * 5))
    for model in arguments.models:
        print(measure(model, questions), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
