"""LLaVA 1.6 (LLaVA-NeXT): the whole image and tiles of it, without the padding of the tiles."""

from __future__ import annotations

from typing import Any, ClassVar

from . import llava_onevision
from .family import Arrays, ImageFamily

ARCHITECTURES = ["LlavaNextForConditionalGeneration"]


class Family(llava_onevision.Family):
    """Every image has tiles, also in a prompt with several."""

    grids: ClassVar = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]

    def detail(self, asked: str, count: int) -> str:
        return asked

    def process(self, processor: Any, image: Any, detail: str) -> Arrays:
        arrays = dict(ImageFamily.process(self, processor, image, detail))
        if detail == "low":
            arrays["pixel_values"] = arrays["pixel_values"][:, :1]
        return arrays

    @property
    def of_tile(self) -> int:
        # The tower of CLIP has a position of the class before the patches.
        has_class = self.vision.get("model_type") == "clip_vision_model"
        return super().of_tile + has_class - (self._strategy == "default")

    @property
    def most_tiles(self) -> int | None:
        return None

    @property
    def _strategy(self) -> str:
        strategy: str = self.config.get("vision_feature_select_strategy", "default")
        return strategy

    def features(self, model: Any, part: Any, dtype: Any) -> list[Any]:
        import torch

        pixels = part["pixel_values"].to(dtype)
        stages = model.vision_tower(pixels, output_hidden_states=True).hidden_states
        layers = model.config.vision_feature_layer
        chosen = [stages[layer] for layer in (layers if isinstance(layers, list) else [layers])]
        found = torch.cat(chosen, dim=-1)
        return [model.multi_modal_projector(found[:, self._strategy == "default" :])[0]]

    def packing(self, model: Any) -> tuple[Any, ...]:
        return self._strategy, model.image_newline
