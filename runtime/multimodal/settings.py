"""Checks what a model's files say of images, before anything is made of it.

    settings = read_settings(folder)              # of the image processor
    check_settings(family, settings)              # raises ValueError

The files come from strangers. Numbers of the wrong type, zeros and huge numbers would otherwise end
in errors of requests, in processes without memory, or in images of millions of positions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files.folder import read_json

if TYPE_CHECKING:
    from .family import ImageFamily

# Positions that an image may have. Published models have at most 16384.
MOST_POSITIONS = 2**16
_MOST_SIDE, _MOST_PATCH, _MOST_PIXELS = 2**13, 2**8, 2**26  # Pixels.
_MOST_TILES = 2**8
_LARGEST = 1e9
# A rule returns what is wanted if a value is not that, and "" if it is.
Rule = Callable[[Any], str]


def read_settings(folder: Path) -> Any:
    """Return the settings of the image processor of a folder, or None if it has none."""
    # The order of transformers.
    nested, own = folder / "processor_config.json", folder / "preprocessor_config.json"
    found = read_json(nested) if nested.is_file() else None
    if isinstance(found, dict) and "image_processor" in found:
        return found["image_processor"]
    return read_json(own) if own.is_file() else None


def check_settings(family: ImageFamily, settings: Any) -> None:
    """Raise `ValueError` that names the first setting by which no image can be made.

    `settings` are those of the image processor.
    """
    if not isinstance(settings, dict):
        raise ValueError("the settings of the image processor are no JSON object")
    sizes = _sizes(_MOST_PIXELS if family.sizes_are_pixels else _MOST_SIDE)
    _check(settings, {**_OF_PROCESSORS, "size": sizes})
    _check(family.config, _OF_MODELS)
    _check(family.vision, _OF_TOWERS, "vision_config.")
    _check_layers(family)
    family.check(settings)
    if (most := family.most_positions(settings)) > MOST_POSITIONS:
        raise ValueError(
            f"an image could have {most} positions, but at most {MOST_POSITIONS} are allowed"
        )


def _check_layers(family: ImageFamily) -> None:
    """Raise `ValueError` if the model reads layers that its vision tower does not have."""
    read, count = family.config.get("vision_feature_layer"), family.vision.get("num_hidden_layers")
    if read is None or not isinstance(count, int):
        return
    layer = _whole(-count - 1, count)
    for each in read if isinstance(read, list) and read else [read]:
        if wanted := layer(each):
            raise ValueError(f"vision_feature_layer is {read!r:.60}, but it must be {wanted}")


def _check(members: Mapping[str, Any], rules: Mapping[str, Rule], within: str = "") -> None:
    for name, rule in rules.items():
        value = members.get(name)
        if value is not None and (wanted := rule(value)):
            raise ValueError(f"{within}{name} is {value!r:.60}, but it must be {wanted}")


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) < _LARGEST  # Whole numbers of JSON may exceed any float.


def _whole(least: int, most: int) -> Rule:
    def rule(value: Any) -> str:
        fits = _is_number(value) and value == int(value) and least <= value <= most
        return "" if fits else f"a whole number from {least} to {most}"

    return rule


def _above_0(most: float) -> Rule:
    def rule(value: Any) -> str:
        return "" if _is_number(value) and 0 < value <= most else f"above 0 and at most {most:g}"

    return rule


def _colours(*, may_be_0: bool) -> Rule:
    """Return the rule for a number of all colours, or for one of each."""

    def rule(value: Any) -> str:
        numbers = value if isinstance(value, list) and len(value) in (1, 3) else [value]
        if all(_is_number(each) and (may_be_0 or each > 0) for each in numbers):
            return ""
        return "3 numbers" if may_be_0 else "3 numbers above 0"

    return rule


def _sizes(most: int) -> Rule:
    """Return the rule for a side, a list of sides, or an object of sides."""
    side = _whole(1, most)

    def rule(value: Any) -> str:
        if isinstance(value, dict):
            # Some tools write members that have no value.
            value = [each for each in value.values() if each is not None]
        sides = value if isinstance(value, list) else [value]
        return "" if sides and not any(map(side, sides)) else f"made of sides, each {side(None)}"

    return rule


def _flag(value: Any) -> str:
    return "" if isinstance(value, bool) else "true or false"


def _grids(value: Any) -> str:
    side = _whole(1, _MOST_SIDE)
    grids = value if isinstance(value, list) and value else [None]
    if all(isinstance(grid, list) and [*map(side, grid)] == ["", ""] for grid in grids):
        return ""
    return f"a list of [height, width], each {side(None)}"


def _aspect(value: Any) -> str:
    fits = isinstance(value, str) and re.fullmatch(r"anyres_max_[1-9]\d{0,3}", value)
    return "" if fits else "anyres_max_N with N above 0"


def _feature(value: Any) -> str:
    return "" if value in ("default", "full") else "default or full"


_PATCH, _SMALL = _sizes(_MOST_PATCH), _whole(1, 16)
_FLAGS = (
    *("do_resize", "do_rescale", "do_normalize", "do_center_crop", "do_pad", "do_convert_rgb"),
    *("do_image_splitting", "crop_to_patches", "resize_to_max_canvas", "do_pan_and_scan"),
)
_OF_PROCESSORS: dict[str, Rule] = {
    "image_mean": _colours(may_be_0=True),
    "image_std": _colours(may_be_0=False),
    "rescale_factor": _above_0(1),
    "resample": _whole(0, 5),
    "crop_size": _sizes(_MOST_SIDE),
    "max_image_size": _sizes(_MOST_SIDE),
    "patch_size": _PATCH,
    "temporal_patch_size": _SMALL,
    "merge_size": _SMALL,
    "pooling_kernel_size": _SMALL,
    "max_soft_tokens": _whole(1, MOST_POSITIONS),
    "min_pixels": _whole(1, _MOST_PIXELS),
    "max_pixels": _whole(1, _MOST_PIXELS),
    "min_patches": _whole(1, _MOST_TILES),
    "max_patches": _whole(1, _MOST_TILES),
    "image_grid_pinpoints": _grids,
    **dict.fromkeys(_FLAGS, _flag),
}
_OF_MODELS: dict[str, Rule] = {
    "scale_factor": _SMALL,
    "spatial_merge_size": _SMALL,
    "image_seq_length": _whole(1, MOST_POSITIONS),
    "mm_tokens_per_image": _whole(1, MOST_POSITIONS),
    "image_grid_pinpoints": _grids,
    "vision_aspect_ratio": _aspect,
    "vision_feature_select_strategy": _feature,
    "downsample_ratio": _above_0(1),
}
_OF_TOWERS: dict[str, Rule] = {
    "image_size": _sizes(_MOST_SIDE),
    "patch_size": _PATCH,
    "temporal_patch_size": _SMALL,
    "spatial_merge_size": _SMALL,
    "pooling_kernel_size": _SMALL,
    "pixel_shuffle_ratio": _above_0(1),
}
