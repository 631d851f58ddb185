"""Two ranks hold their parts of an adapter and give what one process gives."""

from __future__ import annotations

from pathlib import Path

from tiny_adapters import make_adapter
from tiny_models import make_tiny_model

from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.llm import LLM


def test_two_ranks_give_what_one_process_gives(tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base", num_hidden_layers=2)
    adapters = [make_adapter(tmp_path / f"{seed}", base, seed=seed) for seed in range(3)]
    params = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
    names, prompts = ["", "n0", "n1", "n2"], [[5, 6, 7, 8 + row] for row in range(4)]

    def answers(tp_size: int) -> list[list[int]]:
        llm = LLM(
            str(base),
            tp_size=tp_size,
            dtype="float32",
            max_total_tokens=512,
            num_threads=1,
            lora_modules=f"n0={adapters[0]},n1={adapters[1]}",
            max_loras=2,
        )
        llm.load_adapter("n2", str(adapters[2]))
        results = llm.generate(prompts, params, adapters=names)
        assert all(each.error is None for each in results)
        return [each.token_ids for each in results]

    alone = answers(1)
    assert answers(2) == alone and len(set(map(tuple, alone))) == 4
