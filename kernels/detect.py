"""Chooses the platform, once."""

from __future__ import annotations

from .platform import Platform


def detect(device: str = "auto") -> Platform:
    """The platform for `--device`. Raises `ValueError` where that device is not to be had."""
    if device in ("auto", "cpu"):
        from .cpu.platform import CpuPlatform

        return CpuPlatform()
    raise ValueError(f"--device {device} is not supported; choose auto or cpu")
