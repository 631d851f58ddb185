"""Writes LIBRARY.json, the signatures of what this project calls of a kernel library, from the
sources in its wheel.

    python tests/library_contracts/extract_signatures.py flashinfer UNPACKED_WHEEL \\
        > tests/library_contracts/flashinfer.json
    python tests/library_contracts/extract_signatures.py sgl_kernel UNPACKED_WHEEL \\
        > tests/library_contracts/sgl_kernel.json
    python tests/library_contracts/extract_signatures.py sglang_kernel UNPACKED_WHEEL \\
        > tests/library_contracts/sglang_kernel.json

Reading the sources needs neither a library's dependencies nor a GPU.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Library(NamedTuple):
    """What is called, and the file of the package `module` that defines it: classes by the methods
    of `METHODS`, and functions.
    """

    distribution: str
    module: str
    classes: Mapping[str, str]
    functions: Mapping[str, str]


METHODS = ("__init__", "plan", "_plan_impl", "run", "csr")
_SGL_KERNEL = {
    "rmsnorm": "elementwise.py",
    "silu_and_mul": "elementwise.py",
    "weak_ref_tensor": "memory.py",
    "fp8_scaled_mm": "gemm.py",
    "int8_scaled_mm": "gemm.py",
    "fp8_blockwise_scaled_mm": "gemm.py",
}
LIBRARIES = {
    "flashinfer": Library(
        "flashinfer_python",
        "flashinfer",
        {
            "BatchPrefillWithPagedKVCacheWrapper": "prefill.py",
            "BatchDecodeWithPagedKVCacheWrapper": "decode.py",
            "mla.BatchMLAPagedAttentionWrapper": "mla/_batch_mla/_wrapper.py",
            "mla.MLAPlanMetadata": "mla/_batch_mla/_contracts.py",
        },
        {
            "rmsnorm": "norm/__init__.py",
            "silu_and_mul": "activation.py",
            "fp4_quantize": "quantization/fp4_quantization.py",
            "silu_and_mul_nvfp4_quantize": "quantization/fp4_quantization.py",
            "block_scale_interleave": "quantization/fp4_quantization.py",
            "mm_fp4": "gemm/gemm_base.py",
            "comm.allreduce_fusion": "comm/allreduce.py",
            "comm.create_allreduce_fusion_workspace": "comm/allreduce.py",
        },
    ),
    # PyPI's sgl-kernel ended at 0.3.21. sglang-kernel succeeds it under the same module.
    "sgl_kernel": Library("sgl_kernel", "sgl_kernel", {}, _SGL_KERNEL),
    "sglang_kernel": Library("sglang_kernel", "sgl_kernel", {}, _SGL_KERNEL),
}


def exported(package: Path, file: str = "__init__.py") -> set[str]:
    """The names that importing the package gives, also by a star."""
    tree = ast.parse((package / file).read_text(encoding="utf-8"))
    # Also those for one system alone.
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {alias.asname or alias.name for node in imports for alias in node.names}
    for node in imports:
        if node.level == 1 and node.names[0].name == "*":
            names |= exported(package, f"{node.module}.py")
    return names


def is_exported(package: Path, name: str) -> bool:
    """Whether importing the package gives `name`, of itself or of a package in it."""
    folder, _, short = name.rpartition(".")
    return short in exported(package / folder if folder else package)


def signature(function: ast.FunctionDef, skipped: int = 0) -> str:
    """`a, b=1, *, c`: names and defaults, without the first `skipped` and without annotations."""
    arguments = function.args
    for argument in [*arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
        if argument is not None:
            argument.annotation = None
    arguments.args = arguments.args[skipped:]
    return ast.unparse(arguments)


def signatures(library: Library, package: Path) -> dict[str, str]:
    """Of the package in this folder."""
    found: dict[str, str] = {}
    for name, file in library.classes.items():
        if not is_exported(package, name):
            continue
        tree = ast.parse((package / file).read_text(encoding="utf-8"))
        (node,) = (
            node
            for node in tree.body
            if isinstance(node, ast.ClassDef) and node.name == name.rpartition(".")[2]
        )
        # Of overloads the last is the one that runs.
        methods = {
            item.name: item
            for item in node.body
            if isinstance(item, ast.FunctionDef) and item.name in METHODS
        }
        found |= {
            f"{name}.{method}": signature(item, skipped=1) for method, item in methods.items()
        }
    for name, file in library.functions.items():
        if is_exported(package, name):
            tree = ast.parse((package / file).read_text(encoding="utf-8"))
            functions = {item.name: item for item in tree.body if isinstance(item, ast.FunctionDef)}
            found[name] = signature(functions[name.rpartition(".")[2]])
    return found


def version(wheel: Path, distribution: str) -> str:
    (metadata,) = wheel.glob(f"{distribution}-*.dist-info/METADATA")
    return next(
        line.removeprefix("Version: ")
        for line in metadata.read_text(encoding="utf-8").splitlines()
        if line.startswith("Version: ")
    )


if __name__ == "__main__":
    library, wheel = LIBRARIES[sys.argv[1]], Path(sys.argv[2])
    described = {
        "version": version(wheel, library.distribution),
        "signatures": signatures(library, wheel / library.module),
    }
    print(json.dumps(described, indent=1))
