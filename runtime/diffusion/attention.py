"""The attention backend of a diffusion transformer: one of diffusers' backends, tried before the
first request. If it does not run here, torch's attention computes the transformer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from ...kernels.platform.device import Device

log = logging.getLogger(__name__)

_TOKENS = 64  # Tokens of the trial, more than any kernel's smallest tile.


def choose_attention(
    models: Mapping[str, torch.nn.Module], asked: str, platform: Device, *, masked: bool
) -> None:
    """Let `models` compute attention by the backend `asked`, one of `ATTENTION_BACKENDS`. "auto"
    changes nothing. `masked`: some tokens may be padding.

    Warn, and keep torch's attention for a model, if the backend is not installed or does not
    support the model's heads, its number format, its ranks or the device.
    """
    if asked == "auto":
        return
    from diffusers.models import attention_dispatch

    names = {each.value.lstrip("_"): each for each in attention_dispatch.AttentionBackendName}
    for name, model in models.items():
        try:
            if asked not in names:
                raise ValueError("this version of diffusers does not have it")
            # Without this context, diffusers would set the backend for other models of the process
            # too.
            with attention_dispatch.attention_backend("native"):
                any_model: Any = model
                any_model.set_attention_backend(names[asked].value)
            _try(any_model, names[asked], platform, masked)
        except Exception as error:
            # Foreign kernels raise errors of any type.
            reset = getattr(model, "reset_attention_backend", None)
            if reset is not None:
                reset()
            log.warning(
                "--attention-backend %s cannot run %s here (%s): torch's attention computes it",
                asked, name, " ".join(str(error).split())[:300],
            )  # fmt: skip


def _try(model: Any, backend: Any, platform: Device, masked: bool) -> None:
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    processors = [getattr(module, "processor", None) for module in model.modules()]
    if backend not in [getattr(each, "_attention_backend", None) for each in processors]:
        raise ValueError(f"{type(model).__name__} does not let it be chosen")
    config = model.config
    heads, width = config.num_attention_heads, config.attention_head_dim
    x = torch.zeros(1, _TOKENS, heads, width, dtype=model.dtype, device=platform.device())
    with torch.no_grad():
        dispatch_attention_fn(x, x, x, backend=backend)
        if masked:
            mask = torch.ones(1, 1, 1, _TOKENS, dtype=torch.bool, device=x.device)
            try:
                dispatch_attention_fn(x, x, x, attn_mask=mask, backend=backend)
            except (ValueError, RuntimeError) as error:
                raise ValueError(f"{error} One rank and --max-batch-size 1 need no mask") from None
    platform.synchronize()
