"""Finds the families of models that take images. Each is a file of `runtime/multimodal/` that
states its architectures in config.json, and has a class `Family`.

    ARCHITECTURES = ["Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"]

    class Family(ImageFamily): ...    # See `multimodal.family`.

If an architecture has several vision towers, the name of the architecture may be followed by the
`model_type` of the tower: "LlavaForConditionalGeneration/pixtral".

Vision towers of GGUF files are files of `runtime/multimodal/projectors/`, with `PROJECTOR_TYPES`.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from ..files.folder import read_json

_FAMILIES = "piecework.runtime.multimodal"  # The package whose files are families.
_PROJECTORS = f"{_FAMILIES}.projectors"
_NAMES = re.compile(r"^(?:ARCHITECTURES|PROJECTOR_TYPES) = \[([^\]]*)\]", re.MULTILINE)


def find_families() -> dict[str, str]:
    """Return modules by architecture. The files are read, not imported: see `model_registry`."""
    return dict(_named_in(tuple(import_module(_FAMILIES).__path__)))


def find_projectors() -> dict[str, str]:
    """Return the modules of vision towers in GGUF files by their `clip.projector_type`."""
    return dict(_named_in(tuple(import_module(_PROJECTORS).__path__)))


@cache
def _named_in(folders: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for path in sorted(path for folder in folders for path in Path(folder).glob("*.py")):
        if names := _NAMES.search(path.read_text(encoding="utf-8")):
            found.update(dict.fromkeys(re.findall(r'"([^"]+)"', names[1]), path.stem))
    return found


def family_of(model_path: str | Path) -> str | None:
    """Return the module of the family of a model folder, or None if the model takes no images.

    Imports nothing heavy. Raises `ValueError` if config.json cannot be read.
    """
    path = Path(model_path, "config.json")
    if not path.is_file():
        return None
    content = read_json(path)
    architectures = content.get("architectures") if isinstance(content, dict) else None
    if not isinstance(architectures, list) or "vision_config" not in content:
        return None
    families, architecture = find_families(), str(next(iter(architectures), ""))
    vision = content["vision_config"]
    kind = vision.get("model_type") if isinstance(vision, dict) else None
    return families.get(f"{architecture}/{kind}") or families.get(architecture)


def family_class(module: str) -> Any:
    """Return the class of a family, with the interface of `multimodal.family.ImageFamily`."""
    return import_module(f"{_FAMILIES}.{module}").Family
