"""Ops by the CUDA kernels of sgl-kernel and flashinfer, if these are installed, and by
torch's own.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch

from . import fp4_products
from .products import (
    ScaledProduct,
    TorchProducts,
    multiply_by_sgl_kernel,
    scaled_product,
    takes_by_sgl_kernel,
)

logger = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float16)
# Bytes that a thread of these kernels reads at once. Rows must begin at multiples.
_VECTOR_BYTES = 16
_REASON_CHARACTERS = 300


class Library(Protocol):
    """Some ops of `kernels.reference`, by name. An op returns None if it does not support
    a call.
    """

    @property
    def name(self) -> str: ...

    def takes(self, op: str, *given: Any) -> bool:
        """Return whether the library's kernels support this call of `op`."""
        ...


@dataclass(frozen=True, slots=True)
class LibraryOps:
    """The ops of sgl-kernel or flashinfer, with results in new memory.

    Kernels of norms and activations keep float32 where the definition rounds, so results may differ
    in the last digit.

    Attributes:
        module: The library.
        takes_heads: Whether it also normalises [T, heads, D] with any stride between heads.
        functions: The functions of `_FUNCTIONS` that this version has.
    """

    name: str
    module: Any
    takes_heads: bool
    functions: frozenset[str]

    def takes(self, op: str, x: torch.Tensor, *others: Any) -> bool:
        match op:
            case "rms_norm" if "rmsnorm" in self.functions:
                laid_out = x.is_contiguous() if x.dim() == 2 else x.dim() == 3 and self.takes_heads
                weight = others[0]
                return (
                    laid_out
                    and _in_vectors(x, x.shape[-1])
                    and weight.dtype == x.dtype
                    and weight.is_contiguous()
                    and _aligned(weight)
                )
            case "silu_and_mul" if op in self.functions:
                return x.dim() == 2 and x.is_contiguous() and _in_vectors(x, x.shape[1] // 2)
            case "scaled_linear":
                return self._product(x, *others) is not None
        return False

    def _product(self, *given: Any) -> ScaledProduct | None:
        """Return the call of `scaled_linear`, or None if this version has no function for it."""
        product = scaled_product(*given) if self.functions & _PRODUCTS else None
        if product is None or _product_function(product) not in self.functions:
            return None
        return product if takes_by_sgl_kernel(product) else None

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
        """Normalise x [T, H] or [T, heads, D]."""
        if not self.takes("rms_norm", x, weight):
            return None
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self.module.rmsnorm(x, weight, eps, out=out)
        return out

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor | None:
        """Compute silu and mul of x [T, 2 * I]."""
        if not self.takes("silu_and_mul", x):
            return None
        out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)
        self.module.silu_and_mul(x, out=out)
        return out

    def scaled_linear(self, *given: Any) -> torch.Tensor | None:
        """Multiply. Arguments as in `reference.scaled_linear`."""
        product = self._product(*given)
        return None if product is None else multiply_by_sgl_kernel(self.module, product)

    def fp4_layer(self, x: torch.Tensor, factor: torch.Tensor, *others: Any) -> torch.Tensor:
        """See `reference.fp4_layer`. Only trials call this."""
        return fp4_products.multiply(
            self.module, *fp4_products.quantize(self.module, x, factor), *others
        )

    def fp4_gated_layer(self, x: torch.Tensor, factor: torch.Tensor, *others: Any) -> torch.Tensor:
        """See `reference.fp4_gated_layer`. Only trials call this."""
        return fp4_products.multiply(
            self.module, *fp4_products.silu_and_mul_quantize(self.module, x, factor), *others
        )


def _product_function(product: ScaledProduct) -> str:
    if product.form == "blocks":
        return "fp8_blockwise_scaled_mm"
    return "fp8_scaled_mm" if product.is_fp8 else "int8_scaled_mm"


def _in_vectors(x: torch.Tensor, size: int) -> bool:
    """Return whether x has rows and a supported dtype, and `size` elements and the strides between
    rows are whole vectors.
    """
    if x.dtype not in _DTYPES or x.numel() == 0 or x.stride(-1) != 1 or not _aligned(x):
        return False
    return all(
        number * x.element_size() % _VECTOR_BYTES == 0 for number in (size, *x.stride()[:-1])
    )


def _aligned(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % _VECTOR_BYTES == 0


# Module of each library, and whether it supports heads.
_MODULES = {"sgl-kernel": ("sgl_kernel", False), "flashinfer": ("flashinfer", True)}


def names() -> list[str]:
    """Return the installed libraries, preferred one first. Nothing is imported."""
    found = [
        name
        for name, (module, _) in _MODULES.items()
        if module in sys.modules or find_spec(module) is not None
    ]
    return [name for name in found if name != "flashinfer" or has_flashinfer()]


TORCH = TorchProducts()
# Functions of sgl-kernel. Each is checked, because versions differ: sglang-kernel 0.4 lacks
# fp8_blockwise_scaled_mm, for example. flashinfer's products are not used.
_PRODUCTS = frozenset({"fp8_scaled_mm", "int8_scaled_mm", "fp8_blockwise_scaled_mm"})
_FUNCTIONS = {
    "sgl-kernel": _PRODUCTS | {"rmsnorm", "silu_and_mul"},
    "flashinfer": frozenset({"rmsnorm", "silu_and_mul"}),
}


@cache
def load(name: str) -> Library:
    """Import a library and return its ops. This takes seconds, and GPU memory. Errors of the import
    are raised.
    """
    if name == TORCH.name:
        return TORCH
    module, takes_heads = _MODULES[name]
    library = import_module(module)
    wanted = _FUNCTIONS[name]
    has = frozenset(each for each in wanted if callable(getattr(library, each, None)))
    if not has:
        raise ImportError(f"it has none of {', '.join(sorted(wanted))}")
    if has != wanted:
        lacks = ", ".join(sorted(wanted - has))
        logger.info("this version of %s lacks %s: other kernels compute these", name, lacks)
    return LibraryOps(name, library, takes_heads, has)


def installed() -> tuple[Library, ...]:
    """Return the libraries that are installed and can be imported."""
    found: list[Library] = []
    for name in names():
        try:
            found.append(load(name))
        except Exception as error:
            leave_out(name, one_line(error))
    return (*found, TORCH)


def leave_out(name: str, reason: str, what: str = "code") -> None:
    """Log one line: the library is not used."""
    logger.warning(
        "%s is installed but does not work here: its %s is not used (%s)", name, what, reason
    )


def one_line(error: Exception) -> str:
    """Return an error as one line. If it is too long, keep its end, which names the cause of a
    wrapped error.
    """
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    if len(reason) > _REASON_CHARACTERS:
        reason = f"{reason[: _REASON_CHARACTERS // 3]} ... {reason[-_REASON_CHARACTERS * 2 // 3 :]}"
    return reason


def has_flashinfer() -> bool:
    """Return whether flashinfer is installed, and either its compiled kernels or nvcc, in the
    places where flashinfer looks for it.
    """
    if not (find_spec("flashinfer") and find_spec("triton")):
        return False
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return bool(
        find_spec("flashinfer_jit_cache")
        or shutil.which("nvcc")
        or (Path(toolkit) / "bin" / "nvcc").exists()
    )
