"""Write pixels as files: PNG for an image, MP4 or PNG frames for a video."""

from __future__ import annotations

import io
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

FRAMES_PER_SECOND = 16  # Wan was trained with this rate.
_SUFFIXES = (".png", ".mp4")
_OTHER_SUFFIXES = (
    ".jpg",
    ".jpeg",
    ".webp",
    ".gif",
    ".bmp",
    ".tif",
    ".tiff",
    ".avi",
    ".mov",
    ".mkv",
    ".webm",
)
_NAME_LENGTH = 60

Pixels = np.ndarray[Any, np.dtype[np.float32]]  # [F, H, W, 3] between 0 and 1.


def png(image: np.ndarray[Any, np.dtype[np.float32]]) -> bytes:
    """Return a PNG file of one frame [H, W, 3]."""
    return _file(to_bytes(image), "png")


def encode_image(pixels: bytes, width: int, height: int, format: str, quality: int) -> bytes:
    """Return a file of `height` rows of `width` pixels, 3 bytes each. `format` is png, jpeg or
    webp; `quality`, 0 to 100, applies to the last two.
    """
    image = np.frombuffer(pixels, np.uint8).reshape(height, width, 3)
    return _file(image, format, **({} if format == "png" else {"quality": quality}))


def _file(image: np.ndarray[Any, np.dtype[np.uint8]], format: str, **settings: Any) -> bytes:
    import imageio.v3 as imageio

    buffer = io.BytesIO()
    imageio.imwrite(buffer, image, extension=f".{format}", plugin="pillow", **settings)
    return buffer.getvalue()


def to_bytes(pixels: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Scale 0..1 to 0..255, rounded to the nearest."""
    return (pixels * 255).round().astype(np.uint8)


class Output:
    """Where files are written: `path` is a folder, or a file that ends in .png or .mp4. A video as
    .png is written frame by frame.

    Raises `ValueError` if the path cannot be written, before minutes of computing.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path).expanduser()
        suffix = self._path.suffix.lower()
        if suffix in _OTHER_SUFFIXES:
            raise ValueError(
                f"--output-path {path}: files are written as .png or .mp4; end it so, or give a "
                "folder"
            )
        self._is_file = suffix in _SUFFIXES
        folder = self._path.parent if self._is_file else self._path
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder):
                pass
            if (
                self._is_file
                and self._path.exists()
                and not (self._path.is_file() and os.access(self._path, os.W_OK))
            ):
                raise OSError("it exists and cannot be overwritten")
        except OSError as error:
            raise ValueError(
                f"--output-path {path} cannot be written: {error.strerror or error}"
            ) from None

    def check(self, num_frames: int) -> None:
        """Raise `ValueError` if the output is an image, but the file would be a video."""
        if num_frames == 1 and self._is_file and self._path.suffix.lower() == ".mp4":
            raise ValueError(
                f"--output-path {self._path} is a video, but an image is to be made; end it in .png"
            )

    def save(self, pixels: Pixels, prompt: str, seed: int, number: int, count: int) -> list[Path]:
        """Write output `number` of `count`, and return the files. Raise `ValueError` if writing
        fails, such as on a full disk.
        """
        try:
            return self._save(pixels, prompt, seed, number, count)
        except OSError as error:
            raise ValueError(
                f"--output-path {self._path} cannot be written: {error.strerror or error}"
            ) from None

    def _save(self, pixels: Pixels, prompt: str, seed: int, number: int, count: int) -> list[Path]:
        is_video = len(pixels) > 1
        if self._is_file:
            path = self._path if count == 1 else self._path.with_stem(f"{self._path.stem}-{number}")
        else:
            path = self._path / f"{_file_name(prompt)}_{seed}{'.mp4' if is_video else '.png'}"
        if path.suffix.lower() == ".mp4":
            return [_write_video(path, pixels)]
        if not is_video:
            return [_write(path, png(pixels[0]))]
        return [
            _write(path.with_stem(f"{path.stem}-{frame:04d}"), png(image))
            for frame, image in enumerate(pixels)
        ]


def _write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _write_video(path: Path, pixels: Pixels) -> Path:
    import imageio.v3 as imageio

    # Sizes are multiples of the VAE's factor. The encoder must not change them.
    imageio.imwrite(
        path,
        to_bytes(pixels),
        plugin="FFMPEG",
        fps=FRAMES_PER_SECOND,
        codec="libx264",
        macro_block_size=2,
        quality=8,
    )
    return path


def _file_name(prompt: str) -> str:
    return re.sub(r"[^\w]+", "-", prompt.lower())[:_NAME_LENGTH].strip("-") or "output"
