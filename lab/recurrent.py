"""Measures models with a recurrent state beside transformers' code of the same:
`python -m piecework.lab.recurrent`.

Each model is a random one of a real one's shape, with fewer layers and tokens, in a folder that
both read. Measured are a prompt, to its first token, and decodes of one and of several requests,
taken in turn; each figure is the least of all rounds. `--graphs`: wait for compiled pieces first.
`--file`: measures what is in a .gguf file, alone. `--processor-time`: that of all threads, where
others work on the machine too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..runtime.config.engine import EngineConfig
from ..runtime.core.generation import GenerateRequest
from ..runtime.core.sampling_params import SamplingParams
from ..runtime.engine.build import build_engine
from ..runtime.engine.core import EngineCore

_VOCABULARY = 8192
_HYBRID = ["linear_attention"] * 5 + ["full_attention"]
_SHAPES: dict[str, dict[str, Any]] = {
    "lfm2": {
        "intermediate_size": 6656,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "layer_types": ["conv", "conv", "full_attention", "conv"] * 2,
    },
    "granitemoehybrid": {
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "num_local_experts": 0,
        "shared_intermediate_size": 2048,
        "layer_types": _HYBRID * 2,
        "mamba_n_heads": 32,
        "mamba_d_state": 128,
        "attention_multiplier": 0.125,
    },
    "qwen3_5_text": {
        "intermediate_size": 3584,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
    },
}
"""LFM2-350M, Granite 4.0 H 350M and Qwen3.5 0.8B, by the names of transformers' configurations."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="piecework.lab.recurrent", description=__doc__)
    parser.add_argument("--models", default=",".join(_SHAPES), help="(default %(default)s)")
    for name, size, text in (
        ("prompt", 512, "tokens of a prompt"),
        ("decodes", 32, "tokens that each request is given"),
        ("requests", 8, "of the larger batch of decodes"),
        ("rounds", 3, "how often each is measured"),
        ("layers", 0, "of each model; 0: as many as it has here"),
        ("hidden", 1024, "hidden size"),
    ):
        parser.add_argument(f"--{name}", type=int, default=size, help=f"{text} (default {size})")
    parser.add_argument("--graphs", action="store_true", help="wait for compiled pieces")
    parser.add_argument("--file", help="a .gguf file, in the place of --models")
    parser.add_argument("--threads", type=int, default=None, help="(default: the engine's)")
    parser.add_argument("--processor-time", action="store_true", help="of all threads")
    given = parser.parse_args(arguments)
    names = given.models.split(",")
    if unknown := [name for name in names if name not in _SHAPES]:
        parser.error(f"--models takes {', '.join(_SHAPES)}, got {unknown[0]!r}")
    for name in ("prompt", "decodes", "requests", "rounds"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} must be more than 0, got {getattr(given, name)}")
    print("| model | | prompt, ms | a decode, ms | decodes of several, ms |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    if given.file is not None:
        for row in _rows(Path(given.file).stem, Path(given.file), None, given):
            print(row, flush=True)
        return 0
    for name in names:
        with tempfile.TemporaryDirectory(prefix="piecework-recurrent-") as folder:
            theirs = _make(name, Path(folder), given.layers, given.hidden)
            for row in _rows(name, Path(folder), theirs, given):
                print(row, flush=True)
    return 0


def _rows(name: str, path: Path, theirs: Any, given: argparse.Namespace) -> Iterator[str]:
    """`theirs`: transformers' model of what lies at the path; None: ours is measured alone."""
    config = EngineConfig(
        model_path=str(path),
        max_total_tokens=(given.requests + 1) * (given.prompt + given.decodes + 64),
        max_running_requests=given.requests,
        disable_radix_cache=True,
        startup="full" if given.graphs else "fast",
        num_threads=given.threads,
    )
    core = build_engine(config, progress=False).core
    measured: dict[str, Callable[[int], tuple[float, float]]] = {
        "piecework": lambda count: _ours(core, count, given),
    }
    if theirs is not None:
        measured["transformers"] = lambda count: _theirs(theirs, count, given)
    best = {who: [float("inf")] * 3 for who in measured}
    for _ in range(given.rounds):
        for who, run in measured.items():
            prompt, single = run(1)
            _, several = run(given.requests)
            best[who] = list(map(min, best[who], (prompt, single, several)))
    for who, seconds in best.items():
        cells = " | ".join(f"{each * 1e3:.1f}" for each in seconds)
        yield f"| {name} | {who} | {cells} |"


def _make(name: str, folder: Path, layers: int, hidden: int) -> Any:
    """A random model, which it writes to a folder; transformers' own, in bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = _SHAPES[name] | {"hidden_size": hidden}
    if layers:
        shape["num_hidden_layers"] = layers
        if "layer_types" in shape:
            shape["layer_types"] = shape["layer_types"][:layers]
    config = AutoConfig.for_model(
        name, vocab_size=_VOCABULARY, tie_word_embeddings=True, dtype="bfloat16", **shape
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    model.save_pretrained(folder)
    return model


def _prompts(count: int, given: argparse.Namespace) -> list[list[int]]:
    return [
        [(7 * at * at + 31 * row) % _VOCABULARY for at in range(given.prompt)]
        for row in range(count)
    ]


def _clock(given: argparse.Namespace) -> Callable[[], float]:
    return time.process_time if given.processor_time else time.perf_counter


def _ours(core: EngineCore, count: int, given: argparse.Namespace) -> tuple[float, float]:
    """Seconds until all prompts have their first token, and of a step of decodes."""
    clock = _clock(given)
    params = SamplingParams(temperature=0.0, max_new_tokens=given.decodes, ignore_eos=True)
    began = clock()
    for row, prompt in enumerate(_prompts(count, given)):
        core.add(GenerateRequest(rid=str(row), input_ids=prompt, params=params, arrival_time=0.0))
    tokens, ready = [0] * count, began
    while core.has_work:
        for output in core.step().outputs:
            tokens[int(output.rid)] += len(output.token_ids)
        if ready == began and min(tokens) > 0:
            ready, at_first = clock(), sum(tokens)
    decoded = (sum(tokens) - at_first) / count
    return ready - began, (clock() - ready) / max(decoded, 1.0)


@torch.inference_mode()
def _theirs(model: Any, count: int, given: argparse.Namespace) -> tuple[float, float]:
    """The same by transformers."""
    clock = _clock(given)
    began = clock()
    done = model(torch.tensor(_prompts(count, given)), use_cache=True)
    token = done.logits[:, -1:].argmax(-1)
    ready = clock()
    for _ in range(given.decodes - 1):
        done = model(token, past_key_values=done.past_key_values, use_cache=True)
        token = done.logits[:, -1:].argmax(-1)
    return ready - began, (clock() - ready) / max(given.decodes - 1, 1)


if __name__ == "__main__":
    sys.exit(main())
