"""Builds the simulated NPU's C++ extension once for each torch version and source text."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

NAME = "simnpu_extension"
SOURCES = Path(__file__).parent / "csrc"
FLAGS = ["-O1", "-fvisibility=hidden"]


def missing_tools() -> str | None:
    """Why the extension cannot be built here, or None. A build that exists already needs no
    tools.
    """
    if library_path().exists():
        return None
    if shutil.which(cpp_extension.get_cxx_compiler()) is None:
        return f"no C++ compiler ({cpp_extension.get_cxx_compiler()}); install one or set CXX"
    if not cpp_extension.is_ninja_available():
        return "no ninja, which builds the simulated NPU; pip install ninja"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "no Python.h; install Python's development headers"
    return None


def library_path() -> Path:
    """Where the built extension lies: under the user's cache folder, named by torch, Python and the
    sources' hash.
    """
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = f"torch-{torch.__version__}-{sys.implementation.cache_tag}-{digest.hexdigest()[:16]}"
    return cache / "piecework" / "simnpu" / key / f"{NAME}.so"


def load() -> ModuleType:
    """The extension, built first if need be. Two processes may build at once: each loads its own,
    one is kept.
    """
    library = library_path()
    return _import(library) if library.exists() else _build(library)


def _import(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build(library: Path) -> ModuleType:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        source = str(SOURCES / "module.cpp")
        module = cpp_extension.load(NAME, [source], extra_cflags=FLAGS, build_directory=folder)
        os.replace(Path(folder) / library.name, library)
    assert isinstance(module, ModuleType)
    return module
