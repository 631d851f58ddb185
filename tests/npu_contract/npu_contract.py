"""Checks code against torch_npu's interface without torch_npu: names, arity and keywords in
sources, aten ops in graphs.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

EXTRACT = Path(__file__).with_name("torch_npu.json")
ROOTS = ("torch_npu", "torch.npu", "torch.ops.npu", "torch.ops.atb", "torchair")


class Problem(NamedTuple):
    """A use of torch_npu that torch_npu would reject."""

    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


@cache
def contract() -> dict[str, Any]:
    """The committed extract: `python` signatures, `attributes`, `updates` of graphs, `ops` schemas,
    `native_over_fallback` and `cpu_fallback` aten ops.
    """
    extract: dict[str, Any] = json.loads(EXTRACT.read_text())
    return extract


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """What a function takes. `required`: how many of `positional` have no default."""

    positional: list[str]
    required: int
    keyword_only: list[str]
    keyword_required: list[str]
    more_positional: bool = False
    more_keywords: bool = False

    @classmethod
    def of_signature(cls, text: str) -> Parameters:
        """From `(a, b=1, *, c)`."""
        function = ast.parse(f"def f{text}: ...").body[0]
        assert isinstance(function, ast.FunctionDef)
        given = function.args
        positional = [argument.arg for argument in [*given.posonlyargs, *given.args]]
        return cls(
            positional=positional,
            required=len(positional) - len(given.defaults),
            keyword_only=[argument.arg for argument in given.kwonlyargs],
            keyword_required=[
                a.arg
                for a, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
                if default is None
            ],
            more_positional=given.vararg is not None,
            more_keywords=given.kwarg is not None,
        )

    @classmethod
    def of_schema(cls, text: str) -> Parameters:
        """From an op's schema as the dispatcher prints it."""
        arguments = torch._C.parse_schema(text).arguments
        positional = [a for a in arguments if not a.kwarg_only]
        keyword_only = [a for a in arguments if a.kwarg_only]
        return cls(
            positional=[a.name for a in positional],
            required=sum(not a.has_default_value() for a in positional),
            keyword_only=[a.name for a in keyword_only],
            keyword_required=[a.name for a in keyword_only if not a.has_default_value()],
        )

    def reject(self, call: ast.Call) -> str | None:
        """Why this call would raise TypeError, or None. Arguments behind `*` and `**` are
        trusted.
        """
        starred = any(isinstance(argument, ast.Starred) for argument in call.args)
        given = [keyword.arg for keyword in call.keywords]
        if not starred and len(call.args) > len(self.positional) and not self.more_positional:
            return f"{len(call.args)} positional arguments, takes {len(self.positional)}"
        unknown = [
            k for k in given if k is not None and k not in self.positional + self.keyword_only
        ]
        if unknown and not self.more_keywords:
            return f"no keyword {unknown[0]!r}"
        twice = [k for k in given if k in self.positional[: len(call.args)]]
        if twice:
            return f"{twice[0]!r} is given twice"
        if starred or None in given:
            return None
        wanted = self.positional[len(call.args) : self.required] + self.keyword_required
        missing = [name for name in wanted if name not in given]
        return f"{missing[0]!r} is missing" if missing else None


def check_sources(paths: Iterable[Path]) -> list[Problem]:
    """Problems of all uses of torch_npu, torch.npu, torch.ops.npu, torch.ops.atb and torchair in
    Python files.
    """
    return [problem for path in paths for problem in _check_file(path)]


def _check_file(path: Path) -> Iterator[Problem]:
    text = path.read_text(encoding="utf-8")
    if not any(root.rpartition(".")[2] in text for root in ROOTS):
        return
    tree = ast.parse(text, filename=str(path))
    names = _imported_names(tree)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), level=0):
                uses = [(f"{module}.{alias.name}", None) for alias in node.names]
            case ast.Attribute() | ast.Name(ctx=ast.Load()) if id(node) not in inner:
                uses = [(_dotted_name(node, names), calls.get(id(node)))]
            case _:
                continue
        for name, call in uses:
            message = _reject(name, call) if name else None
            if message:
                yield Problem(path, node.lineno, message)


