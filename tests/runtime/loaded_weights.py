"""The weights of a loaded model whose layers are not packed, under the names of its checkpoint."""

from __future__ import annotations

import torch

from piecework.runtime.layers.linear import Linear, part_name
from piecework.runtime.models.llama import LlamaForCausalLM


def loaded_weights(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """Fused ones cut into their parts; a head that is tied to the embedding is not there."""
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if isinstance(module, Linear):
                for part in module.parts:
                    found[f"{part_name(prefix, part)}.{kind}"] = parameter[module.rows(part)]
            else:
                found[f"{prefix}.{kind}"] = parameter
    return {name: tensor for name, tensor in found.items() if name not in model.tied_weights}
