"""`--attention-backend` of diffusion models: diffusers' backends, tried before a request comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models import attention_dispatch
from diffusion_pipelines import FAMILIES, Folder, load, pixels

ASKED: dict[str, Any] = {
    "prompt": "a fox",
    "width": 64,
    "height": 64,
    "num_inference_steps": 2,
    "num_frames": 1,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_backend_computes_the_same(pipeline_folder: Folder, family: str) -> None:
    expected = pixels(load(pipeline_folder(family)), **ASKED)
    model = load(pipeline_folder(family), attention_backend="native_math", max_batch_size=1)
    chosen = {
        str(module.processor._attention_backend.value)
        for part in model.family.transformers().values()
        for module in part.modules()
        if hasattr(module, "processor")
    }
    assert chosen == {"_native_math"}
    assert np.abs(pixels(model, **ASKED) - expected).max() < 1e-3


def test_it_is_no_other_model_s(pipeline_folder: Folder) -> None:
    before, _ = attention_dispatch._AttentionBackendRegistry.get_active_backend()
    load(pipeline_folder("flux"), attention_backend="native_math")
    after, _ = attention_dispatch._AttentionBackendRegistry.get_active_backend()
    assert after == before


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        ("flash", r"cannot run transformer here .*flash-attn.*; leave it out"),
        ("native_cudnn", r"cannot run transformer here .*; leave it out"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="they may run here")
def test_one_that_does_not_run_here_is_one_line(
    pipeline_folder: Folder, backend: str, text: str
) -> None:
    with pytest.raises(ValueError, match=rf"--attention-backend {backend} {text}"):
        load(pipeline_folder("flux"), attention_backend=backend)


def test_one_that_takes_no_masks_is_refused_where_prompts_are_padded(
    pipeline_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = attention_dispatch.dispatch_attention_fn

    def no_masks(*arguments: Any, attn_mask: torch.Tensor | None = None, **named: Any) -> Any:
        if attn_mask is not None:
            raise ValueError("no masks")
        return plain(*arguments, **named)

    monkeypatch.setattr(attention_dispatch, "dispatch_attention_fn", no_masks)
    with pytest.raises(ValueError, match=r"no masks.*--max-batch-size 1 need no mask"):
        load(pipeline_folder("qwen-image"), attention_backend="native_math")
    load(pipeline_folder("qwen-image"), attention_backend="native_math", max_batch_size=1)
    load(pipeline_folder("flux"), attention_backend="native_math")


def test_a_model_whose_attention_is_not_chosen_is_refused(pixart: Path) -> None:
    with pytest.raises(ValueError, match="PixArtTransformer2DModel does not let it be chosen"):
        load(pixart, attention_backend="native_math")
