"""Vision towers of GGUF files: what follows an image is what follows it in the model's folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from mmproj_files import KINDS, quantize_tower, write_files
from tiny_vision import make_tiny_vision, picture_file
from vision_engines import Prompt, VisionEngine

from piecework.kernels.cpu.native.linear import native_linear
from piecework.runtime.layers.linear import Linear
from piecework.runtime.multimodal.preprocess_process import Preprocessor
from piecework.runtime.multimodal.projectors import projector
from piecework.runtime.multimodal.source import find_source
from piecework.runtime.multimodal.tower import load_tower

FILES = picture_file(48, 40), picture_file(30, 90, seed=1)
TEXT = "What is IMAGE here, and what is IMAGE?"


@pytest.mark.parametrize("family", KINDS)
def test_the_text_after_images_is_that_of_the_folder(family: str, tmp_path: Path) -> None:
    folder = make_tiny_vision(tmp_path / "folder", family, **KINDS[family].overrides)
    model = write_files(folder, family, tmp_path)
    prompt = Prompt(Preprocessor(str(folder)), TEXT, *FILES)
    known = VisionEngine(folder)
    tokens, logprobs, _ = known.answer(prompt)
    _, of_others, _ = known.answer(Prompt(Preprocessor(str(folder)), TEXT, *reversed(FILES)))
    known.end()
    tokenizer = without_images(folder, tmp_path / "tokenizer") if family == "llava" else folder
    preprocessor = Preprocessor(str(model), str(tokenizer))
    found = Prompt(preprocessor, TEXT, *FILES)
    assert [image.digest for image in found.images] == [image.digest for image in prompt.images]
    engine = VisionEngine(model, tokenizer_path=str(tokenizer))
    assert engine.answer(found)[:2] == (tokens, pytest.approx(logprobs, abs=1e-4))
    assert of_others != pytest.approx(logprobs, abs=1e-2)
    engine.end()


@pytest.mark.skipif(native_linear() is None, reason="no CPU kernels")
@pytest.mark.parametrize(("family", "others"), [("idefics3", 0), ("qwen2_5_vl", 6), ("pixtral", 4)])
def test_quantised_matrices_of_a_tower_stay_in_their_blocks(
    family: str, others: int, tmp_path: Path
) -> None:
    """`others` is the number of matrices that are joined to another one, as keys and values are to
    queries, or widened, because their rows are reordered.
    """
    folder = make_tiny_vision(tmp_path / "folder", family, **KINDS[family].overrides)
    model = write_files(folder, family, tmp_path)
    path = tmp_path / "mmproj-tiny-f32.gguf"
    quantized = quantize_tower(path)
    source = find_source(model, str(path))
    assert source is not None
    image = Prompt(Preprocessor(str(model), str(folder)), "IMAGE", FILES[0]).images[0]
    tensors = {name: torch.from_numpy(each.array().copy()) for name, each in image.tensors.items()}
    found = []
    for dtype, kernels in ((torch.float32, None), (torch.bfloat16, native_linear())):
        tower = load_tower(source, dtype, torch.device("cpu"), kernels)
        with torch.inference_mode():
            parts = [source.family.features(tower.model, part, dtype)[0]
                     for part in source.family.parts(tensors)]  # fmt: skip
        found.append(torch.cat([part.flatten(0, -2) for part in parts]).float())
    kinds = [each.method.kind for each in tower.modules() if isinstance(each, Linear)]
    assert kinds.count("Q8_0") == quantized - others > 0
    assert torch.cosine_similarity(*found).min() > 0.999


def without_images(folder: Path, copy: Path) -> Path:
    """Copy a tokenizer without the token of images, which converters of LLaVA leave out."""
    shutil.copytree(folder, copy)
    path = copy / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"] = [
        token for token in content["added_tokens"] if token["content"] != "<image>"
    ]
    path.write_text(json.dumps(content))
    return copy


def test_a_tower_is_found_beside_its_model_and_refused_beside_another(tmp_path: Path) -> None:
    folder = make_tiny_vision(tmp_path / "folder")
    model = write_files(folder, "idefics3", tmp_path)
    tower = tmp_path / "mmproj-tiny-f32.gguf"
    found = find_source(model)
    assert found is not None and found.path == tower
    other = tmp_path / "other"
    other.mkdir()
    qwen = write_files(make_tiny_vision(tmp_path / "qwen", "qwen2_vl"), "qwen2_vl", other)
    with pytest.raises(ValueError, match=r"does not fit .* kind llama, not qwen2vl; name the file"):
        find_source(qwen, str(tower))
    (other / "mmproj-tiny-f32.gguf").unlink()
    shutil.copy(tower, other)
    assert find_source(qwen) is None
    shutil.copy(tower, tmp_path / "mmproj-tiny-f16.gguf")
    with pytest.raises(ValueError, match="choose one with --mmproj FILE"):
        find_source(model)
    with pytest.raises(ValueError, match=r"holds no vision tower"):
        find_source(model, str(model))
    with pytest.raises(ValueError, match=r"is a folder, which has its own"):
        find_source(folder, str(tower))


@pytest.mark.parametrize(
    ("key", "value"),
    [("", 0), ("patch_size", 0), ("attention.head_count", 7), ("projector.scale_factor", 7)],
)
def test_a_damaged_tower_is_refused_by_its_name(tmp_path: Path, key: str, value: int) -> None:
    model = write_files(make_tiny_vision(tmp_path / "folder"), "idefics3", tmp_path)
    tower = tmp_path / "mmproj-tiny-f32.gguf"
    content = bytearray(tower.read_bytes())
    if key:
        field = GGUFReader(tower).fields[f"clip.vision.{key}"]
        place = field.offset + sum(part.nbytes for part in field.parts[: field.data[0]])
        content[place : place + 4] = value.to_bytes(4, "little")
    else:
        del content[len(content) // 2 :]
    tower.write_bytes(content)
    with pytest.raises(ValueError, match=tower.name):
        source = find_source(model, str(tower))
        assert source is not None
        load_tower(source, torch.float32, torch.device("cpu"), None, ())


@pytest.mark.parametrize("family", KINDS)
def test_metadata_that_make_no_tower_are_refused_by_the_files_name(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers that are zero or of another type, and a file without its first layer."""
    folder = make_tiny_vision(tmp_path / "folder", family, **KINDS[family].overrides)
    model = write_files(folder, family, tmp_path)
    read, make = projector.metadata, projector.Projector.__init__
    damaged: dict[str, Any] = {}
    monkeypatch.setattr(
        projector, "metadata", lambda reader, key, *default, **named: damaged.get(
            key, read(reader, key, *default, **named)
        ),
    )  # fmt: skip
    refused = 0
    for key in ("patch_size", "image_size", "attention.head_count", "projector.scale_factor"):
        for value in (0, "x", [1]):
            damaged = {f"clip.vision.{key}": value}
            try:
                source = find_source(model, str(tmp_path / "mmproj-tiny-f32.gguf"))
                assert source is not None
                source.config()
            except ValueError as error:
                refused += "mmproj-tiny-f32.gguf is damaged" in str(error)
    assert refused
    damaged = {}

    def without_first_layer(self: Any, *arguments: Any) -> None:
        make(self, *arguments)
        self.shapes = {name: shape for name, shape in self.shapes.items() if "blk.0." not in name}

    monkeypatch.setattr(projector.Projector, "__init__", without_first_layer)
    try:
        find_source(model, str(tmp_path / "mmproj-tiny-f32.gguf"))
    except ValueError as error:
        assert "mmproj-tiny-f32.gguf" in str(error)


def test_projectors_are_read_without_torch() -> None:
    code = (
        "import sys\n"
        "from importlib import import_module\n"
        "from piecework.runtime.config.multimodal_registry import find_projectors\n"
        "for name in set(find_projectors().values()):\n"
        "    import_module(f'piecework.runtime.multimodal.projectors.{name}')\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
