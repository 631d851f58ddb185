"""Linear layers whose weights a device packs."""

from __future__ import annotations

import torch

from ..attention import AttentionBackend
from ..linear import LinearKernels
from .device import Device


class LinearPacking(Device):
    """The packed layouts of weights: those of `LinearKernels`, which a weight is loaded into, and
    that of `packed_linear`, which replaces `linear` in pieces.

        op = packing.packed_linear()
        y = op(x, packing.pack_linear_weight(weight), None)

    Attributes:
        adapter_panel: Columns of a panel of adapters' matrices (`kernels.lora`). None: one panel
            has all columns.
    """

    adapter_panel: int | None = None

    def linear_kernels(
        self, dtype: torch.dtype, backend: AttentionBackend, cpu_activations: str = "auto"
    ) -> LinearKernels | None:
        """Return kernels that multiply by packed weights, which are packed when loaded. None: torch
        multiplies by the weights as they are.

        `backend` is the chosen attention backend. `cpu_activations` is "bf16", "int8" (in groups,
        if a CPU multiplies by weights in blocks), or "auto".
        """
        return None

    def packs_linear(self, weight_bytes: int) -> bool:
        """Return whether pieces use `packed_linear` in place of `linear`. Ask once per model, and
        pass the answer to the code that makes its pieces.

        `weight_bytes` is the size of all weights that would be packed. The unpacked weights stay in
        memory too, so a machine may have too little.
        """
        return False

    def packed_linear(self) -> torch._ops.OpOverload | None:
        """Return an op (x, weight, bias) that is faster than `linear` on a weight from
        `pack_linear_weight`, or None.
        """
        return None

    def pack_linear_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Return weight [out, in] bfloat16 in the layout of `packed_linear`."""
        raise NotImplementedError
