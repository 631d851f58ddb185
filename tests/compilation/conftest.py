"""Makes the helper modules of this folder importable by its tests; one thread, for the models are
tiny.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from piecework.kernels import ops

sys.path.append(str(Path(__file__).parent))
torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def one_thread_and_no_kernels() -> Iterator[None]:
    """Whatever engines of earlier tests in this process have chosen: what is compiled depends on
    it.
    """
    torch.set_num_threads(1)
    with ops.plain_torch():
        yield


@pytest.fixture
def own_split_ops() -> None:
    """In this folder the split ops of toy models are wanted."""
