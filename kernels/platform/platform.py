"""`Platform`: everything that differs between devices, as one class of several interfaces.

| interface | what a caller gets |
|---|---|
| `device.Device` | the device, its dtypes, its queue of work |
| `memory.Memory` | free memory, tensors of zeros, failed allocations |
| `graph_capture.GraphCapture` | graphs, their pools and streams |
| `attention_choice.AttentionChoice` | attention backends, and which layers each computes |
| `linear_packing.LinearPacking` | packed weights |
| `compilation.Compilation` | compilers of pieces, and the rewrites that are faster |
| `rank_groups.RankGroups` | the group of an engine's ranks |
| `device_kernels.DeviceKernels` | versions of ops, kernels of whole steps |
| `step_defaults.StepDefaults` | values of flags that are left out |

Code that needs one part of a platform declares that interface. `detect` chooses the platform of a
process.
"""

from __future__ import annotations

from .attention_choice import AttentionChoice
from .compilation import Compilation
from .device_kernels import DeviceKernels
from .graph_capture import GraphCapture
from .rank_groups import RankGroups
from .step_defaults import StepDefaults


class Platform(GraphCapture, AttentionChoice, Compilation, RankGroups, DeviceKernels, StepDefaults):
    """One kind of device. Subclasses override what differs. No other code asks which machine this
    is.
    """
