"""Records a function on the simulated device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def capture(function: Callable[[], Any], **options: Any) -> tuple[Any, Any]:
    """(graph, what the function returned)."""
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, **options):
        result = function()
    return graph, result
