"""The figures of the house, counted in a small tree."""

from __future__ import annotations

from pathlib import Path

from piecework.lab.house import measure

FILES = {
    "kernels/a.py": "def _once():\n    pass\n\ndef _twice():\n    _once()\n",
    "runtime/engine/scheduler.py": "from ..cache.b import f\n\n_g = f(f)\n",
    "runtime/cache/b.py": '"""Whom it serves"""\nfrom ..engine import scheduler\n\ndef f(x):\n'
    "    pass\n",
    "lab/c.py": "x = 1\n" * 50,
    "docs/architecture.md": "## Where to add\n\n| what | where |\n|---|---|\n"
    "| a pass | `compilation/passes/`, `compilation/pass_manager.py` and `config.json` |\n"
    "\n## After\n\n| other | `a/b.py` |\n",
}


def test_figures(tmp_path: Path) -> None:
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    found = measure(tmp_path)
    assert found["product lines (Python), without lab/"] == 13 == found["  kernels/"] + 8
    assert (found["functions"], found["private functions that are used once"]) == (3, 1)
    assert (found["mutual pairs of folders"], found["files in circles"]) == (1, 2)
    assert found["files that runtime/engine/scheduler.py reaches"] == 2
    assert found["forbidden phrases, in code and documents"] == 2
    assert [name for name in found if "to open" in name] == ["to open for a pass"]
    assert found["to open for a pass"] == 2
