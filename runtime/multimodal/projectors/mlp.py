"""The vision tower of LLaVA 1.5 and 1.6."""

from __future__ import annotations

from typing import Any, ClassVar

from ...files.gguf_reader import FastGGUFReader, metadata
from .projector import Projector, Stored, vit_names

PROJECTOR_TYPES = ["mlp"]
_TOWER = "vision_tower"
_NEWLINES = ("model.image_newline", "v.image_newline")  # Names of different converters.


class OfFile(Projector):
    """CLIP, and a projector of two layers. A file of LLaVA 1.6 has sizes of grids of tiles, and a
    tensor that ends rows of tiles.
    """

    family = "llava"
    architecture = "LlavaForConditionalGeneration"
    model_type = "llava"
    text_type = "llama"
    text_kinds = ("llama",)
    output = ("mm.2.weight", 0)
    names: ClassVar = {
        **vit_names(_TOWER),
        "v.pre_ln": f"{_TOWER}.pre_layrnorm",
        "mm.0": "multi_modal_projector.linear_1",
        "mm.2": "multi_modal_projector.linear_2",
    }

    def __init__(self, reader: FastGGUFReader, text: FastGGUFReader) -> None:
        super().__init__(reader, text)
        sides: list[int] = self.get("image_grid_pinpoints", [])
        self._grids = [list(grid) for grid in zip(sides[::2], sides[1::2], strict=True)]
        if self._grids:
            self.family = self.model_type = "llava_next"
            self.architecture = "LlavaNextForConditionalGeneration"

    def why_unfit(self) -> str | None:
        if self._grids and not any(name in self.shapes for name in _NEWLINES):
            return f"it is a tower of LLaVA 1.6 without the tensor {_NEWLINES[0]}"
        return super().why_unfit()

    def config(self) -> dict[str, Any]:
        vision = {
            **self.vit(),
            "model_type": "clip_vision_model",
            "hidden_act": self.activation("quick_gelu"),
        }
        # Converters leave layers out that LLaVA does not read, so the last one is read.
        layers: list[int] = metadata(self.reader, "clip.vision.feature_layer", [-1])
        return {
            "vision_config": vision,
            "vision_feature_layer": layers[0] if len(layers) == 1 else layers,
            **self._tiles(),
        }

    def _tiles(self) -> dict[str, Any]:
        return {"image_grid_pinpoints": self._grids} if self._grids else {}

    def processor(self) -> dict[str, Any]:
        size: int = self.get("image_size")
        return {
            "image_processor_type": (
                "LlavaNextImageProcessor" if self._grids else "CLIPImageProcessor"
            ),
            **self._tiles(),
            "size": {"shortest_edge": size},
            "crop_size": {"height": size, "width": size},
            **self.colours(),
        }

    def change(self, stored: Stored) -> Stored:
        from .stored import constant

        width: int = self.get("embedding_length")
        for layer in range(self.num_layers):
            up, down = (f"v.blk.{layer}.ffn_{name}" for name in ("up", "down"))
            if self.shapes[f"{down}.weight"][1] == width:
                # Old converters confused the two names.
                for kind in ("weight", "bias"):
                    names = f"{up}.{kind}", f"{down}.{kind}"
                    stored |= dict(
                        zip(names, [stored[name] for name in reversed(names)], strict=True)
                    )
        classes = stored.pop("v.class_embd")
        stored[f"{_TOWER}.embeddings.class_embedding"] = classes
        # No layer after this norm is read, so files may lack it.
        for name in _NEWLINES:
            if name in stored:
                stored["image_newline"] = stored.pop(name)
        for kind, value in (("weight", 1.0), ("bias", 0.0)):
            stored.setdefault(f"v.post_ln.{kind}", constant(classes, (width,), value))
        return stored
