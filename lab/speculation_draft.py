"""The measured speed-up by a draft model, beside that predicted from its acceptance and step times.

    python -m piecework.lab.speculation_draft FOLDER --tokenizer FOLDER

The command writes two models with random weights to FOLDER. The draft model is the first layers of
the model. The model's other layers add `--later` times as much as random layers do, so the drafts
are right more often if `--later` is smaller. Both models sample at temperature 1.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from ..runtime.core.messages import EngineStats
from ..runtime.core.sampling_params import SamplingParams
from ..runtime.llm import LLM

_PROMPT = list(range(100, 164))
_TOKENS = 96
_CONFIG: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.speculation_draft", description=__doc__
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", required=True, help="a folder with tokenizer.json")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--draft-layers", type=int, default=1)
    parser.add_argument("--later", type=float, default=0.3)
    parser.add_argument("--steps", type=int, default=4, help="most tokens of a draft")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    # Processor time, so that other processes of the machine do not count: one thread computes.
    time.perf_counter = time.process_time
    model, draft = _write(options)
    fixed: dict[str, Any] = {"num_threads": 1, "max_total_tokens": 2048}
    off = LLM(str(model), speculative_algorithm="none", **fixed)
    on = LLM(
        str(model),
        speculative_draft_model_path=str(draft),
        speculative_num_steps=options.steps,
        **fixed,
    )
    _run(on, 0)
    ratios, predicted = [], []
    for seed in range(1, 1 + options.rounds):
        before = on.core.stats()
        plain, fast = _run(off, seed), _run(on, seed)
        ratios.append(fast / plain)
        predicted.append(_predicted(on, before))
    stats = on.core.stats()
    print(f"accepted: {stats.accepted_tokens_total} of {stats.draft_tokens_total}")
    for name, values in (("measured", ratios), ("predicted", predicted)):
        print(f"{name}: {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")


def _write(options: argparse.Namespace) -> tuple[Path, Path]:
    """Write the model and the draft model, and return their folders."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    folders = options.folder / "model", options.folder / "draft"
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=options.layers, **_CONFIG))
    with torch.no_grad():
        for layer in model.model.layers[options.draft_layers :]:
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                linear.weight.mul_(options.later)
    draft = LlamaForCausalLM(LlamaConfig(num_hidden_layers=options.draft_layers, **_CONFIG))
    draft.load_state_dict(model.state_dict(), strict=False)
    for each, folder in zip((model, draft), folders, strict=True):
        each.bfloat16().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folders


def _run(llm: LLM, seed: int) -> float:
    """Return the tokens per second of one request."""
    params = SamplingParams(temperature=1.0, seed=seed, max_new_tokens=_TOKENS, ignore_eos=True)
    began = time.perf_counter()
    llm.generate([_PROMPT], params)
    return _TOKENS / (time.perf_counter() - began)


def _predicted(llm: LLM, before: EngineStats) -> float:
    """Return the speed-up that acceptance and the times of steps since `before` predict."""
    speculation, stats = llm.core._speculation, llm.core.stats()
    assert speculation is not None and speculation._drafter is not None
    steps = stats.steps_total - before.steps_total - 1
    proposed = (stats.draft_tokens_total - before.draft_tokens_total) / steps
    accepted = (stats.accepted_tokens_total - before.accepted_tokens_total) / steps
    costs, drafter = speculation.costs, speculation._drafter
    seconds = costs.verifying(1) + proposed * (costs.of_row + drafter.seconds(1))
    return (1 + accepted) * costs.plain(1) / seconds


if __name__ == "__main__":
    main()
