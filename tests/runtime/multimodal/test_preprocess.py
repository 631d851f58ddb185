"""The process that decodes images: ids and tensors as transformers' processors, and refusals."""

from __future__ import annotations

import subprocess
import sys
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_vision import FAMILIES, make_tiny_vision, picture, picture_file

from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.core.images import ImageFile, ImageTensor, Preprocess
from piecework.runtime.multimodal.preprocess_process import Preprocessor
from piecework.runtime.multimodal.source import asked_source
from piecework.runtime.process.message_pipe import pack, read
from piecework.server.services import _image_arguments

COMMAND = [sys.executable, "-m", "piecework.runtime.multimodal.preprocess_process"]


def asked(text: str, *files: bytes, most_pixels: int = 10**6) -> Preprocess:
    return Preprocess(
        text=text, images=[ImageFile(data=file) for file in files], most_pixels=most_pixels
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision(tmp_path_factory.mktemp("idefics3"))


@pytest.fixture(scope="module")
def preprocessor(folder: Path) -> Preprocessor:
    return Preprocessor(str(folder))


def test_ids_and_tensors_are_those_of_transformers(
    folder: Path, preprocessor: Preprocessor
) -> None:
    from transformers import AutoTokenizer, Idefics3ImageProcessorPil, Idefics3Processor

    reference: Any = Idefics3Processor(
        Idefics3ImageProcessorPil.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
        image_seq_len=4,
    )
    text = "Compare <image> with <image>: which is wider?"
    pictures = [picture(48, 40), picture(30, 90, seed=1)]
    wanted = reference(text=text, images=[pictures], return_tensors="np")
    files = [picture_file(48, 40), picture_file(30, 90, seed=1)]
    found = preprocessor.answer(asked(text, *files))
    assert found.input_ids == wanted["input_ids"][0].tolist()
    tiles = [image.tensors["pixel_values"].array()[0] for image in found.images]
    assert np.array_equal(np.concatenate(tiles), wanted["pixel_values"][0])
    token = preprocessor._token_id
    for image in found.images:
        own = np.array(found.input_ids[image.start : image.end])
        assert np.flatnonzero(own == token).tolist() == image.rows
        assert image.num_tokens == 4 * image.tensors["pixel_values"].shape[1]


SIZES = [(48, 40), (30, 90)]


@pytest.mark.parametrize(("mean", "share"), [(0.5, 4), (0.48, 1)], ids=["levels", "whole"])
def test_messages_keep_every_bit_of_a_tensor(mean: float, share: int) -> None:
    colours = np.random.default_rng(0).integers(0, 256, (1, 3, 30, 20)).astype(np.float32)
    # The steps of transformers' processors.
    scaled = (colours * np.float32(1 / 255) - np.float32(mean)) / np.float32(0.5)
    others = [np.where(colours == 7, np.float32(other), scaled) for other in (np.nan, 0.0)]
    zeros = np.where(colours < 128, np.float32(0.0), np.float32(-0.0))
    for array in (scaled, *others, zeros):
        tensor = ImageTensor.of(array)
        assert tensor.array().tobytes() == array.tobytes()
    assert len(ImageTensor.of(scaled).data) == scaled.nbytes // share


def test_several_images_of_llava_onevision_have_a_tile_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import (
        AutoTokenizer,
        LlavaOnevisionImageProcessorPil,
        LlavaOnevisionProcessor,
    )

    folder = make_tiny_vision(tmp_path, "llava_onevision")
    kind: Any = LlavaOnevisionProcessor
    monkeypatch.setattr(kind, "check_argument_for_proper_class", lambda *_: None)
    reference = kind(
        LlavaOnevisionImageProcessorPil.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
        video_processor=None,
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_2",
    )
    preprocessor = Preprocessor(str(folder))
    for count in (1, 2):
        text = f"Compare {' with '.join(['<image>'] * count)} now"
        pictures = [picture(*size) for size in SIZES[:count]]
        found = preprocessor.answer(asked(text, *(picture_file(*size) for size in SIZES[:count])))
        wanted = reference(text=text, images=[pictures], return_tensors="np")
        assert found.input_ids == wanted["input_ids"][0].tolist()
        tiles = [image.tensors["pixel_values"].array() for image in found.images]
        assert np.array_equal(np.concatenate(tiles), wanted["pixel_values"])


def test_sizes_of_mistral_3_are_whole_numbers_of_merged_patches(tmp_path: Path) -> None:
    """Transformers' processor passes the side of a position to the image processor."""
    from transformers import PixtralImageProcessorPil

    folder = make_tiny_vision(tmp_path, "mistral3")
    files = [picture_file(*size) for size in SIZES]
    found = Preprocessor(str(folder)).answer(asked("[IMG] and [IMG]", *files))
    reference: Any = PixtralImageProcessorPil.from_pretrained(folder)
    for image, size in zip(found.images, SIZES, strict=True):
        wanted = reference(images=[picture(*size)], patch_size=8, return_tensors="np")
        for name, tensor in image.tensors.items():
            assert np.array_equal(tensor.array(), wanted[name])
        height, width = (side // 8 for side in wanted["image_sizes"][0])
        assert image.num_tokens == height * width


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_places_its_images(tmp_path: Path, family: str) -> None:
    preprocessor = Preprocessor(str(make_tiny_vision(tmp_path, family)))
    mark = preprocessor.family.placeholder
    answer = preprocessor.answer(
        asked(f"a {mark} b {mark} c", picture_file(), picture_file(90, 30))
    )
    assert answer.error is None
    count = sum(image.num_tokens for image in answer.images)
    assert count == answer.input_ids.count(preprocessor._token_id)
    first, second = answer.images
    assert first.end <= second.start and first.digest != second.digest
    assert preprocessor.ready().tokens_of_1024 > 0


def test_equal_pictures_have_equal_names_and_others_have_not(preprocessor: Preprocessor) -> None:
    def names(file: bytes) -> bytes:
        (image,) = preprocessor.answer(asked("<image>", file)).images
        assert (image.names() < 0).all() and len(image.names()) == image.length
        return image.names().tobytes()

    lossless = BytesIO()
    picture().save(lossless, "WEBP", lossless=True)
    assert names(picture_file()) == names(lossless.getvalue())
    assert names(picture_file()) != names(picture_file(seed=1))


def animated() -> bytes:
    file = BytesIO()
    picture().save(file, "GIF", save_all=True, append_images=[picture(seed=1)])
    return file.getvalue()


def test_the_first_frame_of_a_gif_is_the_image(preprocessor: Preprocessor) -> None:
    still = BytesIO()
    picture().save(still, "GIF")
    first, second = (
        preprocessor.answer(asked("<image>", file)).images[0]
        for file in (animated(), still.getvalue())
    )
    assert first.digest == second.digest


def bomb() -> bytes:
    """A file of a few bytes that says it has 60,000 x 60,000 pixels."""
    file = BytesIO()
    Image.new("1", (8, 8)).save(file, "PNG")
    size = (60_000).to_bytes(4, "big")
    content = bytearray(file.getvalue())
    content[16:24] = size + size
    content[29:33] = zlib.crc32(bytes(content[12:29])).to_bytes(4, "big")
    return bytes(content)


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (picture_file()[:200], "truncated"),
        (bomb(), "60000 x 60000 pixels, but at most 1000000"),
        (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "send PNG, JPEG, WebP or GIF"),
        (b"", "send PNG, JPEG, WebP or GIF"),
        (picture_file(kind="BMP"), "send PNG, JPEG, WebP or GIF"),
        (picture_file(1, 1), "each side needs at least"),
    ],
    ids=["truncated", "bomb", "svg", "empty", "bmp", "tiny"],
)
def test_a_bad_file_is_refused_by_its_index(
    preprocessor: Preprocessor, file: bytes, reason: str
) -> None:
    answer = preprocessor.answer(asked("<image><image>", picture_file(), file))
    assert answer.image == 1 and answer.error is not None and reason in answer.error
    assert not answer.input_ids and not answer.images


