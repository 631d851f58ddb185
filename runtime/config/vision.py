"""Settings of images in prompts."""

from __future__ import annotations

from dataclasses import dataclass

from .options import option

VISION = "images in prompts"
_CACHE_BYTES = 2**28
_MOST = 2**44


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """How an engine encodes images. A part of `EngineConfig`."""

    disable_vision: bool = option(
        False,
        "serve the text of a model of images and text: its vision encoder is not loaded, and "
        "images are refused",
        group=VISION,
    )
    mmproj: str | None = option(
        None,
        "GGUF file with the vision tower of a .gguf model, as llama.cpp converts it; default: the "
        "one beside the model whose name has mmproj, if it fits",
        group=VISION,
        metavar="FILE",
    )
    mm_encoder_budget: int | None = option(
        None,
        "patches of images that are encoded between two steps, at least a piece of a layer; more "
        "makes images faster and running texts slower; default: on a CPU half the time of a step",
        group=VISION,
        metavar="N",
    )
    mm_cache_bytes: int = option(
        _CACHE_BYTES,
        "bytes of the device's memory for results of the vision encoder, so that an image that "
        "comes again is not encoded again",
        group=VISION,
        metavar="BYTES",
    )

    def check_vision(self) -> None:
        """Raise `ValueError` for a value that is out of range."""
        if self.mmproj is not None and self.disable_vision:
            raise ValueError("--mmproj loads what --disable-vision leaves out; leave one out")
        if self.mm_encoder_budget is not None and not 1 <= self.mm_encoder_budget <= _MOST:
            raise ValueError(
                f"--mm-encoder-budget must lie between 1 and {_MOST}, got {self.mm_encoder_budget}"
            )
        if not 0 <= self.mm_cache_bytes <= _MOST:
            raise ValueError(
                f"--mm-cache-bytes must lie between 0 and {_MOST}, got {self.mm_cache_bytes}"
            )
