"""What an installation is: one package, what it needs, and how little `import piecework` costs."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from functools import cache
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest

import piecework

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PARTS_OF_OTHERS = {
    "starlette": "fastapi is built on it",
    "pydantic-core": "pydantic's parser",
    "sympy": "torch's symbolic sizes",
}
"""Imported, and brought by a dependency of which they are half."""
MODULES = {"flashinfer": "flashinfer-python", "opentelemetry": "opentelemetry-sdk"}
"""Modules of distributions by another name, which need not be installed here, or of many."""
OF_THE_MACHINE = {"torch-npu", "torchair", "sgl-kernel", "vllm"}
"""Imported only where the machine has them."""


def product_files() -> list[Path]:
    folders = ["bench", "cli", "compilation", "kernels", "runtime", "server"]
    return [
        ROOT / "__init__.py",
        *(path for folder in folders for path in (ROOT / folder).rglob("*.py")),
    ]


owners_of_modules = cache(packages_distributions)


@cache
def third_party_imports() -> frozenset[str]:
    """The top modules of all imports of the product."""
    found: set[str] = set()
    for path in product_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add((node.module or "").split(".")[0])
    return frozenset(found - sys.stdlib_module_names)


def normal(name: str) -> str:
    """A distribution's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", name)[0]).lower()


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd="/"
    )


def test_every_import_of_the_product_is_declared() -> None:
    owners = owners_of_modules()
    imported = {
        normal(owner)
        for top in third_party_imports()
        for owner in ([MODULES[top]] if top in MODULES else owners.get(top, [top]))
    }
    optional = {
        normal(name) for extra in PROJECT["optional-dependencies"].values() for name in extra
    }
    declared = {normal(name) for name in PROJECT["dependencies"]} | optional
    assert imported - declared - {"piecework", *PARTS_OF_OTHERS} - OF_THE_MACHINE == set()


def test_every_dependency_is_imported() -> None:
    owners = owners_of_modules()
    imported = {normal(owner) for top in third_party_imports() for owner in owners.get(top, [])}
    # Python 3.14 has zstd of its own.
    assert {normal(name) for name in PROJECT["dependencies"]} - {"backports-zstd"} <= imported


def test_only_piecework_is_installed() -> None:
    top_level = distribution("piecework").read_text("top_level.txt")
    assert top_level is not None and top_level.split() == ["piecework"]


def test_the_installed_version_is_the_package_s() -> None:
    assert distribution("piecework").version == piecework.__version__


def test_no_module_named_kernels_appears() -> None:
    """transformers probes for one; ours must be found as `piecework.kernels` only."""
    done = run_python(
        "import importlib.util as u; assert u.find_spec('piecework.kernels'); assert "
        "u.find_spec('kernels') is None"
    )
    assert done.returncode == 0, done.stderr


def test_import_piecework_brings_no_library() -> None:
    done = run_python(
        "import sys; before = set(sys.modules); import piecework\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before} - "
        "set(sys.stdlib_module_names)\n"
        "assert new == {'piecework'}, new"
    )
    assert done.returncode == 0, done.stderr


def test_the_command_s_help_runs_without_torch() -> None:
    done = run_python(
        "import sys; sys.modules['torch'] = None; sys.argv = ['piecework', '--help']\nfrom "
        "piecework.cli.main import main; main()"
    )
    assert done.returncode == 0, done.stderr
    assert "serve" in done.stdout


def test_the_engine_runs_without_the_web_stack() -> None:
    """`piecework.LLM` and the GPU suite import on a machine that has none of these."""
    missing = [
        "fastapi",
        "starlette",
        "uvicorn",
        "pydantic",
        "msgspec",
        "zmq",
        "prometheus_client",
        "aiohttp",
        "gguf",
    ]
    imports = (
        "import piecework; piecework.LLM; import piecework.bench.gpu_suite, "
        "piecework.bench.gpu_parts"
    )
    done = run_python(f"import sys; sys.modules.update(dict.fromkeys({missing!r})); {imports}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["LLM", "SamplingParams"])
def test_the_root_lends_names_of_the_runtime(name: str) -> None:
    assert getattr(piecework, name).__name__ == name


def test_the_root_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        piecework.nothing_of_the_kind  # noqa: B018


@pytest.mark.slow
def test_a_wheel_has_the_kernels_sources_and_what_was_compiled_of_them(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    left_out = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "shipped")
    shutil.copytree(ROOT, tree, ignore=left_out)
    library = tree / "kernels" / "cpu" / "native" / "shipped" / "avx2-0.so"
    library.parent.mkdir()
    library.write_bytes(b"kernels")
    wheel = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "."]
    subprocess.run([*wheel, "--wheel-dir", tmp_path], cwd=tree, check=True, capture_output=True)
    (made,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(made).namelist()
    native = "piecework/kernels/cpu/native"
    assert f"{native}/shipped/avx2-0.so" in names
    sources = [*(ROOT / native.partition("/")[2]).rglob("*.cpp")]
    sources += (ROOT / native.partition("/")[2]).rglob("*.h")
    assert {f"piecework/{path.relative_to(ROOT)}" for path in sources} <= {*names}
    assert not [name for name in names if name.startswith(("piecework/lab", "piecework/tests"))]
