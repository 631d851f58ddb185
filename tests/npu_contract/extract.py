"""Writes torch_npu.json, the part of torch_npu's interface that this project uses, from a wheel and
its dispatcher dump.

    python tests/npu_contract/extract.py UNPACKED_WHEEL DISPATCHER_DUMP \\
        > tests/npu_contract/torch_npu.json
    python tests/npu_contract/extract.py --dump > DISPATCHER_DUMP  # needs torch_npu

The Python signatures are read from the wheel's sources, which needs no Ascend software. The schemas
are those of the live dispatcher: 129 ops are registered with other argument names than the wheel's
yaml gives them.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

OPS = (
    "atb::_npu_paged_attention",
    "atb::_npu_reshape_and_cache",
    "npu::npu_add_rms_norm",
    "npu::npu_add_rms_norm_dynamic_quant",
    "npu::npu_add_rms_norm_quant",
    "npu::npu_all_gather_base_mm",
    "npu::npu_convert_weight_to_int4pack",
    "npu::npu_dynamic_quant",
    "npu::npu_fused_infer_attention_score",
    "npu::npu_grouped_matmul",
    "npu::npu_mm_all_reduce_base",
    "npu::npu_mm_reduce_scatter_base",
    "npu::npu_quant_matmul",
    "npu::npu_quantize",
    "npu::npu_rms_norm",
    "npu::npu_rotary_mul",
    "npu::npu_swiglu",
    "npu::npu_swiglu_quant",
    "npu::npu_weight_quant_batchmatmul",
)
"""Ops that a server of language models calls; one more op is one more line here."""

COMPILED = {
    "torch_npu._C._npu_endAllocateToPool": "(device, mempool_id, /)",
    "torch_npu._C._npu_releasePool": "(device, mempool_id, /)",
    "torch_npu._C._weak_ref_tensor": "(tensor, /)",
}
"""Functions of the wheel's C++ that its own Python sources use in this way."""

ATTRIBUTES = {
    "torch.npu.NPUGraph": ("auto_dispatch_capture", "graph_dispatch_mode"),
    "torch.npu._GraphDispatchMode": ("graph_dispatch_records", "update_stream"),
    "torch.npu._GraphDispatchRecord": ("event",),
}
"""Attributes of a class's instances that we use."""

COMPOSITE = (
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)


def dump_dispatcher() -> dict[str, Any]:
    """What the dispatcher of this process says of the npu: its ops' schemas, and the aten ops that
    have a kernel of its own.
    """
    named = {
        f"{schema.name}.{schema.overload_name}".rstrip("."): str(schema)
        for schema in torch._C._jit_get_all_schemas()
    }
    return {
        "ops": {
            name: text
            for name, text in sorted(named.items())
            if name.startswith(("npu::", "atb::"))
        },
        "native": [
            name
            for name in aten_ops()
            if torch._C._dispatch_has_kernel_for_dispatch_key(name, "PrivateUse1")
        ],
    }


