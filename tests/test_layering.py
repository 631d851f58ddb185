"""The house rules that a machine can read: who may import whom, what is packaged, how long things
may get.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from source_facts import (
    ROOT,
    ROOT_PACKAGE,
    Facts,
    facts,
    floor_of,
    product_files,
    python_files,
)

KNOWS = {
    "kernels": set[str](),
    "compilation": {"kernels"},
    "runtime": {"compilation", "kernels"},
    "server": {"runtime"},
    "bench": {"server", "runtime", "compilation", "kernels"},
    "cli": {"bench", "server", "runtime", "compilation", "kernels"},
    "lab": {"cli", "bench", "server", "runtime", "compilation", "kernels"},
    ROOT_PACKAGE: {"cli", "runtime"},
}
"""Floor -> the other floors that its modules may import."""
WEB_STACK = {"fastapi", "starlette", "uvicorn", "pydantic"}
WIRE = {"msgspec", "zmq"}
WIRE_MODULES = {
    "runtime/process/ipc.py",
    "runtime/engine/kv_publisher.py",
}
SERVING = {
    "piecework.runtime.engine.text",
    "piecework.runtime.pooling.engine",
    "piecework.runtime.speech.engine",
    "piecework.runtime.llm",
}
MAKERS = {"piecework.compilation.piece_maker", "piecework.runtime.graphs.compile_pieces"}
"""What traces and compiles language models, which no process does that serves one."""
MAX_FILE_LINES = 400
MAX_TEST_FILE_LINES = 550
MAX_FUNCTION_LINES = 80

Check = Callable[[Path], list[str]]


def library_imports(root: Path, forbidden: set[str], concerns: Callable[[str], bool]) -> list[str]:
    return [
        f"{path}:{line} imports {module}"
        for path in product_files(root)
        if concerns(path)
        for line, module in facts(root, path).imports
        if module.split(".")[0] in forbidden
    ]


def upward_imports(root: Path) -> list[str]:
    problems = []
    for path in product_files(root):
        floor = floor_of(path)
        for line, module in facts(root, path).imports:
            parts = module.split(".")
            target = parts[1] if parts[0] == "piecework" and len(parts) > 1 else floor
            known = target in KNOWS.get(floor, set()) or target == floor
            if target in KNOWS and not known:
                problems.append(
                    f"{path}:{line} imports {module}: {floor or 'the root'} does not know {target}"
                )
    return problems


def unpackaged_folders(root: Path) -> list[str]:
    folders = {path.rpartition("/")[0] for path in product_files(root)}
    found = {".".join(["piecework", *filter(None, folder.split("/"))]) for folder in folders}
    listed = set(
        tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    )
    return [
        f"{name} is a folder, but pyproject.toml does not list it"
        for name in sorted(found - listed)
    ] + [
        f"pyproject.toml lists {name}, but there is no such folder with Python files"
        for name in sorted(listed - found)
    ]


def web_stack_below_the_server(root: Path) -> list[str]:
    return library_imports(
        root, WEB_STACK, lambda path: floor_of(path) in {"runtime", "compilation", "kernels"}
    )


def wire_format_outside_its_modules(root: Path) -> list[str]:
    return library_imports(
        root,
        WIRE,
        lambda path: floor_of(path) not in {"server", "bench"} and path not in WIRE_MODULES,
    )


def tensors_in_the_server(root: Path) -> list[str]:
    return library_imports(root, {"torch"}, lambda path: floor_of(path) == "server")


def compilers_in_serving_processes(root: Path) -> list[str]:
    """Modules that trace or compile and that a serving process's imports lead to, over whichever
    others.
    """
    files = {
        ".".join(["piecework", *path.removesuffix(".py").split("/")]): path
        for path in product_files(root)
    }
    reached: set[str] = set()
    to_visit = sorted(SERVING & files.keys())
    while to_visit:
        module = to_visit.pop()
        if module not in reached:
            reached.add(module)
            to_visit += [
                found
                for _, name in facts(root, files[module]).imports
                for found in (name, name.rpartition(".")[0])
                if found in files
            ]
    return [
        f"{module} can be reached from a process that serves" for module in sorted(MAKERS & reached)
    ]


def private_torch_in_several_files(root: Path) -> list[str]:
    users = [
        path
        for path in product_files(root)
        if any(map(is_private_torch, dotted_names(facts(root, path))))
    ]
    return users if len(users) > 1 else []


def dotted_names(found: Facts) -> Iterator[str]:
    yield from (module for _, module in found.imports)
    yield from found.attributes


def is_private_torch(name: str) -> bool:
    return name.startswith(("torch._dynamo", "torch._inductor"))


def long_files(root: Path) -> list[str]:
    lengths = {path: facts(root, path).lines for path in python_files(root)}
    return [
        f"{path} has {lines} lines"
        for path, lines in lengths.items()
        if lines > (MAX_TEST_FILE_LINES if floor_of(path) == "tests" else MAX_FILE_LINES)
    ]


def long_functions(root: Path) -> list[str]:
    return [
        f"{path}:{first} {name} has {lines} lines"
        for path in python_files(root)
        for first, name, lines in facts(root, path).functions
        if lines > MAX_FUNCTION_LINES
    ]


def modules_without_docstring(root: Path) -> list[str]:
    return [path for path in product_files(root) if not facts(root, path).docstring]


def utils_modules(root: Path) -> list[str]:
    return [
        path
        for path in python_files(root)
        if path.rpartition("/")[2] in ("utils.py", "util.py", "helpers.py")
    ]


def packages_that_must_not_be(root: Path) -> list[str]:
    """`kernels` with an `__init__.py` would be found by transformers, which probes for a package of
    that name.
    """
    return [
        path
        for path in python_files(root)
        if floor_of(path) in {"kernels", "tests"} and path.endswith("__init__.py")
    ]


GOOD_TREE = {
    "pyproject.toml": "[tool.setuptools]\npackages = "
    '["piecework", "piecework.cli", "piecework.kernels", "piecework.runtime", '
    '"piecework.runtime.process", "piecework.server"]\n',
    "__init__.py": '"""The root."""\n\n\ndef lazy():\n    from .runtime.llm import LLM\n',
    "kernels/platform.py": '"""A floor."""\n\nimport torch\n',
    "runtime/llm.py": '"""A floor."""\n\nfrom ..kernels.platform import Platform\nfrom . import '
    "batch\n",
    "runtime/process/ipc.py": '"""A floor."""\n\nimport msgspec\n',
    "server/app.py": '"""A floor."""\n\nimport fastapi\n\nfrom .. import __version__\nfrom '
    "..runtime import llm\n",
    "cli/main.py": '"""A floor."""\n\nfrom ..bench.gsm8k import run\n',
    "tests/test_app.py": "from piecework.server import app\n",
    ".venv/lib/utils.py": "from piecework import everything\n" * 500,
}
BAD_FILES: list[tuple[Check, dict[str, str]]] = [
    (upward_imports, {"runtime/bad.py": '"""B."""\nfrom ..server.app import app\n'}),
    (upward_imports, {"runtime/bad.py": '"""B."""\nfrom .. import server\n'}),
    (upward_imports, {"runtime/bad.py": '"""B."""\nimport piecework.server.app\n'}),
    (
        upward_imports,
        {
            "kernels/bad.py": '"""B."""\nif TYPE_CHECKING:\n    from ..runtime.config import '
            "EngineConfig\n"
        },
    ),
    (
        upward_imports,
        {"kernels/cpu/bad.py": '"""B."""\ndef f():\n    from ...runtime import config\n'},
    ),
    (upward_imports, {"server/bad.py": '"""B."""\nfrom ..kernels.platform import Platform\n'}),
    (upward_imports, {"server/bad.py": '"""B."""\nfrom ..cli.main import main\n'}),
    (upward_imports, {"__init__.py": '"""B."""\nfrom .server.app import app\n'}),
    (unpackaged_folders, {"runtime/new/bad.py": '"""B."""\n'}),
    (unpackaged_folders, {"pyproject.toml": '[tool.setuptools]\npackages = ["piecework.gone"]\n'}),
    (web_stack_below_the_server, {"runtime/bad.py": '"""B."""\nfrom pydantic import BaseModel\n'}),
    (wire_format_outside_its_modules, {"runtime/bad.py": '"""B."""\nimport zmq.asyncio\n'}),
    (tensors_in_the_server, {"server/bad.py": '"""B."""\ndef f():\n    import torch.nn\n'}),
    (
        compilers_in_serving_processes,
        {
            "compilation/piece_maker.py": '"""B."""\n',
            "runtime/llm.py": '"""B."""\nfrom . import between\n',
            "runtime/between.py": '"""B."""\ndef f():\n    from ..compilation.piece_maker import '
            "PieceMaker\n",
        },
    ),
    (
        private_torch_in_several_files,
        {
            "runtime/bad.py": '"""B."""\nimport torch\ntorch._dynamo.reset()\n',
            "kernels/bad.py": '"""B."""\nfrom torch._inductor import ir\n',
        },
    ),
    (long_files, {"tests/bad.py": "x = 1\n" * (MAX_TEST_FILE_LINES + 1)}),
    (long_files, {"runtime/bad.py": '"""B."""\n' + "x = 1\n" * MAX_FILE_LINES}),
    (
        long_functions,
        {"runtime/bad.py": '"""B."""\nasync def f():\n' + "    x = 1\n" * MAX_FUNCTION_LINES},
    ),
    (modules_without_docstring, {"runtime/bad.py": "x = 1\n"}),
    (utils_modules, {"runtime/utils.py": '"""B."""\n'}),
    (packages_that_must_not_be, {"kernels/cpu/__init__.py": '"""B."""\n'}),
    (packages_that_must_not_be, {"tests/__init__.py": ""}),
]
CHECKS = list(dict.fromkeys(check for check, _ in BAD_FILES))


def write_tree(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_house_keeps_its_rules(check: Check) -> None:
    assert check(ROOT) == []


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_small_good_house_passes(check: Check, tmp_path: Path) -> None:
    write_tree(tmp_path, GOOD_TREE)
    assert check(tmp_path) == []


@pytest.mark.parametrize(
    ("check", "bad"),
    BAD_FILES,
    ids=lambda value: value.__name__ if callable(value) else next(iter(value)),
)
def test_a_broken_rule_is_found(check: Check, bad: dict[str, str], tmp_path: Path) -> None:
    write_tree(tmp_path, GOOD_TREE | bad)
    assert check(tmp_path) != []


def test_every_floor_has_its_rule() -> None:
    floors = {floor_of(path) for path in product_files(ROOT)}
    assert floors <= set(KNOWS)
