"""The registry of split ops. A forward is split at these ops, and no graph records them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Implementation = Callable[..., Any]
# Runs a split op during a recording. Takes its implementation and arguments, and returns its
# result.
Recorder = Callable[[Implementation, tuple[Any, ...]], Any]

_implementations: dict[str, Implementation] = {}
_recorder: Recorder | None = None


def register_split_op(name: str, implementation: Implementation | None = None) -> Implementation:
    """Split forwards at the op `name` ("namespace::op"). Return the function to register as its
    kernel.

    With `implementation`, split forwards call it without torch's dispatcher, and a breakable
    capture (`whole.py`) pauses its recording for it. Without, the op itself is called, for example
    a collective whose kernel is torch's.
    """
    run = implementation
    if run is None:
        namespace, op = name.split("::")
        run = getattr(getattr(torch.ops, namespace), op)
    _implementations[name] = run

    @functools.wraps(run)
    def kernel(*args: Any) -> Any:
        return run(*args) if _recorder is None else _recorder(run, args)

    return kernel


def split_op_name(target: Any) -> str | None:
    """Return the name of the registered split op that an FX node calls, or None."""
    if not isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return None
    namespace, op = str(target).split(".")[:2]
    name = f"{namespace}::{op}"
    return name if name in _implementations else None


def implementation(name: str) -> Implementation:
    """Return the function that a split forward calls for this op."""
    return _implementations[name]


def registered() -> list[str]:
    return sorted(_implementations)


@contextmanager
def recording_around_split_ops(recorder: Recorder) -> Iterator[None]:
    """Pass the split ops that torch dispatches inside the block to `recorder`."""
    global _recorder
    assert _recorder is None, "a recording is going on already"
    _recorder = recorder
    try:
        yield
    finally:
        _recorder = None