@pytest.mark.parametrize("text", ["no place", "<image><image>"])
def test_placeholders_in_the_text_of_a_client_are_refused(
    preprocessor: Preprocessor, text: str
) -> None:
    answer = preprocessor.answer(asked(text, picture_file()))
    assert answer.image is None and "placeholders (<image>)" in str(answer.error)


@pytest.mark.slow
def test_the_process_answers_until_its_input_closes(folder: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        ready = read(process.stdout)
        assert ready.error is None and ready.placeholder == "<image>"
        for file in (picture_file(), b"no image", picture_file()):
            process.stdin.write(pack(asked("<image>", file)))
            process.stdin.flush()
            answer = read(process.stdout)
            assert bool(answer.images) == (file == picture_file())
        process.stdin.close()
        assert process.wait(30) == 0


@pytest.mark.parametrize(
    ("flags", "takes"),
    [
        ({}, True),
        ({"disable_vision": True}, False),
        ({"load_format": "dummy"}, False),
        ({"model_impl": "transformers"}, False),
    ],
)
def test_flags_that_leave_images_out_are_known_to_both_processes(
    folder: Path, flags: dict[str, Any], takes: bool
) -> None:
    config = EngineConfig(model_path=str(folder), **flags)
    assert (asked_source(folder, config) is not None) == takes
    assert bool(_image_arguments(config, str(folder))) == takes


def test_a_text_model_ends_the_process_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    done = subprocess.run([*COMMAND, str(tmp_path)], capture_output=True, input=b"", check=False)
    ready = read(BytesIO(done.stdout))
    assert done.returncode == 2 and "takes no images" in str(ready.error)
