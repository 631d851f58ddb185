"""The measurement of all-reduce by size."""

from __future__ import annotations

import pytest
import torch

from piecework.lab import collectives


@pytest.mark.slow
def test_two_processes_measure_both_groups() -> None:
    times = collectives.all_reduce_times(2, 1, torch.float16, 1)
    assert next(iter(times)) == 4096 and list(times)[-1] == 2**24
    assert all(0 < each["shared memory"] < 1e7 and each["gloo"] > 0 for each in times.values())
    lines = collectives.table(times).splitlines()
    assert lines[2].startswith("| 4 kB |") and lines[-1].startswith("| 16 MB |")
