"""Chooses the platform, once."""

from __future__ import annotations

import torch

from .platform import Platform


def detect(device: str = "auto") -> Platform:
    """The platform for `--device`; auto takes the first there is of cuda, npu, cpu.

    Raises `ValueError` with a remedy where that device is not to be had.
    """
    if device == "auto":
        device = "cuda" if _has_cuda() else "npu" if _has_npu() else "cpu"
    match device:
        case "cpu":
            from .cpu.platform import CpuPlatform

            return CpuPlatform()
        case "cuda":
            if not _has_cuda():
                raise ValueError(
                    "--device cuda: torch finds no NVIDIA GPU; install a CUDA build of torch, or "
                    "choose --device cpu"
                )
            from .cuda.platform import CudaPlatform

            return CudaPlatform()
        case "npu":
            if not _has_npu():
                raise ValueError(
                    "--device npu: torch_npu finds no NPU; install torch_npu and CANN, or choose "
                    "--device cpu"
                )
            from .npu.platform import NpuPlatform

            return NpuPlatform()
    raise ValueError(f"--device {device} is not supported; choose auto, cuda, npu or cpu")


def _has_cuda() -> bool:
    return torch.cuda.is_available()


def _has_npu() -> bool:
    try:
        import torch_npu  # noqa: F401  (registers torch.npu)
    except ImportError:
        return False
    return bool(torch.npu.is_available())  # type: ignore[attr-defined]
