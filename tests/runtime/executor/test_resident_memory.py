"""What an engine keeps in memory beside its weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gguf_models import Kind, write_gguf
from tiny_models import make_tiny_model

from piecework.kernels.platform.platform import Platform
from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.engine.build import build_engine

MIB = 2**20
_LEFT = 16 * MIB
"""Tables, modules, and a part of the last huge page."""
_LOADS = """
import sys

import psutil

from piecework.runtime.config.engine import EngineConfig
from piecework.runtime.engine.build import build_engine

def grown(path):
    before = psutil.Process().memory_info().rss
    engine = build_engine(EngineConfig(model_path=path, device="cpu", max_total_tokens=256))
    after = psutil.Process().memory_info().rss
    return engine, after - before

first = grown(sys.argv[1])  # which imports, and starts threads
engine, size = grown(sys.argv[2])
print(size, engine.runner.info().weight_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems count otherwise")
def test_loading_leaves_the_packed_weights_and_little_else(tmp_path: Path) -> None:
    """No page of the file, and no second copy of a weight."""
    paths = []
    for name, hidden in (("small", 64), ("large", 1024)):
        sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": 2}
        folder = make_tiny_model(tmp_path / name, **sizes)
        paths.append(tmp_path / f"{name}.gguf")
        write_gguf(folder, paths[-1], "llama", Kind.Q8_0)
    command = [sys.executable, "-c", _LOADS, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    grown, weights = map(int, done.stdout.split())
    assert paths[-1].stat().st_size > 2 * _LEFT
    assert grown < weights + _LEFT


def test_what_loading_and_the_first_steps_have_freed_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny model frees too little to be seen."""
    given: list[bool] = []
    monkeypatch.setattr(Platform, "give_back_memory", lambda self: given.append(True))
    path = make_tiny_model(tmp_path)
    build_engine(EngineConfig(model_path=str(path), device="cpu", max_total_tokens=256))
    assert given == [True, True]
