"""The registry of split ops: where a forward is cut, for each is a step of its own that no graph
records.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Implementation = Callable[..., Any]
Recorder = Callable[[Implementation, tuple[Any, ...]], Any]
"""Runs a split op in the middle of a recording: called with its implementation and arguments,
returns its result.
"""

_implementations: dict[str, Implementation] = {}
_recorder: Recorder | None = None


def register_split_op(name: str, implementation: Implementation | None = None) -> Implementation:
    """Cut forwards at the op `name` ("namespace::op"). Returns the function to register as the op's
    kernel.

    With `implementation`, pieces call it straight, past torch's dispatcher, and a breakable capture
    (`whole.py`) interrupts its recording for it. Without, the op itself is called; a
    collective, say, whose kernel is torch's.
    """
    run = implementation or _op(name)
    _implementations[name] = run

    @functools.wraps(run)
    def kernel(*args: Any) -> Any:
        return run(*args) if _recorder is None else _recorder(run, args)

    return kernel


def split_op_name(target: Any) -> str | None:
    """The name of the registered split op that an FX node calls, if it does."""
    if not isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return None
    namespace, op = str(target).split(".")[:2]
    name = f"{namespace}::{op}"
    return name if name in _implementations else None


def implementation(name: str) -> Implementation:
    """What a step of a cut forward calls."""
    return _implementations[name]


def registered() -> list[str]:
    return sorted(_implementations)


@contextmanager
def recording_around_split_ops(recorder: Recorder) -> Iterator[None]:
    """Inside the block, split ops that run through torch's dispatcher go through `recorder`."""
    global _recorder
    assert _recorder is None, "a recording is going on already"
    _recorder = recorder
    try:
        yield
    finally:
        _recorder = None


def _op(name: str) -> Implementation:
    namespace, op = name.split("::")
    found: Implementation = getattr(getattr(torch.ops, namespace), op)
    return found
