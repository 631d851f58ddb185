"""Adapters beside weights that stay packed in blocks of 4 bits."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf_models import Kind, write_gguf
from safetensors.torch import save_file
from tiny_adapters import logprobs_after, make_adapter, merged_model
from tiny_models import make_tiny_model

from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.llm import LLM, Completion

PROMPTS = [[(11 * row + 3 * place) % 500 for place in range(6 + row)] for row in range(4)]
NAMES = ["n0", "", "n1", "n0"]
_VALUES, _BYTES = 256, 144  # Of a block.


def blocks(array: npt.NDArray[np.float32], kind: Kind) -> npt.NDArray[np.uint8]:
    """Return random blocks of Q4_K for a matrix: the library only reads them. Minima are 7.5 times
    the scales, so that the mean is 0.
    """
    assert kind is Kind.Q4_K
    rows, columns = array.shape
    rng = np.random.default_rng(rows)
    made = rng.integers(0, 256, (rows, columns // _VALUES, _BYTES), np.uint8)
    made[..., :4] = np.array([4e-4, 3e-3], np.float16).view(np.uint8)
    made[..., 8:12] = made[..., 4:8]
    made[..., 12:16] = (made[..., 12:16] & 15) * 17
    return made.reshape(rows, -1)


def distance(model: torch.nn.Module, prompt: list[int], result: Completion) -> float:
    """Return how far the log-probabilities of an answer are from those of a model, at most."""
    wanted = logprobs_after(model, prompt, result.token_ids)
    wanted = wanted.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
    return float((wanted - torch.tensor([each.logprob for each in result.logprobs])).abs().max())


@pytest.mark.usefixtures("native_kernels")
def test_blocks_of_four_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_tiny_model(
        tmp_path / "base", hidden_size=256, intermediate_size=256, num_hidden_layers=2
    )
    adapters = [make_adapter(tmp_path / f"{n}", base, seed=n, rank=4 + 15 * n) for n in range(2)]
    monkeypatch.setattr(gguf.quants, "quantize", blocks)
    held = write_gguf(base, tmp_path / "model.gguf", "llama", Kind.Q4_K)
    save_file(held, base / "model.safetensors", {"format": "pt"})
    llm = LLM(
        str(tmp_path / "model.gguf"),
        lora_modules=",".join(f"n{n}={path}" for n, path in enumerate(adapters)),
        dtype="bfloat16",
        max_total_tokens=512,
        num_threads=1,
        tokenizer_path=str(base),
    )
    assert any("Q4_K" in line for line in llm.info.quantization), llm.info.quantization
    params = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True, logprobs=0)
    results = llm.generate(PROMPTS, params, adapters=NAMES)
    models = {"": merged_model(base, None)}
    models |= {f"n{n}": merged_model(base, path) for n, path in enumerate(adapters)}
    for name, prompt, result in zip(NAMES, PROMPTS, results, strict=True):
        far = {each: distance(model, prompt, result) for each, model in models.items()}
        assert far.pop(name) < 0.1 < min(far.values())
