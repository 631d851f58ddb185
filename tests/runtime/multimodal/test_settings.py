"""Settings of image processors and towers that make no image are refused at the start."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tiny_vision import FAMILIES, make_tiny_vision

from piecework.runtime.multimodal.preprocess_process import Preprocessor
from piecework.runtime.multimodal.source import find_source

HUGE, NONE, WORD = 10**9, 0, "large"
COLOURS: list[dict[str, Any]] = [
    {"image_mean": [0.5, 0.5]},
    {"image_mean": "grey"},
    {"image_std": [0.5, 0, 0.5]},
    {"image_std": [-1, 1, 1]},
    {"rescale_factor": 0},
    {"resample": 77},
    {"image_mean": [10**400] * 3},
    {"do_resize": "yes"},
]
# By family: members of the settings that no image can be made of, beside `COLOURS`.
_SIZE = [{"size": {"height": side, "width": side}} for side in (NONE, -32, WORD, HUGE, None)]
_EDGE = [{"size": {"longest_edge": side}} for side in (NONE, -32, WORD, HUGE, None)]
_QWEN = [
    *({"size": {"shortest_edge": low, "longest_edge": most}} for low, most in (
        (NONE, 1600), (64, NONE), (64, HUGE), (1600, 64), (WORD, 1600)
    )),
    {"patch_size": NONE}, {"patch_size": HUGE}, {"patch_size": 8}, {"merge_size": 3},
    {"temporal_patch_size": NONE}, {"max_pixels": -1}, {"min_pixels": HUGE},
    {"max_pixels": 10**400},
]  # fmt: skip
_TILES = [{"max_patches": count} for count in (NONE, -1, WORD, HUGE, 1.5)]
_PATCH = [{"patch_size": {"height": side, "width": side}} for side in (NONE, -1, WORD, HUGE)]
_GEMMA4: list[dict[str, Any]] = [
    {"patch_size": HUGE}, {"patch_size": 8}, {"pooling_kernel_size": NONE},
    {"max_soft_tokens": 71}, {"max_soft_tokens": NONE},
]  # fmt: skip
BAD: dict[str, list[dict[str, Any]]] = {
    "idefics3": [*_EDGE, *({"max_image_size": each["size"]} for each in _EDGE)],
    "llava": [*({"crop_size": each["size"]} for each in _SIZE), {"size": {"shortest_edge": HUGE}}],
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"), _QWEN),
    "gemma3": [*_SIZE, {"size": {"height": 64, "width": 64}}],
    "llama4": [*_SIZE, *_TILES],
    "gemma4": _GEMMA4,
    "gemma4-large": _GEMMA4,
    "gemma4-moe": _GEMMA4,
    "mistral3": [*_EDGE, *_PATCH],
    "pixtral": [*_EDGE, *_PATCH],
    "llava_onevision": [
        *_SIZE,
        *({"image_grid_pinpoints": grids} for grids in ([], [[32, 0]], [[32]], WORD, [[32, 64]])),
    ],
    "llava_next": [
        *({"crop_size": each["size"]} for each in _SIZE),
        *({"image_grid_pinpoints": grids} for grids in ([], [[32, 0]], [[32]], WORD, [[32, 64]])),
    ],
    "internvl": [*_SIZE, *_TILES, {"min_patches": 4}],
}  # fmt: skip
# By family: members of config.json; `vision_config` is added to that of the family.
BAD_CONFIGS: dict[str, list[dict[str, Any]]] = {
    "idefics3": [{"scale_factor": NONE}, {"vision_config": {"patch_size": NONE}}],
    "llava": [
        {"vision_feature_select_strategy": "some"},
        {"vision_feature_layer": 9},
        {"vision_config": {"patch_size": HUGE}},
    ],
    "qwen2_5_vl": [
        {"vision_config": {"spatial_merge_size": NONE}},
        {"vision_config": {"patch_size": [14, 14]}},
    ],
    "gemma3": [
        {"vision_config": {"image_size": [32, 32]}},
        {"mm_tokens_per_image": 15},
        {"mm_tokens_per_image": 2**30},
    ],
    "llama4": [{"vision_config": {"pixel_shuffle_ratio": 0}}],
    "gemma4": [{"vision_config": {"patch_size": WORD}}],
    "mistral3": [{"spatial_merge_size": NONE}],
    "pixtral": [{"vision_config": {"patch_size": HUGE}}],
    "llava_onevision": [
        {"vision_aspect_ratio": aspect} for aspect in ("anyres_max_0", "anyres", "square", 9)
    ],
    "internvl": [{"image_seq_length": 5}, {"downsample_ratio": 0}],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_settings_that_make_no_image_are_refused_in_one_line_with_a_remedy(
    family: str, tmp_path: Path
) -> None:
    folder = make_tiny_vision(tmp_path, family)
    file, config = folder / "preprocessor_config.json", folder / "config.json"
    settings, members = json.loads(file.read_text()), json.loads(config.read_text())
    Preprocessor(str(folder)).ready()
    for change in [*COLOURS, *BAD[family]]:
        file.write_text(json.dumps(settings | change))
        assert_refused(folder, change)
    file.write_text(json.dumps(settings))
    for change in BAD_CONFIGS.get(family, []):
        vision = members["vision_config"] | change.get("vision_config", {})
        config.write_text(json.dumps(members | change | {"vision_config": vision}))
        assert_refused(folder, change)
    # Forms that published files have elsewhere may be taken. They end in no other error.
    for name, value in product(
        ("image_size", "patch_size"), (10**400, [8, 8], {"height": 8}, None)
    ):
        vision = members["vision_config"] | {name: value}
        config.write_text(json.dumps(members | {"vision_config": vision}))
        with suppress(ValueError):
            find_source(folder)
            Preprocessor(str(folder)).ready()
    config.write_text(json.dumps(members))
    file.write_text(json.dumps(settings | {"image_processor_type": 7}))  # Llama 4's is our own.
    with suppress(ValueError):
        Preprocessor(str(folder)).ready()
    for content in ("[]", "7", '{"image_processor_type": "NoSuchProcessor"}'):
        file.write_text(content)
        assert_refused(folder, content)


def assert_refused(folder: Path, change: object) -> None:
    try:
        find_source(folder)
        Preprocessor(str(folder)).ready()
    except ValueError as error:
        told = str(error)
    else:
        raise AssertionError(f"{change} is not refused")
    assert str(folder) in told and "--disable-vision" in told and "\n" not in told, told
