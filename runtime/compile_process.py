"""Compiles a model's pieces into the cache, as a process of its own, so that serving goes on meanwhile.

`python -m piecework.runtime.compile_process JOB`: JOB is the JSON that `start` makes. Exit code 0 where all is in the cache.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import asdict

import torch
from tqdm import tqdm

from ..kernels.detect import detect
from .config import EngineConfig
from .layers.attention import register_attention
from .model_config import ModelConfig
from .pieces import install, installer
from .weights.loader import hollow_model
from .weights.packing import Kinds

_NICENESS = 10


def start(config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, kinds: Kinds) -> subprocess.Popen[bytes]:
    """Begin to compile; the process works at a low priority and needs no weights. `kinds`: the packed layers."""
    parts = {"config": asdict(config), "model": asdict(model_config), "dtype": str(dtype).removeprefix("torch."), "kinds": dict(kinds)}
    job = json.dumps(parts)
    return subprocess.Popen([sys.executable, "-m", "piecework.runtime.compile_process", job], stdin=subprocess.DEVNULL)


def main(argv: list[str]) -> int:
    job = json.loads(argv[0])
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    config, model_config, dtype = EngineConfig(**job["config"]), ModelConfig(**job["model"]), getattr(torch, job["dtype"])
    platform = detect(config.device)
    platform.set_up(config.num_threads)
    register_attention(platform.dispatch_key)
    kernels = platform.linear_kernels(dtype, platform.attention_backend(config.attention_backend))
    model = hollow_model(model_config, dtype, platform.device(), kernels, job["kinds"])
    with tqdm(desc="compiling pieces", unit=" pieces", file=sys.stderr, leave=False) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        install(installer(config, platform, progress), model, model_config, dtype, job["kinds"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
