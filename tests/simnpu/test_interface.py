"""The simulated torch.npu has torch_npu's interface: the committed extract holds for all that it
offers.
"""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import npu_contract
import torch
from simnpu_device.graphs import UPDATABLE


def parameters(signature: inspect.Signature, *, method: bool) -> list[tuple[str, Any]]:
    values = list(signature.parameters.values())[1 if method else 0 :]
    return [(value.name, value.kind) for value in values]


def of_text(text: str) -> list[tuple[str, Any]]:
    namespace: dict[str, Any] = {}
    exec(f"def function{text}: ...", namespace)
    return parameters(inspect.signature(namespace["function"]), method=False)


def test_functions_and_methods_have_torch_npus_signatures(simnpu: Any) -> None:
    checked = 0
    for name, text in npu_contract.contract()["python"].items():
        if not name.startswith("torch.npu."):
            continue
        owner: Any = torch.npu
        *path, last = name.removeprefix("torch.npu.").split(".")
        for part in path:
            owner = getattr(owner, part, None)
        value = getattr(owner, last, None)
        if value is None:
            continue
        assert parameters(inspect.signature(value), method=bool(path)) == of_text(text), name
        checked += 1
    assert checked > 50


def test_nothing_is_offered_that_torch_npu_has_not(simnpu: Any) -> None:
    known = npu_contract.contract()["python"]
    offered = {f"torch.npu.{name}" for name in vars(torch.npu) if not name.startswith("_")}
    assert offered <= set(known)


def test_ops_have_the_extracts_schemas(simnpu: Any) -> None:
    schemas = {
        schema.name: str(schema)
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith(("npu::", "atb::"))
    }
    assert schemas == npu_contract.contract()["ops"]


def test_torch_npu_can_be_imported(simnpu: Any) -> None:
    import torch_npu
    from torch_npu._C import _weak_ref_tensor

    assert torch_npu.npu is torch.npu and importlib.util.find_spec("torch_npu") is not None
    x = torch.ones(3, device="npu")
    assert _weak_ref_tensor(x).data_ptr() == x.data_ptr()
    assert torch_npu.npu_swiglu(torch.zeros(2, 4, device="npu")).shape == (2, 2)


def test_dispatch_is_torch_npus_where_it_matters(simnpu: Any) -> None:
    """Ops that torch_npu has a kernel for are launched whole; the ones it lacks are known to run on
    the CPU.
    """
    for name in npu_contract.contract()["native_over_fallback"]:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "PrivateUse1")


def test_graphs_have_the_attributes_that_we_use(simnpu: Any) -> None:
    graph = torch.npu.NPUGraph()
    assert all(
        hasattr(graph, name) for name in npu_contract.contract()["attributes"]["torch.npu.NPUGraph"]
    )


def test_the_ops_that_are_updated_are_torch_npus(simnpu: Any) -> None:
    assert UPDATABLE.keys() == npu_contract.contract()["updates"].keys()
