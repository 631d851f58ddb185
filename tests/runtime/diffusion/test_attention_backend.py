"""`--attention-backend` of diffusion models: diffusers' backends, tried before a request comes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models import attention_dispatch
from diffusion_pipelines import FAMILIES, Folder, load, pixels

from piecework.runtime.diffusion.model import DiffusionModel

ASKED: dict[str, Any] = {
    "prompt": "a fox",
    "width": 64,
    "height": 64,
    "num_inference_steps": 2,
    "num_frames": 1,
}


def backends_of(model: DiffusionModel) -> set[str | None]:
    """The backends of a model's attention layers; None is diffusers' default."""
    return {
        getattr(module.processor._attention_backend, "value", None)
        for part in model.family.transformers().values()
        for module in part.modules()
        if hasattr(module, "processor")
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_backend_computes_the_same(pipeline_folder: Folder, family: str) -> None:
    expected = pixels(load(pipeline_folder(family)), **ASKED)
    model = load(pipeline_folder(family), attention_backend="native_math", max_batch_size=1)
    assert backends_of(model) == {"_native_math"}
    assert np.abs(pixels(model, **ASKED) - expected).max() < 1e-3


def test_it_is_no_other_model_s(pipeline_folder: Folder) -> None:
    before, _ = attention_dispatch._AttentionBackendRegistry.get_active_backend()
    load(pipeline_folder("flux"), attention_backend="native_math")
    after, _ = attention_dispatch._AttentionBackendRegistry.get_active_backend()
    assert after == before


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        ("flash", r"cannot run transformer here \(.*flash-attn.*\): torch's attention"),
        ("sage", r"cannot run transformer here \(.*sageattention.*\): torch's attention"),
        ("native_cudnn", r"cannot run transformer here \(.*\): torch's attention"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="they may run here")
def test_one_that_does_not_run_here_is_replaced_by_torch_s(
    pipeline_folder: Folder, backend: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = pixels(load(pipeline_folder("flux")), **ASKED)
    model = load(pipeline_folder("flux"), attention_backend=backend)
    assert re.search(rf"--attention-backend {backend} {text}", caplog.text)
    assert np.array_equal(pixels(model, **ASKED), expected)


def test_one_that_takes_no_masks_is_replaced_where_prompts_are_padded(
    pipeline_folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = attention_dispatch.dispatch_attention_fn

    def no_masks(*arguments: Any, attn_mask: torch.Tensor | None = None, **named: Any) -> Any:
        if attn_mask is not None:
            raise ValueError("no masks")
        return plain(*arguments, **named)

    monkeypatch.setattr(attention_dispatch, "dispatch_attention_fn", no_masks)
    model = load(pipeline_folder("qwen-image"), attention_backend="native_math")
    assert re.search(r"no masks.*--max-batch-size 1 need no mask", caplog.text)
    assert backends_of(model) == {None}
    caplog.clear()
    load(pipeline_folder("qwen-image"), attention_backend="native_math", max_batch_size=1)
    load(pipeline_folder("flux"), attention_backend="native_math")
    assert "--attention-backend" not in caplog.text


def test_a_model_whose_attention_is_not_chosen_keeps_its_own(
    pixart: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(pixart, attention_backend="native_math")
    assert "PixArtTransformer2DModel does not let it be chosen" in caplog.text
