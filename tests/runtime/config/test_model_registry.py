"""A model is one file: what is put into the package is found, and served, without an edit
elsewhere.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gguf_models import Kind, write_gguf
from tiny_models import make_tiny_model
from transformers import AutoModelForCausalLM

from piecework.runtime import models
from piecework.runtime.config.model_registry import find_models
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.llm import LLM
from piecework.runtime.loader.check import check_model

TOY = """
from dataclasses import dataclass

from ..config.model import ModelConfig
from .llama import LlamaForCausalLM

ARCHITECTURE = "ToyForCausalLM"
MODEL_TYPE = "llama"
GGUF_ARCHITECTURE = "mytoy"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyConfig(ModelConfig):
    attention_bias: bool = False
    mlp_bias: bool = False
    logit_scale: float = 3.0


class ToyForCausalLM(LlamaForCausalLM):
    config_class = ToyConfig

    def compute_logits(self, hidden):
        return super().compute_logits(hidden) * self.config.logit_scale
"""
PROMPT = [[(31 * i) % 500 for i in range(20)]]
PARAMS = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True, logprobs=1)


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[Path]:
    """A folder of weights whose config.json names a model that only a new file knows."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "toy.py").write_text(TOY)
    folder = make_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"architectures": ["ToyForCausalLM"], "logit_scale": 0.5})
    )
    models.__path__.append(str(tmp_path / "package"))
    yield folder
    models.__path__.remove(str(tmp_path / "package"))
    sys.modules.pop(f"{models.__name__}.toy", None)


def said_by(path: Path, tokenizer: Path) -> tuple[list[int], list[float]]:
    llm = LLM(
        str(path),
        dtype="float32",
        max_total_tokens=512,
        num_threads=1,
        tokenizer_path=str(tokenizer),
    )
    (done,) = llm.generate(PROMPT, PARAMS)
    assert done.logprobs is not None
    return done.token_ids, [entry.logprob for entry in done.logprobs]


def expected(folder: Path, tokens: list[int], scale: float) -> list[float]:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = reference(torch.tensor([PROMPT[0] + tokens])).logits[0, len(PROMPT[0]) - 1 : -1]
    said = (logits * scale).log_softmax(-1)
    return said.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def test_a_new_file_serves_a_folder(toy: Path) -> None:
    check_model(str(toy), context_length=None, weights=True)
    tokens, said = said_by(toy, toy)
    assert said == pytest.approx(expected(toy, tokens, 0.5), abs=1e-4)


def test_a_new_file_serves_a_gguf_file(toy: Path, tmp_path: Path) -> None:
    path = tmp_path / "toy.gguf"
    write_gguf(toy, path, "llama", Kind.F32)
    path.write_bytes(path.read_bytes().replace(b"llama", b"mytoy"))
    check_model(str(path), context_length=None, weights=True)
    tokens, said = said_by(path, toy)
    assert said == pytest.approx(expected(toy, tokens, 3.0), abs=1e-4)


def test_what_is_not_in_the_package_is_not_found() -> None:
    found = {names.architecture for names in find_models()}
    assert {"LlamaForCausalLM", "Gemma3ForConditionalGeneration"} < found
    assert "ToyForCausalLM" not in found


def test_finding_models_imports_no_torch() -> None:
    code = (
        "import sys\nfrom piecework.runtime.config.model_registry import find_models\n"
        "assert find_models() and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
