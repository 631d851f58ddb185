"""How the simulated ops refuse a call."""

from __future__ import annotations


def check(condition: bool, message: str) -> None:
    """Raises RuntimeError, as torch_npu does."""
    if not condition:
        raise RuntimeError(message)
