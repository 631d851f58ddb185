"""Images with a draft model and with adapters (LoRA)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model
from tiny_vision import make_tiny_vision, picture_file
from vision_engines import Prompt, VisionEngine

from piecework.runtime.multimodal.preprocess_process import Preprocessor

TEXT = "What is IMAGE here, and what is IMAGE?"
FILES = picture_file(48, 40), picture_file(30, 90, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def prompt(folder: Path) -> Prompt:
    return Prompt(Preprocessor(str(folder)), TEXT, *FILES)


def test_a_draft_model_changes_no_text(folder: Path, prompt: Prompt, tmp_path: Path) -> None:
    draft = make_tiny_model(tmp_path / "draft", num_hidden_layers=1, vocab_size=640)
    shutil.copy(folder / "tokenizer.json", draft)
    plain = VisionEngine(folder)
    wanted, _, _ = plain.answer(prompt)
    plain.end()
    engine = VisionEngine(
        folder, speculative_algorithm="auto", speculative_draft_model_path=str(draft)
    )
    assert engine.answer(prompt)[0] == wanted
    assert engine.engine._core.stats().draft_tokens_total
    engine.end()


def test_an_adapter_changes_the_text_after_an_image(
    folder: Path, prompt: Prompt, tmp_path: Path
) -> None:
    """It gives what weights give into which it is merged, and keeps the base model's apart."""
    merged = shutil.copytree(folder, tmp_path / "merged")
    weights, adapter = load_file(merged / "model.safetensors"), {}
    chance = torch.Generator().manual_seed(0)
    for name in [each for each in weights if "text" in each and each.endswith("v_proj.weight")]:
        rows, columns = weights[name].shape
        a, b = (torch.randn(*shape, generator=chance) / 4 for shape in ((2, columns), (rows, 2)))
        weights[name] = weights[name] + b @ a
        part = f"base_model.model.{name.removesuffix('.weight')}"
        adapter |= {f"{part}.lora_A.weight": a, f"{part}.lora_B.weight": b}
    save_file(weights, merged / "model.safetensors", {"format": "pt"})
    (tmp_path / "adapter").mkdir()
    save_file(adapter, tmp_path / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["v_proj"]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    engine = VisionEngine(folder, lora_modules=f"one={tmp_path / 'adapter'}")
    (info,) = engine.engine._runner.adapters.infos()
    base = engine.answer(prompt)[1]
    rid = engine.send(prompt, adapter=info.identity)
    tokens, cached = engine.run()[rid]
    engine.end()
    reference = VisionEngine(merged)
    assert reference.answer(prompt)[:2] == (tokens, pytest.approx(engine.logprobs[rid], abs=2e-3))
    assert engine.logprobs[rid] != pytest.approx(base, abs=1e-2) and not cached
    reference.end()
