"""The ops of sgl-kernel and flashinfer in plain torch, as strict as their kernels, each call
checked against the library's own signature.

Norms and activations compute in float32 and round once, as the kernels do; what a kernel would read
or write wrongly is an error here.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import products_standin
import torch
import torch.nn.functional as F

from piecework.kernels.cuda import libraries
from piecework.kernels.cuda.libraries import LibraryOps

_CONTRACTS = Path(__file__).parents[1] / "library_contracts"
_DTYPES = (torch.float16, torch.bfloat16)


class LibraryStandIn:
    """`calls`: the name of each function that was called. `heads`: whether rmsnorm takes three
    dimensions, and rows with gaps. A function that the contract lacks is no attribute.
    """

    def __init__(self, contract: str, *, heads: bool) -> None:
        self.signatures = json.loads((_CONTRACTS / f"{contract}.json").read_text())["signatures"]
        self._heads = heads
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.endswith("_mm") and name not in self.signatures:
            raise AttributeError(name)
        return super().__getattribute__(name)

    def rmsnorm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = self._bound("rmsnorm", *args, **kwargs)
        x, weight, out = given["input"], given["weight"], given["out"]
        assert x.dim() == 2 or (self._heads and x.dim() == 3)
        assert self._heads or x.is_contiguous(), "its rows are taken to lie one behind the other"
        assert (
            weight.shape == x.shape[-1:] and weight.dtype == x.dtype and weight.is_contiguous()
        ), "it is read as numbers of x's dtype"
        _check(x, weight, out)
        assert out.shape == x.shape and out.dtype == x.dtype
        value = x.float()
        out.copy_(
            value * (value.square().mean(-1, keepdim=True) + given["eps"]).rsqrt() * weight.float()
        )
        return out

    def silu_and_mul(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = self._bound("silu_and_mul", *args, **kwargs)
        x, out = given["input"], given["out"]
        if x.shape[-1] * x.element_size() % 16 != 0:
            raise ValueError("The pointers must be multiple of 16 bytes.")
        assert x.is_contiguous() and x.shape[-1] // 2 * x.element_size() % 16 == 0, (
            "its halves are read in vectors, by number"
        )
        _check(x, out)
        assert out.shape == (*x.shape[:-1], x.shape[-1] // 2) and out.dtype == x.dtype
        gate, up = x.float().chunk(2, -1)
        out.copy_(F.silu(gate) * up)
        return out

    def fp8_scaled_mm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = self._bound("fp8_scaled_mm", *args, **kwargs)
        return products_standin.multiply_rows(torch.float8_e4m3fn, *given.values())

    def int8_scaled_mm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = self._bound("int8_scaled_mm", *args, **kwargs)
        return products_standin.multiply_rows(torch.int8, *given.values())

    def fp8_blockwise_scaled_mm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = self._bound("fp8_blockwise_scaled_mm", *args, **kwargs)
        return products_standin.multiply_blocks(*given.values())

    def _bound(self, name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.calls.append(name)
        bound = inspect.signature(eval(f"lambda {self.signatures[name]}: None")).bind(
            *args, **kwargs
        )
        bound.apply_defaults()
        return bound.arguments


def _check(*tensors: torch.Tensor) -> None:
    """Every row begins where a vector of 16 bytes may be read, and there are rows: a launch of none
    is an error.
    """
    for tensor in tensors:
        assert tensor.numel() > 0 and tensor.dtype in _DTYPES and tensor.stride(-1) == 1
        assert tensor.data_ptr() % 16 == 0
        assert all(stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:-1])


def sgl_kernel() -> LibraryOps:
    module = LibraryStandIn("sgl_kernel", heads=False)
    return LibraryOps("sgl-kernel", module, False, libraries._FUNCTIONS["sgl-kernel"])


def sglang_kernel() -> LibraryOps:
    """Its successor, which lacks a function."""
    module = LibraryStandIn("sglang_kernel", heads=False)
    functions = libraries._FUNCTIONS["sgl-kernel"] & module.signatures.keys()
    return LibraryOps("sgl-kernel", module, False, functions)


def flashinfer() -> LibraryOps:
    module = LibraryStandIn("flashinfer", heads=True)
    return LibraryOps("flashinfer", module, True, libraries._FUNCTIONS["flashinfer"])
