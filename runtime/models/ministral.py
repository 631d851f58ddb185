"""Ministral (Mistral AI): Mistral with a sliding window in the layers that the
configuration lists.
"""

from __future__ import annotations

from .mistral import MistralForCausalLM

ARCHITECTURE = "MinistralForCausalLM"
MODEL_TYPE = "ministral"


class MinistralForCausalLM(MistralForCausalLM):
    """The base class already reads `layer_types`."""
