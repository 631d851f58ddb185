"""`python -m piecework.lab.activations`: what rounded activations cost, told of one model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from native_variants import needs_kernels
from tiny_models import make_tiny_model

from piecework.lab.activations import main


@needs_kernels
def test_fewer_bits_are_further_from_float32_and_their_difference_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = make_tiny_model(tmp_path / "model"), tmp_path / "questions.jsonl"
    question = {
        "question": "How many apples are left?",
        "answer": "The answer is 42 of her friends",
    }
    data.write_text(2 * f"{json.dumps(question)}\n")
    assert main([f"{model}=q8_0", "--data-path", str(data), "--answers", "2"]) == 0
    _, _, line = capsys.readouterr().out.splitlines()
    _, exact, bf16, int8, apart = line.strip("| ").split(" | ")
    costs = [cell.rstrip(")").split(" (") for cell in (bf16, int8)]
    (low, far_low), (high, far_high) = ((float(mean), float(far)) for mean, far in costs)
    assert float(exact) < 0 < far_low < far_high
    assert high - low == pytest.approx(float(apart.partition(" ± ")[0]), abs=2e-4)
