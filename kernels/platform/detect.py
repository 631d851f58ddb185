"""Choose the platform of this process. Each device has a folder with a `platform.py`."""

from __future__ import annotations

from importlib import import_module

import torch

from .platform import Platform

_DEVICES = ("cuda", "npu", "cpu")


def detect(device: str = "auto") -> Platform:
    """Return the platform for `--device`. "auto" takes the first available of cuda, npu, cpu.

    Raise `ValueError` with a remedy if the device is not available.
    """
    if device == "auto":
        device = "cuda" if _has_cuda() else "npu" if _has_npu() else "cpu"
    if device not in _DEVICES:
        raise ValueError(f"--device {device} is not supported; choose auto, {', '.join(_DEVICES)}")
    if device == "cuda" and not _has_cuda():
        raise ValueError(
            "--device cuda: torch finds no NVIDIA GPU; install a CUDA build of torch, or choose "
            "--device cpu"
        )
    if device == "npu" and not _has_npu():
        raise ValueError(
            "--device npu: torch_npu finds no NPU; install torch_npu and CANN, or choose "
            "--device cpu"
        )
    platform: Platform = getattr(
        import_module(f"..{device}.platform", __package__), f"{device.capitalize()}Platform"
    )()
    return platform


def _has_cuda() -> bool:
    return torch.cuda.is_available()


def _has_npu() -> bool:
    try:
        import torch_npu  # noqa: F401  (registers torch.npu)
    except ImportError:
        return False
    return bool(torch.npu.is_available())  # type: ignore[attr-defined]
