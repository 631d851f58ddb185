"""Settings of the images in requests."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from importlib.util import find_spec

from ...runtime.config.options import check_options, option
from ...runtime.config.vision import VISION
from ..outgoing.allowed import AllowedServers, parse_allowed

MOST_IMAGES = 1024  # Upper limit of `--limit-mm-per-prompt`.
_MEDIA = {"image", "video", "audio", "vision_chunk"}
_PAIR = re.compile(r"([a-z_]+)=(-?\d+)(?:,|$)")


@dataclass(frozen=True, kw_only=True)
class MediaConfig:
    """Which images a server reads. A part of `ServerConfig`."""

    limit_mm_per_prompt: str = option(
        "image=16",
        'number of images that a request may have: image=4, or JSON {"image": 4}',
        group=VISION,
        metavar="image=N",
    )
    allow_remote_media: str = option(
        "",
        "servers from which images are fetched (files.example.com,localhost:8000, or * for all), "
        "and private networks (10.0.0.0/8) in which they may be; needs the extra vision; "
        "default: images are not fetched",
        group=VISION,
        metavar="LIST",
        items=r"[^-].*",
    )
    allowed_local_media_path: str | None = option(
        None,
        "folder whose files requests may name as file:// images; default: none",
        group=VISION,
        metavar="FOLDER",
    )
    max_image_bytes: int = option(
        16 * 2**20, "largest image file, in bytes", group=VISION, metavar="BYTES"
    )
    max_image_pixels: int = option(
        30_000_000,  # Decoding takes about 9 bytes of memory for each.
        "largest width times height of an image, which is read before it is decoded",
        group=VISION,
        metavar="N",
    )

    @property
    def most_images(self) -> int:
        """Number of images that a request may have."""
        return parse_limit(self.limit_mm_per_prompt)

    @property
    def remote_media(self) -> AllowedServers | None:
        """The servers from which images are fetched, or None if there are none."""
        text = self.allow_remote_media
        return parse_allowed(text, "--allow-remote-media", any_host=True) if text else None

    def check_media(self) -> None:
        """Raise `ValueError` if a flag is wrong, or needs a package that is missing."""
        check_options(self, ("max_image_bytes", "max_image_pixels"))
        parse_limit(self.limit_mm_per_prompt)
        if self.remote_media is not None and find_spec("httpx2") is None:
            raise ValueError(
                "--allow-remote-media needs the package httpx2: pip install 'piecework[vision]', "
                "or leave it out"
            )
        folder = self.allowed_local_media_path
        if folder is not None and not os.path.isdir(folder):
            raise ValueError(f"--allowed-local-media-path {folder} is no folder; name a folder")


def parse_limit(text: str) -> int:
    """Parse `--limit-mm-per-prompt`. Raise `ValueError` for anything but a number of images.

    Limits of other media are checked and not used. vLLM's form with a `count` works too.
    """
    try:
        found = json.loads(text) if text.lstrip().startswith("{") else dict(_PAIR.findall(text))
        counts = {name: each["count"] if isinstance(each, dict) else each
                  for name, each in found.items()}  # fmt: skip
        limits = {name: int(count) for name, count in counts.items()}
        most = limits.get("image", MOST_IMAGES)
    except (ValueError, KeyError, TypeError, AttributeError):
        most = -1
        limits = {}
    if not limits or not set(limits) <= _MEDIA or not 0 <= most <= MOST_IMAGES:
        raise ValueError(
            f"--limit-mm-per-prompt {text:.60} is no number of images from 0 to {MOST_IMAGES}; "
            "write image=4"
        )
    return most
