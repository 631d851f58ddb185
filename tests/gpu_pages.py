"""Pages of the GPU suite, of results that tests make up."""

from __future__ import annotations

from typing import Any

from piecework.bench.gpu_report import markdown


def page_of(results: dict[str, Any], scale: str = "x") -> str:
    about = dict.fromkeys(
        ("device", "date", "python", "torch", "cuda", "triton", "piecework"), "x"
    ) | {"scale": scale}
    return markdown(
        {
            "about": about,
            "parts": {
                name: {"ok": True, "seconds": 1.0, "result": result}
                for name, result in results.items()
            },
        }
    )
