"""Tokens that a grammar forces are the same with proposals as without."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from toy_runner import EOS, VOCAB, assert_idle, drain, make_core, tokens

from piecework.runtime.core.generation import GenerateRequest
from piecework.runtime.core.sampling_params import SamplingParams
from piecework.runtime.sampling import grammar
from piecework.runtime.sampling.grammar_cache import Grammars
from piecework.runtime.speculative.prediction import Prediction
from piecework.runtime.speculative.speculation import Speculation

_TEXTS = [bytes([ord("a") + number]) for number in range(26)] + [b"ab", b"abc", b"bcd", b"def"]


class _Tokenizer:
    """Has several tokenisations of most texts. `encode` takes the longest tokens."""

    special_token_ids = end_token_ids = (EOS,)
    bos_token_id = None

    def token_bytes(self, token: int) -> bytes:
        return _TEXTS[token] if token < len(_TEXTS) else b"!%d" % token if token != EOS else b""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        found: list[int] = []
        while text:
            most = max(
                (each for each in _TEXTS if text.encode().startswith(each)), key=len, default=b"?"
            )
            found += [_TEXTS.index(most)] if most in _TEXTS else []
            text = text[len(most) :]
        return found


@cache
def _grammars() -> Grammars:
    tokenizer: Any = _Tokenizer()
    return Grammars(lambda: tokenizer, VOCAB, frozenset({EOS}))


@pytest.mark.parametrize("seed", range(8))
def test_forced_tokens_replace_what_a_step_sampled_in_their_place(seed: int) -> None:
    # After x or y, the letters abcdef are forced as two tokens, but each letter alone may follow.
    text = grammar.from_regex("((x|y)abcdef){8}[a-e]{4}")
    params = SamplingParams(
        max_new_tokens=60, temperature=2.0, seed=seed, grammar=text, logit_bias={0: 6.0}
    )
    request = GenerateRequest(rid="0", input_ids=[1, 2, 3], params=params)

    def answer(prediction: list[int]) -> list[int]:
        speculation = Speculation([Prediction()], most=8, max_rows=24)
        core, _ = make_core(grammars=_grammars(), speculation=speculation)
        core.add(replace(request, prediction_ids=prediction))
        found = tokens(drain(core)["0"])
        assert_idle(core)
        assert bool(prediction) == bool(core.stats().draft_tokens_total)
        return found

    plain = answer([])
    assert answer(plain) == plain


def test_the_time_of_proposals_ends_no_answer() -> None:
    matcher = _grammars().matcher(grammar.from_regex("[a-z]{1,40}"))
    matcher._took(10.0, is_ahead=True)
    assert matcher.fault is None
    assert matcher.admits([0, 1]) == 0


def test_a_fault_after_proposals_is_none_of_the_answer() -> None:
    matcher = _grammars().matcher(grammar.from_regex("[a-c]{1,40}"))
    matcher.fill(np.zeros(-(-VOCAB // 32), np.int32), [0, 25])  # "z" may not follow.
    assert matcher.fault is None
    assert matcher.takes([0, 1]) and matcher.admits([0, 1]) == 2
