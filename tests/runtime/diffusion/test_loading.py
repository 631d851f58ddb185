"""Folders that are not what they should be are told in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusion_pipelines import FAMILIES, Folder, load
from tiny_models import make_tiny_model

from piecework.lab.diffusion_tiny import Size, make_pipeline_folder
from piecework.runtime.diffusion.config import DiffusionConfig
from piecework.runtime.llm import LLM


def without_file(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def without_part(name: str) -> Callable[[Path], None]:
    return lambda folder: shutil.rmtree(folder / name)


def edit_index(**members: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "model_index.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | members))

    return edit


def spoil(folder: Path) -> None:
    file = folder / "text_encoder" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def deepen(folder: Path) -> None:
    """More blocks than the files have weights for."""
    file = folder / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_layers": 9}))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (without_file("model_index.json"), "has no model_index.json"),
        (without_part("transformer"), "lacks its transformer"),
        (without_part("tokenizer_2"), "lacks its tokenizer_2"),
        (without_part("scheduler"), "lacks its scheduler"),
        (without_file("vae/diffusion_pytorch_model.safetensors"), "lacks the weights of its vae"),
        (
            without_file("text_encoder_2/model.safetensors"),
            "lacks the weights of its text_encoder_2",
        ),
        (without_file("vae/config.json"), "lacks the configuration of its vae"),
        (edit_index(_class_name="NoSuchPipeline"), "needs NoSuchPipeline"),
        (edit_index(_class_name=3), "names no pipeline class"),
        (edit_index(transformer=[None, None]), "has no transformer"),
        (lambda folder: (folder / "model_index.json").write_text("{"), "is not valid JSON"),
        (spoil, "cannot be loaded"),
        (
            write("vae/diffusion_pytorch_model.safetensors", b"abc"),
            r"vae/diffusion_pytorch_model.safetensors cannot be read",
        ),
        (
            write("transformer/diffusion_pytorch_model.safetensors", b"\xff" * 100),
            r"transformer/.*safetensors cannot be read",
        ),
        (edit_index(vae=[]), "vae should name a library and a class"),
        (edit_index(vae=["diffusers"]), "vae should name a library and a class"),
        (
            edit_index(_class_name="FluxTransformer2DModel"),
            "names FluxTransformer2DModel, which is no pipeline",
        ),
        (edit_index(_class_name="utils"), "names utils, which is no pipeline"),
        (deepen, r"files of its transformer lack (single_)?transformer_blocks\."),
    ],
)
def test_a_damaged_folder_is_one_line(
    pipeline_folder: Folder, tmp_path: Path, change: Callable[[Path], None], text: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(pipeline_folder("flux"), folder)
    change(folder)
    with pytest.raises(ValueError, match=text) as raised:
        load(folder)
    assert "\n" not in str(raised.value)


def test_a_language_model_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds a language model.*piecework serve"):
        load(make_tiny_model(tmp_path / "llama"))


def test_llm_tells_a_pipeline_apart(pipeline_folder: Folder) -> None:
    with pytest.raises(ValueError, match=r"holds a diffusion pipeline.*piecework generate"):
        LLM(str(pipeline_folder("flux")))


def test_precisions(tmp_path: Path, pipeline_folder: Folder) -> None:
    """auto is what is stored; the VAE has its own."""
    stored = make_pipeline_folder(tmp_path / "bf16", "flux", dtype=torch.bfloat16)
    assert load(stored).dtype == "bfloat16"
    assert load(pipeline_folder("flux")).dtype == "float32"
    model = load(stored, dit_precision="fp32", vae_precision="fp16")
    assert model.dtype == "float32" and model.pipeline.vae.dtype == torch.float16
    assert model.pipeline.text_encoder.dtype == torch.float32


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_the_same_for_the_same_arguments(
    family: str, tmp_path: Path, pipeline_folder: Folder
) -> None:
    again = make_pipeline_folder(tmp_path / "again", family)
    first = pipeline_folder(family)
    names = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(again) for path in again.rglob("*") if path.is_file())
    for name in names:
        assert (first / name).read_bytes() == (again / name).read_bytes(), name
    assert sum((first / name).stat().st_size for name in names) < 4 * 2**20


def test_the_number_of_blocks_is_a_choice(tmp_path: Path) -> None:
    model = load(make_pipeline_folder(tmp_path / "wan", "wan", Size(blocks=5, heads=3, head_dim=8)))
    assert [len(transformer.blocks) for transformer in model.family.transformers().values()] == [
        5,
        5,
    ]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"warmup_steps": 0}, "--warmup-steps must be at least 1"),
        ({"warmup_mode": "maybe"}, "--warmup-mode must be one of"),
        ({"warmup": True, "warmup_mode": "off"}, "contradict each other"),
        ({"dit_precision": "fp4"}, "--dit-precision must be one of"),
        ({"max_batch_size": 0}, "--max-batch-size must be at least 1"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DiffusionConfig(**settings)  # type: ignore[arg-type]
