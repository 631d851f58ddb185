"""The GPU suite's page: figures beside their floors, peers and goals."""

from __future__ import annotations

from typing import Any

from gpu_pages import page_of


def test_the_page_sets_figures_beside_their_floors() -> None:
    def mode(ms: float, replayed: bool, graphs: int = 0) -> dict[str, Any]:
        row = {"tokens": 64, "ms": ms, "flops": 1e9, "replayed": replayed}
        return {
            "rows": [row],
            "distinct_pieces": 4,
            "graphs": graphs,
            "graph_bytes": 2**21,
            "capture_seconds": 1.0,
            "failed_sizes": {"64": "why"},
        }

    results = {
        "floors": {"copy_bytes_per_second": 1e12, "matmul_flops_per_second": 1e12},
        "prefill_off": mode(4.0, False),
        "prefill_piecewise_eager": mode(2.0, True, 5),
        "prefill_breakable": mode(8.0, False),
    }
    page = page_of(results)
    assert "| 64 | 4.000 25% | 2.000 (2.00x) 50% | 8.000 (0.50x) 12% * |" in page
    assert "| piecewise_eager | 4 | 5 | 2 | 1.0 | 64: why |" in page


def test_the_page_sets_the_load_beside_its_peers() -> None:
    def mode(tokens: float, **more: Any) -> dict[str, Any]:
        return {"requests_per_second": tokens / 512, "output_tokens_per_second": tokens} | more

    own = {"steps": 9, "replays": 8, "overlapped_steps": 7, "cached_share": 0.5}
    whole: dict[str, Any] = {"seconds": 1.0, "requests": 256, "finished": 256, "settings": {}}
    peer = whole | {
        "peer": "transformers 5",
        "attention": "paged|sdpa",
        "settings": {"CUDA graphs": False},
        "finished": 0,
        "steps": 3,
    }
    results = {
        "load_off": mode(2048.0, **own),
        "load_graphs": mode(4096.0, **own),
        "load_vllm": mode(8192.0, **whole | {"peer": "vllm 1", "cached_share": 0.9}),
        "load_transformers": mode(1024.0, **peer) | {"requests_per_second": 0.0},
    }
    page = page_of(results)
    assert "| graphs | 8.00 | 4096 | 9 | 8 | 7 | 50% |" in page
    assert "| vllm | 16.00 | 8192 |  |  |  | 90% |" in page
    assert "| transformers |  | 1024 | 3 |  |  |  |" in page
    assert (
        "`graphs`: 4.00x of transformers' continuous batching." in page
        and "`graphs`: 0.50x of vLLM." in page
    )
    assert (
        "transformers 5, attention paged|sdpa, CUDA graphs: no. Cut short" in page
        and "vllm 1.\n" in page
    )


def test_a_run_at_full_size_is_held_against_the_goals() -> None:
    def prefill(small: float, large: float) -> dict[str, Any]:
        rows = [
            {"tokens": 512, "ms": small, "flops": 0.0, "replayed": True},
            {"tokens": 4096, "ms": large, "flops": 5e9, "replayed": True},
        ]
        return {"rows": rows, "graphs": 0, "failed_sizes": {}}

    decode = {
        "rows": [{"batch": 1, "ms": 2.0, "bytes": 1.5e9, "replayed": True}],
        "graphs": 0,
        "failed_sizes": {},
    }
    results = {
        "floors": {"copy_bytes_per_second": 1e12, "matmul_flops_per_second": 1e12},
        "prefill_off": prefill(4.0, 10.0),
        "prefill_piecewise_eager": prefill(2.0, 12.5),
        "decode_full": decode,
    }
    page = page_of(results, scale="full")
    assert (
        "| prefill of up to 512 tokens, piecewise_eager against off | at least 1.80x | 2.00x | yes "
        "|" in page
    )
    assert (
        "| prefill of any size, piecewise_eager against off | at least 0.99x | 0.80x | **no** |"
        in page
    )
    assert "| decode at batch 1, share of the copy rate | at least 80% | 75% | **no** |" in page
    assert (
        "| prefill of 4096 tokens by the fastest mode, share of the matrix rate | at least 60% | "
        "50% | **no** |" in page
    )
    assert "GSM8K" not in page and "capture of all" not in page
    assert "## Goals" not in page_of(results, scale="tiny")
