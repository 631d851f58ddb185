"""Builds the model of a folder by transformers, and states in one sentence why that fails."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from ..config.model import check_size
from ..files.folder import read_json
from ..layers.linear import Linear

logger = logging.getLogger(__name__)

# The name of this package's attention in the attention interface of transformers.
ATTENTION = "piecework"


class RowsLinear(Linear):
    """A linear layer of x [..., in]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(0, -2)).view(*x.shape[:-1], -1)


def own_layers(model: nn.Module) -> None:
    """Replace the linear layers of a model of transformers, and its buffers that are weights."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            biased = module.bias is not None
            own = RowsLinear(module.in_features, module.out_features, bias=biased)
            model.set_submodule(name, own)
        for kind, buffer in list(module.named_buffers(recurse=False)):
            # A persistent buffer is a weight that transformers does not train. Other buffers, such
            # as positions, are in no checkpoint.
            if kind not in module._non_persistent_buffers_set and buffer.is_floating_point():
                delattr(module, kind)
                module.register_parameter(kind, nn.Parameter(buffer, requires_grad=False))


def build(folder: Path, *, trusted: bool) -> Any:
    """Return the model without weights, with torch's default dtype and device.

    Raises `ValueError` with a reason. The original exception is logged.
    """
    config = _read_config(folder, trusted=trusted)
    name = (config.architectures or [config.model_type])[0]
    count = getattr(config.get_text_config(), "num_hidden_layers", None)
    if type(count) is not int:
        raise ValueError(f"{name} is not a stack of like layers; choose another model")
    check_size("num_hidden_layers", count)
    if _is_of_transformers(config) and type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(
            f"{name} is not a decoder of text alone, and its text is not served; choose another "
            "model"
        )
    try:
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(
                config,
                trust_remote_code=trusted,
                attn_implementation=ATTENTION,
                dtype=torch.get_default_dtype(),
            )
        model.tie_weights()
        return model.eval()
    except Exception as error:
        # The code of any model, or of the folder, may raise any exception.
        logger.debug("transformers cannot make %s", name, exc_info=True)
        raise ValueError(_why_not_made(name, config, error)) from None


def _read_config(folder: Path, *, trusted: bool) -> Any:
    """Return the folder's config.json as transformers reads it. Raises `ValueError`."""
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
    except Exception as error:
        logger.debug("transformers cannot read %s", folder, exc_info=True)
        if "trust_remote_code" in str(error):
            raise ValueError(
                "it brings code of its own; add --trust-remote-code if you trust it"
            ) from None
        kind = read_json(folder / "config.json").get("model_type")
        if kind not in CONFIG_MAPPING:
            reason = f"transformers {transformers.__version__} has no model_type {kind!r:.60}"
            raise ValueError(f"{reason}; choose another model") from None
        raise ValueError(
            f"transformers takes it for no valid {kind}; download the model again"
        ) from None


def _is_of_transformers(config: Any) -> bool:
    """Whether the code of the model is in transformers, not in the folder."""
    return type(config).__module__.startswith("transformers.")


def _why_not_made(name: str, config: Any, error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return "it brings code of its own; add --trust-remote-code if you trust it"
    if isinstance(error, ImportError):
        library = getattr(error, "name", None) or "a library that is not installed"
        return f"{name} needs {library}, so it is not supported; choose another model"
    if _is_of_transformers(config):
        kind = AutoModelForCausalLM._model_mapping[type(config)]
        if not getattr(kind, "_supports_attention_backend", True):
            return (
                f"{kind.__name__} attends in its own way, not by transformers' attention "
                "interface, which is not supported; choose another model"
            )
    return (
        f"transformers {transformers.__version__} cannot make {name} from the members of "
        "config.json; download the model again, or choose another one"
    )
