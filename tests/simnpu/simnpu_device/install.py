"""Puts the simulated NPU in place: device `npu`, `torch.npu`, `import torch_npu`, the ops, and the
simulator's own controls.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from types import ModuleType
from typing import Any

import torch
from npu_contract import assert_no_cpu_fallback, contract

from . import device, graphs, ops, streams
from .extension import extension
from .quantized_ops import RUN_ON_THE_HOST

TORCH_NPU = (device, graphs, streams)
"""Modules with torch.npu's functions and classes."""
# A device's own convolution, which has a kernel on an NPU and raises elsewhere.
_CONVOLUTION = "aten::convolution_overrideable"
TORCH_ASKS_FOR = ("_is_in_bad_fork", "_lazy_init")
"""Functions of a device's module that torch itself calls."""


class Simulator:
    """What a test may ask of the simulated NPU beyond torch_npu's interface; the `simnpu` fixture
    gives it.
    """

    assert_no_cpu_fallback = staticmethod(assert_no_cpu_fallback)

    def __init__(self) -> None:
        self.device = torch.device("npu", 0)

    def launches(self, npu_graph: Any) -> list[str]:
        """Names of the ops that a captured graph launches, in order."""
        names: list[str] = npu_graph._launches()
        return names

    def weak_ref_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory as a tensor that does not keep it alive."""
        reference: torch.Tensor = extension().weak_reference(tensor)
        return reference

    @property
    def live_graphs(self) -> int:
        """Captured graphs that exist in the process."""
        return int(extension().live_graphs())

    @contextmanager
    def strict_addresses(self) -> Iterator[None]:
        """Inside, a replay that touches memory freed since the capture raises RuntimeError.

        Outside it reads poison or another tensor's values, or writes over them, as hardware does.
        """
        with self.limits(strict_addresses=True):
            yield

    @contextmanager
    def limits(self, **settings: float) -> Iterator[None]:
        """Inside, other limits hold: `total_memory` bytes, `graph_limit` graphs, `hang_seconds`
        that a replay waits for its update.
        """
        before = {name: getattr(extension().settings, name) for name in settings}
        try:
            for name, value in settings.items():
                setattr(extension().settings, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(extension().settings, name, value)

    @property
    def waits(self) -> int:
        """How often the host has waited for the device so far."""
        return int(extension().waits())

    @contextmanager
    def no_waiting(self) -> Iterator[None]:
        """Inside, whatever makes the host wait for the device raises RuntimeError: reading its
        values, synchronizing.
        """
        extension().forbid_waiting(True)
        try:
            yield
        finally:
            extension().forbid_waiting(False)

    def clean_up(self) -> None:
        """Ends what a test may leave behind: a capture, a pool that records, an update, a current
        stream.
        """
        extension().abort_capture()
        extension().empty_cache()


@cache
def install() -> Simulator:
    """Builds and registers the device, once in a process: torch can name a PrivateUse1 backend only
    once.
    """
    assert not hasattr(torch, "npu"), "this process has a torch.npu already"
    extension()
    torch.utils.rename_privateuse1_backend("npu")
    npu, package, compiled = (
        _module(name) for name in ("torch_npu.npu", "torch_npu", "torch_npu._C")
    )
    for module in TORCH_NPU:
        for name, value in vars(module).items():
            if f"torch.npu.{name}" in contract()["python"] or name in TORCH_ASKS_FOR:
                setattr(npu, name, value)
    npu.NPUGraph = graphs.make_graph_class()  # type: ignore[attr-defined]
    compiled._weak_ref_tensor = extension().weak_reference  # type: ignore[attr-defined]
    compiled._npu_endAllocateToPool = lambda device, pool: extension().end_recording(pool)  # type: ignore[attr-defined]
    compiled._npu_releasePool = lambda device, pool: extension().release_pool(pool)  # type: ignore[attr-defined]
    package.npu, package._C, package.__version__ = (
        npu,
        compiled,
        f"{contract()['torch_npu']}+simulated",
    )  # type: ignore[attr-defined]
    torch._register_device_module("npu", npu)
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_storage=True
    )
    extension().set_cpu_fallbacks(set(contract()["cpu_fallback"]) | RUN_ON_THE_HOST)
    extension().register_launch([*contract()["native_over_fallback"], _CONVOLUTION])
    library = torch.library.Library("aten", "IMPL")
    library.impl(_CONVOLUTION.removeprefix("aten::"), torch.convolution, "CPU")
    _libraries()["aten"] = library
    _define_ops(package)
    return Simulator()


def _module(name: str) -> ModuleType:
    module = ModuleType(name)
    # Without a spec importlib.util.find_spec raises, by which libraries look for torch_npu.
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    sys.modules[name] = module
    return module


@cache
def _libraries() -> dict[str, torch.library.Library]:
    """Held for ever: a library that dies takes its ops with it."""
    return {namespace: torch.library.Library(namespace, "FRAGMENT") for namespace in ("npu", "atb")}


def _define_ops(package: ModuleType) -> None:
    """torch.ops.npu and torch.ops.atb with torch_npu's schemas, and the same functions in
    torch_npu.
    """
    extension().set_host_arguments(ops.HOST_ARGUMENTS)
    for full_name, kernel in ops.KERNELS.items():
        namespace, name = full_name.split("::")
        library = _libraries()[namespace]
        library.define(contract()["ops"][full_name].removeprefix(f"{namespace}::"))
        library.impl(name, _for_launches_only(full_name, kernel), "CPU")
        if full_name in ops.SHAPES:
            library.impl(name, ops.SHAPES[full_name], "Meta")
        setattr(package, name, getattr(getattr(torch.ops, namespace), name))


def _for_launches_only(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel computes on the host for the device; called on host tensors the op has no kernel,
    as in torch_npu.
    """

    @wraps(kernel)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not extension().is_executing():
            raise NotImplementedError(
                f"Could not run '{name}' with arguments from the 'CPU' backend"
            )
        return kernel(*args, **kwargs)

    return checked
