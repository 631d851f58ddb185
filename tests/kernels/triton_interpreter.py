"""Where Triton's kernels run in tests: on a GPU, or in its interpreter, mended for a numpy that is
newer than it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime import interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

_patch_tensor = interpreter._patch_lang_tensor


def _with_index(tensor: Any, scope: Any) -> None:
    """Triton 3.6 takes `int` of an array of one element for loop bounds, which numpy 2.4
    refuses.
    """
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _with_index
