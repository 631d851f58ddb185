"""What every test can use: helper modules beside the tests, and few threads."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

# Read when torch is loaded: threads that spin until the next parallel loop hold the cores that the
# other processes of tests wait for.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import pytest
import torch
from hypothesis import settings

from piecework.compilation.core import split_ops
from piecework.kernels.cache_folder import kernels_folder
from piecework.kernels.cpu.native.build import load_kernels
from piecework.runtime.graphs import compile_process

_TESTS = Path(__file__).parent
# Test files import their helper modules (toy_runner, tiny_models, ...) by plain name.
sys.path[:0] = [
    str(_TESTS),
    str(_TESTS / "kernels"),
    str(_TESTS / "runtime"),
    str(_TESTS / "runtime" / "sampling"),
    str(_TESTS / "server"),
]

pytest.register_assert_rewrite("contract_attention", "contract_ops")

# Read when triton is imported: without a GPU its kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Read when Inductor is imported: what calls its kernels is compiled at once, not well, and that the
# compiler has vectors of this CPU is not tried in each cache anew, which takes 7 s.
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Tests that want a compile cache of their own do not build the CPU kernels anew.
os.environ.setdefault("PIECEWORK_KERNELS_DIR", str(kernels_folder()))
# No engine is replaced by another one in the middle of a test.
os.environ.setdefault("PIECEWORK_KERNELS", "wait")
# One cache for a run, not the user's; the processes that run its tests inherit it.
if "PIECEWORK_CACHE_DIR" not in os.environ:
    _cache = os.environ["PIECEWORK_CACHE_DIR"] = tempfile.mkdtemp(prefix="piecework-tests-")
    atexit.register(shutil.rmtree, _cache, ignore_errors=True)

# A nice process gets no turn beside busy workers, and its own test waits for it.
compile_process.own_niceness = 0

# A busy machine makes no test fail, and the same commit gives the same result;
# `--hypothesis-profile=explore` looks further.
settings.register_profile("steady", deadline=None, derandomize=True, database=None, max_examples=20)
settings.register_profile("explore", deadline=None)
settings.load_profile("steady")


_TOGETHER = ("tests/simnpu", "tests/test_")
"""Beginnings of the paths of files whose tests stay in one process of several: they share what is
dear to make. The files of the root read all sources.
"""
_FIRST = (
    *_TOGETHER,
    "tests/server/engine/",
    "tests/server/test_server_end",
    "tests/server/test_launch",
    "tests/server/test_end_to_end",
    "tests/server/test_rank_ends",
    "tests/runtime/graphs/",
)
"""Files that take longest, so that none of them is the last."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What tests are made of stays: until something unfreezes it, no collection of garbage looks
    at it, which would take most of the time of tests that ask for one.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(_FIRST))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Where kernels are tested the best are built before the first test, as other tests of such a
    run start servers, which are to be ready within a minute.
    """
    if "native_variants" in sys.modules and not session.config.option.collectonly:
        load_kernels()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests stay in one process, and a folder's that is named here."""
    from xdist.scheduler import LoadFileScheduling

    # Not by the number of tests, which says little of how long they take.
    config.option.loadscopereorder = False

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return next((folder for folder in _TOGETHER if file.startswith(folder)), file)

    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def own_split_ops(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No split ops of tests' toy models: a compiling process does not know them, and a cut forward
    is kept by what there is. Those of layers that the test imports stay.
    """
    everyones = split_ops._implementations

    def own(ops: dict[str, split_ops.Implementation]) -> dict[str, split_ops.Implementation]:
        return {name: run for name, run in ops.items() if name.startswith("piecework::")}

    monkeypatch.setattr(split_ops, "_implementations", own(everyones))
    yield
    everyones.update(own(split_ops._implementations))


@pytest.fixture
def compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that compiles is this one, which has imported what compiles, and where faults
    can be seeded.
    """
    from compiled_here import CompiledHere

    from piecework.runtime.engine import graph_startup as startup

    monkeypatch.setattr(startup, "start", CompiledHere)


@pytest.fixture
def native_kernels() -> None:
    if load_kernels() is None:
        pytest.skip("no native kernels here")


@pytest.fixture(scope="session")
def pipeline_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's tiny diffusion pipeline: written once."""
    from piecework.lab.diffusion_tiny import make_pipeline_folder

    @cache
    def written(family: str) -> Path:
        return make_pipeline_folder(tmp_path_factory.mktemp("pipelines") / family, family)

    return written
