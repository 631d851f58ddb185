"""Writes flashinfer.json, the signatures of flashinfer's wrappers that this project calls, from the sources in its wheel.

    python tests/flashinfer_contract/extract_flashinfer.py UNPACKED_WHEEL > tests/flashinfer_contract/flashinfer.json

Reading the sources needs neither flashinfer's dependencies nor a GPU.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

CLASSES = {"BatchPrefillWithPagedKVCacheWrapper": "prefill.py", "BatchDecodeWithPagedKVCacheWrapper": "decode.py"}
METHODS = ("__init__", "plan", "_plan_impl", "run")


def exported(package: Path) -> set[str]:
    """The names that `import flashinfer` gives."""
    tree = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
    return {alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}


def signature(method: ast.FunctionDef) -> str:
    """`a, b=1, *, c`: names and defaults, without self and annotations."""
    arguments = method.args
    for argument in [*arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
        if argument is not None:
            argument.annotation = None
    arguments.args = arguments.args[1:]
    return ast.unparse(arguments)


def signatures(package: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, file in CLASSES.items():
        if name not in exported(package):
            continue
        tree = ast.parse((package / file).read_text(encoding="utf-8"))
        (node,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        # Of overloads the last is the one that runs.
        methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef) and item.name in METHODS}
        found |= {f"{name}.{method}": signature(item) for method, item in methods.items()}
    return found


def version(wheel: Path) -> str:
    (metadata,) = wheel.glob("flashinfer_python-*.dist-info/METADATA")
    return next(
        line.removeprefix("Version: ") for line in metadata.read_text(encoding="utf-8").splitlines() if line.startswith("Version: ")
    )


if __name__ == "__main__":
    wheel = Path(sys.argv[1])
    print(json.dumps({"version": version(wheel), "signatures": signatures(wheel / "flashinfer")}, indent=1))
