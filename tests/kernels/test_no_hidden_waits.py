"""Code that plans and launches steps never makes the host wait for a device: numbers go there by
`staging.to_device`, and come back by `staging.HostCopy`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_KINDS = ("chunked", "latent", "paged", "sparse", "varlen")
_TRITON = ("attention", "attention_layer", "attention_plan", "launches", "linear", "lora", "moe")
_OTHERS = ("quantize", "recurrent", "sampling")
_CUDA = ("attention", "fp4", "fp4_products", "latent_attention", "products")
_FILES = (
    *(f"kernels/{kind}_attention.py" for kind in _KINDS),
    *(f"kernels/triton/{name}.py" for name in (*_TRITON, "ops", "packed", *_OTHERS)),
    *(f"kernels/cuda/{name}.py" for name in _CUDA),
    "kernels/state_plan.py",
    "runtime/core/batch.py",
    "runtime/core/page_tables.py",
    "runtime/executor/model_runner.py",
)


def waits_in(source: str) -> Iterator[str]:
    """Yield calls that copy from or to pageable memory, or read a number of a tensor."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        name, named = call.func.attr, {keyword.arg for keyword in call.keywords}
        text = ast.unparse(call)
        if (
            (name in ("item", "cpu") and not call.args)
            or (name in ("tensor", "as_tensor") and "device" in named)
            or (name == "to" and "non_blocking" not in named and "device" in text.split(".to(")[-1])
        ):
            yield f"{call.lineno}: {text}"


@pytest.mark.parametrize("file", _FILES)
def test_planning_code_has_no_hidden_wait(file: str) -> None:
    assert list(waits_in((_ROOT / file).read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "line",
    [
        "x.to(device)",
        "x.to(table.device)",
        "x.to(device=there)",
        "torch.tensor([1], device=device)",
        "length.item()",
        "x.cpu()",
    ],
)
def test_every_kind_of_wait_is_found(line: str) -> None:
    assert len(list(waits_in(line))) == 1
    assert not list(waits_in("x.to(torch.int32); torch.arange(4, device=device); table.item(0)"))
