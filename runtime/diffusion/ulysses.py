"""Ulysses: a transformer's tokens split over ranks (DeepSpeed-Ulysses, arXiv:2309.14509).

Outside of attention each rank has a part of the tokens. For attention the ranks exchange these for
all tokens of a part of the heads, and back. diffusers does this for models that list which of their
inputs are tokens (`_cp_plan`). Text tokens are split like image tokens, because they pass through
the same layers. Text tokens that Wan only attends to are not split.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...kernels.collectives import CollectiveError

# The tested version. The splitting is new, and older versions may ignore masks.
_DIFFUSERS = (0, 42)


def check_version() -> None:
    """Raise `ValueError` if diffusers is too old to split tokens."""
    try:
        found = version("diffusers")
    except PackageNotFoundError:
        return  # Loading reports this.
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < _DIFFUSERS:
        least = ".".join(map(str, _DIFFUSERS))
        raise ValueError(
            f"--ulysses-degree needs diffusers {least} or newer, and this is {found}; run: pip "
            "install -U diffusers"
        )


def check_heads(folder: Path, ranks: int) -> None:
    """Raise `ValueError` if `ranks` does not divide the heads of a transformer of the pipeline in
    `folder`. No weights are loaded yet.
    """
    for file in sorted(folder.glob("transformer*/config.json")):
        try:
            heads = json.loads(file.read_text()).get("num_attention_heads")
        except (OSError, ValueError, AttributeError) as error:
            raise ValueError(f"{file} cannot be read ({error}); is the download whole?") from None
        if isinstance(heads, int) and heads % ranks:
            fitting = ", ".join(str(count) for count in range(1, heads + 1) if not heads % count)
            raise ValueError(
                f"--ulysses-degree {ranks} does not divide the {heads} attention heads of "
                f"{file.parent}; choose one of {fitting}"
            )


def split_tokens(models: Mapping[str, torch.nn.Module], device_type: str) -> None:
    """Let each rank of torch.distributed's default group compute its part of the tokens of
    `models`. Every rank passes the whole input and gets the whole output.

    The numbers of tokens must be multiples of the number of ranks. Raise `ValueError` if diffusers
    cannot split a model.
    """
    from diffusers.hooks.context_parallel import apply_context_parallel
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig

    size = dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh(device_type, (size,), mesh_dim_names=("ulysses",))
    for name, model in models.items():
        plan: Any = getattr(model, "_cp_plan", None)
        if plan is None:
            raise ValueError(
                f"--ulysses-degree: diffusers does not know how to split {type(model).__name__} "
                f"({name}); leave it out"
            )
        # `enable_parallelism` takes its device from torch.accelerator, which does not exist on a
        # CPU. The default group is used with its timeout.
        config = ContextParallelConfig(ulysses_degree=size)
        config._flattened_mesh = config._ulysses_mesh = mesh
        parallel = ParallelConfig(context_parallel_config=config)
        for module in model.modules():
            processor: Any = getattr(module, "processor", None)
            if hasattr(processor, "_parallel_config"):
                processor._parallel_config = parallel
        apply_context_parallel(model, config, plan)


@contextmanager
def collective_errors() -> Iterator[None]:
    """Raise `CollectiveError` for errors of torch.distributed inside the block: a rank is gone or
    late.
    """
    try:
        yield
    except RuntimeError as error:
        # gloo raises plain errors that begin with the place in its source.
        text = str(error)
        if not isinstance(error, dist.DistError) and "gloo" not in text:
            raise
        reason = text.rpartition("] ")[2] if text.startswith("[") else text
        raise CollectiveError(f"a rank does not take part in attention ({reason})") from error
