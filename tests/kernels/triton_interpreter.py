"""Where Triton's kernels run in tests: on a GPU, or in its interpreter, mended for a numpy that is
newer than it, and spared what it does over and over.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import language as tl
from triton.runtime import interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

_patch_lang, _patch_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor


def _with_index(tensor: Any, scope: Any) -> None:
    """Triton 3.6 takes `int` of an array of one element for loop bounds, which numpy 2.4
    refuses.
    """
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


class _Scope(interpreter._LangPatchScope):  # type: ignore[misc]
    """What is replaced in triton.language while a kernel runs, by the modules that its functions
    see.
    """

    def __init__(self) -> None:
        super().__init__()
        self.done: set[frozenset[str]] = set()

    def restore(self) -> None:
        super().restore()
        self.done.clear()


_scope = _Scope()


def _patch_once(fn: Any) -> Any:
    """The interpreter replaces all of triton.language for each function that a kernel calls. Once a
    kernel is enough: what replaces it is the same.
    """
    seen = _languages(fn)
    if seen not in _scope.done:
        _scope.done.add(seen)
        _scope._changes += _patch_lang(fn)._changes
    return _scope


@cache
def _languages(fn: Any) -> frozenset[str]:
    return frozenset(
        each.__name__ for each in (tl, tl.core) if any(each is v for v in fn.__globals__.values())
    )


@cache
def _builtins(owner: Any) -> list[tuple[str, Any]]:
    return [(name, each) for name, each in inspect.getmembers(owner) if tl.core.is_builtin(each)]


def _patch_builtin(owner: Any, builder: Any, scope: Any) -> None:
    for name, member in _builtins(owner):
        interpreter._patch_attr(owner, name, member, builder, scope)


_numpy_of_scalar = cache(interpreter._get_np_dtype)
_numpy_of_pointer = interpreter._get_np_dtype(tl.pointer_type(tl.int8))


def _numpy_of(kind: Any) -> Any:
    """The interpreter makes a dictionary of all dtypes each time it looks one up."""
    is_pointer = isinstance(kind.scalar, tl.pointer_type)
    return _numpy_of_pointer if is_pointer else _numpy_of_scalar(kind.scalar)


interpreter._patch_lang_tensor = _with_index
interpreter._patch_lang = _patch_once
interpreter._patch_builtin = _patch_builtin
interpreter._get_np_dtype = _numpy_of
