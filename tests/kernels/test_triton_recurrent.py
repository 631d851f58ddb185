"""Steps of layers with a recurrent state in Triton: on a GPU for real, elsewhere through Triton's
interpreter.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from recurrent_cases import SHAPES, assert_same_steps
from triton_interpreter import DEVICE

from piecework.kernels.triton import recurrent


@settings(deadline=None, max_examples=3)
@given(**SHAPES)
def test_a_step_is_that_of_plain_torch(**shape: Any) -> None:
    assert_same_steps(recurrent, torch.float32, **shape, device=DEVICE)
