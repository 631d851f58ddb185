"""A piece is loaded only where it would be made again as it is: by the same source, the same
settings and the same compilers.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from toy_forward import ToyModel, step

import piecework
from piecework.compilation import torch_private
from piecework.compilation.cache import CompileCache
from piecework.compilation.compiler import EagerCompiler, InductorCompiler
from piecework.compilation.piece_maker import PieceMaker
from piecework.compilation.piece_store import PieceStore
from piecework.compilation.plan import DistinctPiece
from piecework.kernels import toolchain
from piecework.kernels.cpu.native import build
from piecework.kernels.cpu.platform import CpuPlatform

PIECE = DistinctPiece(key="any", inputs=(), ops=())
PRINT_KEYS = """
import os, sys
from pathlib import Path
import torch

folder, *edited = map(Path, sys.argv[1:])
sys.path.insert(0, str(folder))


def print_key():
    # Each of a process that has read no source yet.
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        return
    from piecework.compilation.cache import CompileCache
    from piecework.compilation.compiler import EagerCompiler
    from piecework.compilation.piece_store import PieceStore
    from piecework.compilation.plan import DistinctPiece
    from piecework.kernels.cpu.platform import CpuPlatform

    store = PieceStore(platform=CpuPlatform(), compiler=EagerCompiler(), cache=CompileCache(folder),
                       max_tokens=512)
    print(store.piece_key(DistinctPiece(key="any", inputs=(), ops=())), flush=True)
    os._exit(0)


print_key()
for file in edited:
    text = file.read_text()
    file.write_text(text + "\\n# another pass\\n")
    print_key()
    file.write_text(text)
print_key()
"""


def keys_of_edits(folder: Path, *edited: Path) -> list[str]:
    """A piece's key as the source in `folder` has it, with each of these files edited, and
    without again.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", PRINT_KEYS, *map(str, (folder, *edited))],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def key(folder: Path) -> str:
    return PieceStore(
        platform=CpuPlatform(),
        compiler=InductorCompiler(),
        cache=CompileCache(folder),
        max_tokens=512,
    ).piece_key(PIECE)


EDITED = [
    "compilation/passes/common/norm_quant.py",
    "compilation/passes/cpu/pack_linear.py",
    "compilation/torch_private.py",
    "kernels/cpu/packed_linear.py",
]


def test_a_piece_of_an_edited_pass_is_another_until_it_is_edited_back(tmp_path: Path) -> None:
    root = Path(piecework.__file__).parent
    for name in ("__init__.py", "version.py", "compilation", "kernels"):
        copy: Callable[..., object] = shutil.copytree if (root / name).is_dir() else shutil.copy
        (tmp_path / "piecework").mkdir(exist_ok=True)
        copy(root / name, tmp_path / "piecework" / name)
    before, *keys, after = keys_of_edits(
        tmp_path, *(tmp_path / "piecework" / file for file in EDITED)
    )
    assert after == before and len({before, *keys}) == 1 + len(EDITED)


@pytest.mark.parametrize(
    "name", ["TORCHINDUCTOR_CPP_MIN_CHUNK_SIZE", "TORCH_COMPILE_DEBUG", "TRITON_F32_DEFAULT"]
)
def test_settings_of_the_environment_make_another_piece(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key(tmp_path)
    monkeypatch.setenv(name, "1")
    assert key(tmp_path) != before


@pytest.mark.parametrize(
    "name",
    [
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "TRITON_PTXAS_PATH",
        "TORCHINDUCTOR_COMPILE_THREADS",
    ],
)
def test_where_things_lie_makes_no_other_piece(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key(tmp_path)
    monkeypatch.setenv(name, "1")
    assert key(tmp_path) == before


def test_settings_that_this_process_has_changed_make_another_piece(tmp_path: Path) -> None:
    from torch._inductor import config

    before = key(tmp_path)
    with config.patch({"epilogue_fusion": False}):
        assert key(tmp_path) != before
    assert key(tmp_path) == before


@pytest.mark.slow
def test_a_process_that_is_told_the_settings_of_another_makes_its_pieces() -> None:
    from torch._inductor import config

    with config.patch({"epilogue_fusion": False, "cpp.min_chunk_size": 7}):
        changes = torch_private.inductor_changes()
    program = (
        "import sys, json; from piecework.compilation.torch_private import change_inductor, "
        "inductor_changes\n"
        "assert inductor_changes() == {}\n"
        "change_inductor(json.loads(sys.argv[1])); print(json.dumps(inductor_changes()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(changes)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == changes != {}


class Compiled(EagerCompiler):
    """Calls a C++ compiler of some version."""

    compiled = 0

    def __init__(self, version: str | None) -> None:
        self._version = version

    def toolchain(self) -> str | None:
        return self._version

    def compile(self, *arguments: object) -> None:  # type: ignore[override]
        Compiled.compiled += 1
        super().compile(*arguments)  # type: ignore[arg-type]


def compiled_with(version: str | None, folder: Path) -> int:
    """How many pieces are compiled where that compiler is installed."""
    before = Compiled.compiled
    maker = PieceMaker(
        platform=CpuPlatform(),
        compiler=Compiled(version),
        cache=CompileCache(folder),
        max_tokens=512,
    )
    maker.make(ToyModel(3), step(6), model_key="toy")
    return Compiled.compiled - before


def test_a_piece_of_another_cpp_compiler_is_compiled_again(tmp_path: Path) -> None:
    assert compiled_with("g++ 12", tmp_path) == 3
    assert compiled_with("g++ 12", tmp_path) == 0
    assert compiled_with("g++ 13", tmp_path) == 3


def test_a_machine_without_a_cpp_compiler_loads_what_another_has_compiled(tmp_path: Path) -> None:
    assert compiled_with("g++ 12", tmp_path) == 3
    assert compiled_with(None, tmp_path) == 0


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_inductor_s_compiler_is_told_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    assert "g++" in (InductorCompiler().toolchain() or "")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert InductorCompiler().toolchain() is None


def test_kernels_of_another_version_of_the_compiler_are_built_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler stays where it is, and is another one after an upgrade."""
    compiler, built = tmp_path / "c++", []
    monkeypatch.setenv("CXX", str(compiler))

    def record(
        compiler: str, variant: object, openmp: object, libraries: dict[Path, object], lock: str
    ) -> None:
        built.append([library.name for library in libraries])
        raise OSError("only looked at")

    monkeypatch.setattr(build, "compile_libraries", record)
    for version in ("12", "12", "13"):
        toolchain.version_of.cache_clear()
        compiler.write_text(f"#!/bin/sh\necho c++ {version}\n")
        compiler.chmod(0o700)
        with pytest.raises(OSError, match="only looked at"):
            build.load_variant(build.VARIANTS[-1], tmp_path)
    assert built[0] == built[1] != built[2]


@pytest.mark.slow
def test_the_parts_of_a_key_cost_a_start_next_to_nothing(tmp_path: Path) -> None:
    """Without Inductor, whose import takes most of a second: a process that serves has no use for
    it.
    """
    program = (
        "import sys, time; start = time.process_time(); import torch; "
        "from piecework.compilation.compiler import InductorCompiler\n"
        "began = time.process_time(); InductorCompiler().options(), "
        "InductorCompiler().toolchain()\n"
        "assert time.process_time() - began < 0.5 * (began - start)\n"
        "assert not [name for name in sys.modules if "
        "name.startswith('torch._inductor')]"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_torch_s_version_makes_another_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key(tmp_path)
    monkeypatch.setattr(torch, "__version__", "0.0.0")
    assert key(tmp_path) != before
