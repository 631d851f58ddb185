"""The functions of torch.npu that ask about or steer the one simulated device."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch

from .extension import extension


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    """There is nothing to set up."""


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: Any) -> None:
    """There is one device, and it is the current one."""


class device:
    """Makes a device the current one inside the block; there is one."""

    def __init__(self, device: Any) -> None:
        self.idx = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        pass


def get_device_name(device_name: Any = None) -> str:
    return "Ascend910B-simulated"


_level: int | None = None


def get_task_queue_enable() -> int:
    """The level of the queue of launches: the environment's, unless one was set; 0 where launches
    block.
    """
    if os.environ.get("ASCEND_LAUNCH_BLOCKING") == "1":
        return 0
    return int(os.environ.get("TASK_QUEUE_ENABLE", "1")) if _level is None else _level


def set_task_queue_enable(mode: int) -> None:
    global _level
    if mode not in (0, 1, 2):
        raise RuntimeError(f"mode must be 0, 1, or 2, but got {mode}.")
    _level = mode


def get_device_properties(device_name: Any = None) -> SimpleNamespace:
    return SimpleNamespace(name=get_device_name(), total_memory=extension().settings.total_memory)


def synchronize(device: Any = None) -> None:
    extension().synchronize()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """(free, total) bytes; what the allocator keeps for later is not free."""
    total = extension().settings.total_memory
    return max(total - extension().reserved(), 0), total


def memory_allocated(device: Any = None) -> int:
    return int(extension().allocated())


def memory_reserved(device: Any = None) -> int:
    return int(extension().reserved())


def max_memory_allocated(device: Any = None) -> int:
    return int(extension().peak())


def reset_peak_memory_stats(device: Any = None) -> None:
    extension().reset_peak()


def empty_cache() -> None:
    extension().empty_cache()


def host_empty_cache() -> None:
    """Host memory is not cached."""


def manual_seed(seed: int) -> None:
    """Random kernels draw from the host's default generator, so this seeds that."""
    torch.default_generator.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    manual_seed(seed)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(including_emulation: bool = False) -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    """torch calls this before it makes tensors on a device; there is nothing to set up."""
