"""A model without weights of its own, for processes that trace it and compute nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ...kernels.linear import LinearKernels
from ..config.model import ModelConfig
from ..models.causal_lm import CausalLM
from ..quantization.methods import NOTHING_PACKED, Kinds
from .loader import empty_model, finish
from .parallel import WHOLE, Shard


def hollow_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    kernels: LinearKernels | None = None,
    kinds: Kinds = NOTHING_PACKED,
    shard: Shard = WHOLE,
    extend: Callable[[CausalLM], None] = lambda model: None,
) -> CausalLM:
    """Return the model with weights that all lie in the same memory, because tracing reads none.

    `extend` may give the model more tensors, on the meta device.
    """
    model = empty_model(config, dtype, torch.device("meta"), lambda _: kinds, shard)
    finish(model, kernels, progress=False)
    extend(model)
    tensors = [*model.parameters(), *model.buffers()]
    size = max(tensor.nbytes for tensor in tensors)
    memory = torch.empty(size, dtype=torch.uint8, device=device)
    placed: dict[torch.Tensor, torch.Tensor] = {}
    for tensor in tensors:
        data = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        is_weight = isinstance(tensor, nn.Parameter)
        placed[tensor] = nn.Parameter(data, requires_grad=False) if is_weight else data
    for module in model.modules():
        for found in (module.named_parameters, module.named_buffers):
            for name, tensor in list(found(recurse=False, remove_duplicate=False)):
                setattr(module, name, placed[tensor])
    return model
