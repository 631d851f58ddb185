"""The files that the lab writes are a model of images and text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_vision import picture_file

from piecework.lab.vision_gguf import Shape, write
from piecework.runtime.core.images import ImageFile, Preprocess
from piecework.runtime.files.resolve import resolve_model_path
from piecework.runtime.multimodal.preprocess_process import Preprocessor
from piecework.runtime.multimodal.source import find_source
from piecework.runtime.multimodal.tower import load_tower


@pytest.mark.slow
def test_the_files_fit_one_another(tmp_path: Path) -> None:
    try:
        resolve_model_path("smollm2-135m")
    except ValueError as error:
        pytest.skip(str(error))
    shape = Shape(layers=1, hidden=64, width=64, heads=2, side=32, patch=8, scale=2, longest=64)
    write(tmp_path, shape)
    model = str(tmp_path / "model.gguf")
    source = find_source(model)
    assert source is not None
    tower = load_tower(source, torch.float32, torch.device("cpu"), None)
    asked = Preprocess(
        text="<image>What?", images=[ImageFile(data=picture_file(90, 60))], most_pixels=10**6
    )
    answer = Preprocessor(model).answer(asked)
    (image,) = answer.images
    pixels = torch.from_numpy(image.tensors["pixel_values"].array().copy())
    with torch.inference_mode():
        (rows,) = source.family.features(tower.model, {"pixel_values": pixels}, torch.float32)
    assert rows.flatten(0, -2).shape == (image.num_tokens, 576)
