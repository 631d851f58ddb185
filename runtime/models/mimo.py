"""MiMo (arXiv:2505.07608): Qwen2 with a layer that predicts one token more.

transformers does not have the model. What the layer computes is known from vLLM's `mimo_mtp.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..layers.linear import StoredTensor
from .checkpoint import renamed, reordered, within_layers
from .qwen2 import Qwen2ForCausalLM

ARCHITECTURE = "MiMoForCausalLM"
MODEL_TYPE = "mimo"

# Names of the layer that predicts one token more, as `NextLayer` has them.
_NEXT_LAYER = {
    r"^model\.mtp_layers\.0\.token_layernorm\.": "enorm.",
    r"^model\.mtp_layers\.0\.hidden_layernorm\.": "hnorm.",
    r"^model\.mtp_layers\.0\.input_proj\.": "eh_proj.",
    r"^model\.mtp_layers\.0\.final_layernorm\.": "shared_head.norm.",
    r"^model\.mtp_layers\.0\.": "",
}


class MiMoForCausalLM(Qwen2ForCausalLM):
    """The layer that predicts one token more is loaded for speculation only. See `NextLayer`."""

    has_next_layer = next_layer_reads_sums = True

    @staticmethod
    def checkpoint_tensors(config: Any, tensors: Sequence[StoredTensor]) -> Sequence[StoredTensor]:
        numbers = re.findall(r"^model\.layers\.(\d+)\.", "\n".join(t.name for t in tensors), re.M)
        prefix = f"model.layers.{1 + max(map(int, numbers), default=-1)}."
        names = {pattern: prefix + name for pattern, name in _NEXT_LAYER.items()}
        return [
            # The projection reads the hidden state before the embedding.
            reordered(tensor, 1, [1, 0], config.hidden_size)
            if tensor.name == f"{prefix}eh_proj.weight"
            else tensor
            for tensor in within_layers(renamed(tensors, names), config.num_layers)
        ]
