"""The vision tower of Idefics 3 and SmolVLM."""

from __future__ import annotations

from typing import Any, ClassVar

from .projector import Projector, vit_names

PROJECTOR_TYPES = ["idefics3"]


class OfFile(Projector):
    """SigLIP, and a projector that makes one position of a square of patches."""

    family = "idefics3"
    architecture = "Idefics3ForConditionalGeneration"
    model_type = "idefics3"
    text_type = "llama"
    text_kinds = ("llama",)
    output = ("mm.model.fc.weight", 0)
    names: ClassVar = {
        **vit_names("vision_model"),
        "mm.model.fc": "connector.modality_projection.proj",
    }

    def config(self) -> dict[str, Any]:
        return {"vision_config": self.vit(), "scale_factor": self.get("projector.scale_factor", 2)}

    def processor(self) -> dict[str, Any]:
        tile: int = self.get("image_size")
        return {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": self.get("preproc_image_size", 4 * tile)},
            "max_image_size": {"longest_edge": tile},
            **self.colours(),
        }
