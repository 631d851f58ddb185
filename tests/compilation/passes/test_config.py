"""What `--passes` may say, and which lines it answers with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecework.compilation.pass_manager import PassManager
from piecework.compilation.passes.config import PassConfig, pass_names
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.runtime.config.engine import EngineConfig

NAMES = pass_names()
WISHES = st.sampled_from([None, True, False])


@given(st.fixed_dictionaries(dict.fromkeys(NAMES, WISHES)), st.none() | st.integers(1, 10**6))
def test_a_config_is_read_from_the_text_that_it_writes(
    wishes: dict[str, bool | None], tokens: int | None
) -> None:
    config = PassConfig(**wishes, sequence_parallel_tokens=tokens)
    assert PassConfig.parse(str(config)) == config
    EngineConfig(passes=str(config))


def test_names_change_what_the_machine_chooses_or_nothing_at_all() -> None:
    assert PassConfig.parse("auto") == PassConfig()
    assert PassConfig.parse("+norm_quant,-noop") == PassConfig(norm_quant=True, noop=False)
    only = PassConfig.parse("none,+lower")
    assert only.lower is True and only.noop is False and only.pack_linear is False


@pytest.mark.parametrize(
    "text", ["+unknown", "norm_quant", "", "auto,", "auto,none", "-", "+norm_quant +noop", "all"]
)
def test_what_is_no_pass_is_answered_with_those_that_there_are(text: str) -> None:
    with pytest.raises(ValueError, match="--passes must be") as raised:
        EngineConfig(passes=text)
    assert all(name in str(raised.value) for name in NAMES)
    assert "\n" not in str(raised.value)


def test_a_pass_that_is_both_wanted_and_not_is_refused() -> None:
    with pytest.raises(ValueError, match=r"both \+noop and -noop"):
        EngineConfig(passes="+noop,+lower,-noop")
    assert PassConfig.parse("+noop,+noop").noop is True


@pytest.mark.parametrize("text", ["0", "-1", "x", "", "1.5", "²"])
def test_a_threshold_that_is_no_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="sequence_parallel_tokens=N, N at least 1"):
        EngineConfig(passes=f"auto,sequence_parallel_tokens={text}")
    with pytest.raises(ValueError, match="leave one out"):
        EngineConfig(passes="sequence_parallel_tokens=2,sequence_parallel_tokens=3")


def test_no_pass_runs_where_none_is_wanted_and_each_says_why() -> None:
    manager = PassManager(PassConfig.parse("none"), CpuPlatform(), fuses=True)
    assert manager.key == [] and list(manager.off) == NAMES


@pytest.mark.parametrize("wish", [None, True, False])
def test_memory_decides_on_packed_weights_unless_the_user_has(wish: bool | None) -> None:
    for packs in (False, True):
        settled = PassConfig(pack_linear=wish).settled(packs=packs)
        assert settled.pack_linear is (packs if wish is None else wish)
