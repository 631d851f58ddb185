"""The prompts of the GPU suite's load: random tokens with the lengths of GSM8K's five-shot prompts
and a common prefix.
"""

from __future__ import annotations

import numpy as np

from .gpu_engines import Scale

# Tokens of the five examples before each question. All lengths are counted by SmolLM2's tokenizer.
SHOTS_LEN = 684
# The 33-quantiles of the lengths of 195 questions of GSM8K's test set.
QUESTION_LENS = (
    36,
    40,
    41,
    45,
    47,
    49,
    50,
    52,
    55,
    56,
    57,
    60,
    61,
    63,
    65,
    66,
    67,
    68,
    69,
    71,
    72,
    74,
    75,
    76,
    77,
    82,
    85,
    87,
    92,
    99,
    103,
    108,
)


def gsm8k_prompts(scale: Scale, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Return `scale.num_requests` prompts. Each seed has another prefix."""
    draw = np.random.default_rng(seed)
    shots = draw.integers(3, vocab_size, SHOTS_LEN).tolist()
    lens = [QUESTION_LENS[number % len(QUESTION_LENS)] for number in range(scale.num_requests)]
    return [shots + draw.integers(3, vocab_size, length).tolist() for length in lens]