def aten_ops() -> list[str]:
    """Names, with overloads, of all aten ops that have any kernel."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted(
        name for name in names if name.startswith("aten::") and torch._C._dispatch_has_kernel(name)
    )


def cpu_fallback(native: set[str]) -> set[str]:
    """The aten ops that neither have an npu kernel nor are composed of others: torch_npu's fallback
    runs them on the CPU.
    """
    return {
        name
        for name in aten_ops()
        if name not in native and not any(_has_kernel(name, key) for key in COMPOSITE)
    }


def _has_kernel(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def python_signatures(wheel: Path) -> dict[str, str]:
    """Signatures of torch.npu's public functions, classes and methods, and of torchair's entry, by
    dotted name.
    """
    package = wheel / "torch_npu" / "npu"
    public = _public_names(package / "__init__.py")
    found = dict(COMPILED)
    for path in sorted(package.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in public:
                found.update(_definition(f"torch.npu.{node.name}", node))
    torchair = wheel / "torch_npu" / "dynamo" / "torchair"
    for name, path in {
        "torchair.get_npu_backend": torchair / "npu_fx_compiler.py",
        "torchair.configs.compiler_config.CompilerConfig": torchair
        / "configs"
        / "compiler_config.py",
    }.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if (
                isinstance(node, ast.FunctionDef | ast.ClassDef)
                and node.name == name.rpartition(".")[2]
            ):
                found.update(_definition(name, node))
    return dict(sorted(found.items()))


def attributes(wheel: Path) -> dict[str, list[str]]:
    """Of each class in `ATTRIBUTES`, those that its constructor or its body sets."""
    found = {}
    for name, wanted in ATTRIBUTES.items():
        for path in sorted((wheel / "torch_npu" / "npu").glob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and node.name == name.rpartition(".")[2]:
                    text = "".join(
                        ast.unparse(item)
                        for item in node.body
                        if getattr(item, "name", None) == "__init__"
                    )
                    fields = [
                        target
                        for item in node.body
                        if isinstance(item, ast.Assign)
                        for target in item.targets
                    ]
                    fields += [item.target for item in node.body if isinstance(item, ast.AnnAssign)]
                    of_class = {ast.unparse(field) for field in fields}
                    found[name] = [
                        attribute
                        for attribute in wanted
                        if attribute in of_class or f"self.{attribute} = " in text
                    ]
    return found


def updates(wheel: Path) -> dict[str, list[str]]:
    """By op, the names that `NPUGraph.update` replaces: the `UPDATE_SPECS` of torch_npu's handlers,
    for the ops of `OPS`.
    """
    found = {}
    ops = {op.rpartition(":")[2] for op in OPS}
    for path in sorted((wheel / "torch_npu" / "npu" / "_npugraph_handlers").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Assign(targets=[ast.Name(id="UPDATE_SPECS")], value=ast.Dict() as specs):
                    named = ast.literal_eval(specs)
                    found.update(
                        {
                            op: [key for *_, key in spec]
                            for op, spec in named.items()
                            if op.removesuffix(".default") in ops
                        }
                    )
    return dict(sorted((op, keys) for op, keys in found.items() if op.endswith(".default")))


def _public_names(path: Path) -> set[str]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id == "__all__"
        ):
            return set(ast.literal_eval(node.value))
    raise ValueError(f"{path} has no __all__: is it the unpacked wheel of torch_npu?")


def _definition(name: str, node: ast.FunctionDef | ast.ClassDef) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.FunctionDef):
        yield name, signature(node)
        return
    methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    constructor = methods.get("__init__") or methods.get("__new__")
    if constructor is not None and _takes_arguments(methods.get("__new__"), constructor):
        constructor = methods["__new__"]
    if constructor is not None:
        yield name, signature(constructor, method=True)
    for method in methods.values():
        if not method.name.startswith("_") and not method.decorator_list:
            yield f"{name}.{method.name}", signature(method, method=True)


def _takes_arguments(new: ast.FunctionDef | None, constructor: ast.FunctionDef) -> bool:
    return new is not None and len(new.args.args) > len(constructor.args.args)


def signature(node: ast.FunctionDef, *, method: bool = False) -> str:
    """`(a, b=1, *, c)`: names and defaults, without annotations and, for a method, without its
    first argument.
    """
    arguments = node.args
    for argument in [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ]:
        if argument is not None:
            argument.annotation = None
    if method:
        (arguments.posonlyargs or arguments.args).pop(0)
    return f"({ast.unparse(arguments)})"


def overrides(native: set[str], fallback: set[str]) -> tuple[list[str], list[str]]:
    """Functional ops that torch composes of an out= op which falls to the CPU: (those torch_npu has
    a kernel for, the others).
    """
    with_kernel, without = [], []
    for name in aten_ops():
        if (
            _has_kernel(name, "CompositeExplicitAutogradNonFunctional")
            and out_variant(name) in fallback
        ):
            (with_kernel if name in native else without).append(name)
    return with_kernel, without


def out_variant(name: str) -> str | None:
    """The op that the structured functional (or in-place) op `name` calls, e.g. aten::lgamma.out
    for aten::lgamma.
    """
    base, _, overload = name.partition(".")
    base = base.removesuffix("_")
    names = (f"{base}.{overload}_out", f"{base}.out") if overload else (f"{base}.out",)
    return next((out for out in names if torch._C._dispatch_has_kernel(out)), None)


def extract(wheel: Path, dump: dict[str, Any]) -> dict[str, Any]:
    """The committed file's contents."""
    version = re.search(
        r"'([\d.]+)'", (wheel / "torch_npu" / "version.py").read_text(encoding="utf-8")
    )
    assert version is not None, "torch_npu/version.py names no version"
    native = set(dump["native"])
    fallback = cpu_fallback(native)
    with_kernel, without = overrides(native, fallback)
    return {
        "torch_npu": version[1],
        "python": python_signatures(wheel),
        "attributes": attributes(wheel),
        "updates": updates(wheel),
        "ops": {name: dump["ops"][name] for name in OPS},
        "native_over_fallback": with_kernel,
        "cpu_fallback": sorted(fallback | set(without)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dump",
        action="store_true",
        help="write the dispatcher dump of the torch_npu installed here",
    )
    parser.add_argument("wheel", type=Path, nargs="?")
    parser.add_argument("dispatcher_dump", type=Path, nargs="?")
    arguments = parser.parse_args()
    if arguments.dump:
        import torch_npu  # noqa: F401

        result = dump_dispatcher()
    elif arguments.wheel and arguments.dispatcher_dump:
        result = extract(arguments.wheel, json.loads(arguments.dispatcher_dump.read_text()))
    else:
        parser.error("give the unpacked wheel and the dispatcher dump, or --dump")
    json.dump(result, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