def _imported_names(tree: ast.Module) -> dict[str, str]:
    """What a file's names stand for: imports, and plain assignments of their attributes such as
    `npu = torch.npu`.
    """
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                names.update(
                    {
                        alias.asname or alias.name.partition(".")[0]: alias.name
                        for alias in node.names
                        if alias.asname
                    }
                )
                names.update(
                    {
                        alias.name.partition(".")[0]: alias.name.partition(".")[0]
                        for alias in node.names
                        if not alias.asname
                    }
                )
            case ast.ImportFrom(module=str(module), level=0):
                names.update(
                    {alias.asname or alias.name: f"{module}.{alias.name}" for alias in node.names}
                )
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute() as value):
                dotted = _dotted_name(value, names)
                if dotted and _is_ours(dotted):
                    names[name] = dotted
    return names


def _dotted_name(node: ast.expr, names: dict[str, str]) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in names:
        return None
    return ".".join([names[node.id], *reversed(parts)])


def _is_ours(name: str) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in ROOTS)


def _reject(name: str, call: ast.Call | None) -> str | None:
    """What is wrong with one use of a dotted name, None if nothing or if the name is none of
    ours.
    """
    if not _is_ours(name):
        return None
    name = (
        name.replace("torch_npu.npu", "torch.npu", 1) if _is_within(name, "torch_npu.npu") else name
    )
    known = contract()["python"]
    if name in ROOTS or any(other.startswith(f"{name}.") for other in known if name not in known):
        return None
    candidates = [Parameters.of_schema(schema) for schema in _schemas(name)]
    if name in known:
        candidates.append(Parameters.of_signature(known[name]))
    if not candidates:
        return (
            f"{name}: not in torch_npu {contract()['torch_npu']}, or not in the extract yet "
            "(see extract.py)"
        )
    reasons = [parameters.reject(call) for parameters in candidates] if call else [None]
    return None if None in reasons else f"{name}: {reasons[0]}"


def _is_within(name: str, root: str) -> bool:
    return name == root or name.startswith(f"{root}.")


def _schemas(name: str) -> list[str]:
    """Schemas of the op that torch.ops.npu.OP, torch_npu.OP or one of these with an overload
    means.
    """
    for root, namespaces in {
        "torch.ops.npu": ["npu"],
        "torch.ops.atb": ["atb"],
        "torch_npu": ["npu", "atb"],
    }.items():
        if not _is_within(name, root):
            continue
        base, _, overload = name.removeprefix(f"{root}.").partition(".")
        wanted = {f"{namespace}::{base}" for namespace in namespaces}
        return [
            schema
            for op, schema in contract()["ops"].items()
            if op.partition(".")[0] in wanted
            and overload in ("", op.partition(".")[2] or "default")
        ]
    return []


def assert_no_cpu_fallback(graph_module: torch.fx.GraphModule) -> None:
    """Raises AssertionError if an aten op of a graph, after decomposition, is one that torch_npu
    runs on the CPU.

    Such an op waits for the device and so breaks a capture. A graph of Dynamo's (torch functions
    and methods) is run on its placeholders' fake tensors (`meta["example_value"]` or
    `meta["val"]`), so it must come as the compiler got it.
    """
    fallback = set(contract()["cpu_fallback"])
    found = sorted(op for op in aten_ops(graph_module) if op in fallback)
    assert not found, (
        f"torch_npu {contract()['torch_npu']} runs these on the CPU, which no graph can capture: "
        f"{', '.join(found)}"
    )


def aten_ops(graph_module: torch.fx.GraphModule) -> set[str]:
    """Names such as "aten::index.Tensor" of the aten ops that running a graph reaches."""
    called = {
        node.target
        for node in graph_module.graph.nodes
        if node.op in ("call_function", "call_method", "call_module")
    }
    if all(isinstance(target, torch._ops.OpOverload) for target in called):
        return {target.name() for target in called if target.namespace == "aten"}
    examples = [_example(node) for node in graph_module.graph.nodes if node.op == "placeholder"]
    modes = {
        example.fake_mode
        for example in examples
        if isinstance(example, torch._subclasses.FakeTensor)
    }
    mode = modes.pop() if modes else FakeTensorMode()
    # Weights that a graph holds as attributes are real tensors.
    with patch.object(mode, "allow_non_fake_inputs", True), mode, _Recorder() as recorder:
        graph_module(*examples)
    return recorder.names


def _example(node: torch.fx.Node) -> Any:
    value = node.meta.get("example_value", node.meta.get("val"))
    assert value is not None, (
        f"placeholder {node.name} has neither meta['example_value'] nor meta['val']"
    )
    return value


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":
            self.names.add(func.name())
        return func(*args, **(kwargs or {}))
