"""What activations of 8 bits cost in precision: `python -m piecework.bench.activations MODEL ...`.

Of each model (a folder or .gguf file, `=q4_0` behind it to quantise it on load) the log-probability
of GSM8K's worked answers, each behind its question: in float32, and on the CPU's own kernels with
activations of 16 and of 8 bits. A row a model, in nats a token; in parentheses the mean absolute
difference of single tokens from float32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from ..runtime.config import CPU_ACTIVATIONS
from ..runtime.llm import LLM
from ..runtime.sampling.params import SamplingParams
from .datasets import Question, load_gsm8k

_EXACT: dict[str, Any] = {"dtype": "float32", "attention_backend": "torch"}
_TOKENS = 32_768


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
    settings: dict[str, Any] = {"device": "cpu", "max_total_tokens": _TOKENS}
    quantized = settings | ({"quantization": kind} if kind else {})
    exact = answer_logprobs(LLM(path, **quantized, **_EXACT), questions)
    cells = [model, f"{_mean(exact):.4f}"]
    means = []
    for activations in CPU_ACTIVATIONS[1:]:
        found = answer_logprobs(LLM(path, **quantized, cpu_activations=activations), questions)
        apart = _mean([abs(a - b) for a, b in zip(found, exact, strict=True)])
        means.append(_mean(found))
        cells.append(f"{means[-1]:.4f} ({apart:.4f})")
    return _row(*cells, f"{means[1] - means[0]:+.4f}")


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.bench.activations",
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
