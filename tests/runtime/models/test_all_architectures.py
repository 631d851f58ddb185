"""A config.json of every architecture that transformers knows is served, or refused by one sentence
of our own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as DECODERS,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as OF_IMAGES,
)

from piecework.runtime.config.model import ModelConfig
from piecework.runtime.config.model_registry import ModelCode

# What exceptions of Python and of libraries look like.
FOREIGN = (
    "NoneType", "object", "<class", "Traceback", "Error", "unsupported operand", "Unrecognized",
    "meta tensor", "pip install", "positional argument", "'piecework'",
)  # fmt: skip
# Each stands for a way in which transformers' code cannot be made or followed.
SOME = (
    "dbrx", "blt", "jetmoe",
    "vipllava", "nemotron", "reformer", "git", "bart", "roformer",
)  # fmt: skip
ALL: dict[str, Any] = {**DECODERS, **OF_IMAGES}


def members(kind: str) -> dict[str, Any] | None:
    """What transformers takes where config.json says nothing; None where it does not say."""
    try:
        content: dict[str, Any] = AutoConfig.for_model(kind).to_dict()
    except Exception:
        return None
    name = ALL[kind] if isinstance(ALL[kind], str) else ALL[kind][0]
    text: dict[str, Any] = json.loads(json.dumps(content, default=str))
    return text | {"architectures": [name], "model_type": kind}


def refusal(folder: Path, content: dict[str, Any]) -> str | None:
    (folder / "config.json").write_text(json.dumps(content))
    try:
        ModelConfig.from_pretrained(folder, code=ModelCode("auto"))
    except ValueError as error:
        return str(error)
    return None


def assert_clear(said: str) -> None:
    assert "\n" not in said and not [word for word in FOREIGN if word in said], said
    assert any(word in said for word in ("choose", "download", "fetch", "take")), said


@pytest.mark.parametrize("kind", SOME)
def test_what_is_refused_is_refused_in_our_own_words(kind: str, tmp_path: Path) -> None:
    content = members(kind)
    assert content is not None
    said = refusal(tmp_path, content)
    assert said is not None
    assert_clear(said)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(ALL))
def test_every_architecture_is_served_or_refused(kind: str, tmp_path: Path) -> None:
    if (content := members(kind)) is None:
        pytest.skip("its class has no members of its own")
    if (said := refusal(tmp_path, content)) is not None:
        assert_clear(said)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "of_tomorrow", "architectures": ["OfTomorrowForCausalLM"]},
        {"intermediate_size": [96, 96, 96]},
        {"hidden_size": "x"},
        {"num_hidden_layers": None},
        {"rope_parameters": {"rope_type": "of_tomorrow"}},
    ],
)
def test_members_that_make_no_model_are_refused_in_our_own_words(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    content = members("olmo")
    assert content is not None
    said = refusal(tmp_path, content | changes)
    assert said is not None
    assert_clear(said)
