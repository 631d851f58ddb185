"""Names of tensors in GGUF files and in Hugging Face's checkpoints."""

from __future__ import annotations

import re

_LAYER = re.compile(r"\bblk\.(\d+)\.")


def checkpoint_name(name: str, names: dict[str, str]) -> str:
    """Return the name in a Hugging Face checkpoint, by a model's `gguf_names`.

    `blk.3.attn_q.weight` becomes `model.layers.3.self_attn.q_proj.weight`. Unknown names are
    returned as they are.
    """
    stem, _, kind = name.rpartition(".")
    pattern = _LAYER.sub("blk.{}.", stem)
    numbers = _LAYER.findall(stem)
    return f"{names[pattern].format(*numbers)}.{kind}" if pattern in names else name
