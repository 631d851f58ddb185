"""Kernels of a device beside those of attention and of linear layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from .. import reference
from ..attention import AttentionBackend, KVLayout
from ..step_parts import StepKernels
from .device import Device


class DeviceKernels(Device):
    """Versions of the ops that layers call, and kernels that run whole steps.

    kernels.begin_trials()  # while weights are loaded
    kernels.end_trials()
    for name, version in kernels.op_versions().items(): ...
    """

    # Whether kernels are compiled at their first launch, which should happen before a request
    # waits.
    compiles_kernels: bool = False

    def begin_trials(self) -> None:
        """Start the trials of libraries' kernels, if they are needed, so that they are ready when
        the weights are loaded.
        """

    def end_trials(self) -> None:
        """End the trials and free their memory."""

    def op_versions(self) -> Mapping[str, Any]:
        """Return all versions of the ops that layers call, by name, for comparison.

        A version has some of the ops of `reference`. If an op returns None, it does not support
        that call.
        """
        return {"torch": reference}

    def step_kernels(
        self,
        model: torch.nn.Module,
        backend: AttentionBackend,
        layouts: Sequence[KVLayout],
        k_cache: Sequence[torch.Tensor],
        v_cache: Sequence[torch.Tensor],
        second: Sequence[bool] = (),
    ) -> StepKernels | None:
        """Return kernels that run whole decodes of `model` faster than op by op, or None. The
        tensors must stay at their addresses.

        `backend` is the chosen attention backend. `layouts`, `k_cache` and `v_cache` have one entry
        per layer. `second` tells whether its pages are those of `AttentionMetadata.window`.
        """
        return None

    def leave_out_kernels(self) -> bool:
        """Compute without kernels that must be compiled first, in this process.

        Return whether a process that is started later has better ones.
        """
        return False

    def prepare_kernels(
        self, names: Callable[[], Iterable[str]], *, at_low_priority: bool = False
    ) -> bool:
        """Compile missing kernels, together with those that the engine will call.

        `names` returns the formats of weights (names of GGUF files), the values of
        `--kv-cache-dtype` and `--dtype`, and "ranks" if there are several ranks. Return whether
        this process has the device's kernels.
        """
        return True

    def make_batch_invariant(self) -> bool:
        """Make `step_kernels` and products of this process give a row the same bits whatever rows
        are beside it, if each token is a request of its own. Return False if this device has no
        such kernels.
        """
        return False
