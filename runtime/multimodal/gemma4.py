"""Gemma 4: images of any size within a number of positions."""

from __future__ import annotations

from typing import Any, ClassVar

from .family import Arrays, ImageFamily

ARCHITECTURES = ["Gemma4ForConditionalGeneration"]
# The smallest and the largest number of positions for which the models are trained.
_LOW, _HIGH = 70, 1120


class Family(ImageFamily):
    """A position is a square of patches. In large models, positions of an image see each other in
    both directions within the window.
    """

    placeholder = "<|image|>"
    tensors: ClassVar = ("pixel_values", "image_position_ids")

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        text = config.get("text_config") or {}
        # The engine's model knows the token's id by config.json. Files hold no id: there, positions
        # of images get the id that stands for padding.
        self.sent_id = None if "image_token_id" in config else 0
        self.sees_ahead = text.get("use_bidirectional_attention") == "vision"

    def most_positions(self, settings: dict[str, Any]) -> int:
        count: int = settings.get("max_soft_tokens") or 0
        return count

    def pixel_shape(self) -> tuple[int, ...]:
        patch = self.vision.get("patch_size")
        return () if patch is None else (3 * patch**2,)

    def options(self, detail: str) -> dict[str, Any]:
        positions = {"low": _LOW, "high": _HIGH}.get(detail)
        return {} if positions is None else {"max_soft_tokens": positions}

    def process(self, processor: Any, image: Any, detail: str) -> Arrays:
        arrays = dict(super().process(processor, image, detail))
        # Patches of padding stand at -1. They are left out.
        patches = int((arrays["image_position_ids"][0, :, 0] >= 0).sum())
        for name in self.tensors:
            arrays[name] = arrays[name][:, :patches]
        return arrays

    def text(self, arrays: Arrays) -> str:
        positions = int(arrays["num_soft_tokens_per_image"][0])
        return f"<|image>{self.image_token * positions}<image|>"
