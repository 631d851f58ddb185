"""Chooses the formats of a model: the one that a flag names, or the one of its chat template."""

from __future__ import annotations

from collections.abc import Mapping

from ...runtime.tokenizer.chat_template import ChatTemplates
from .catalog import formats, reasoning_formats
from .detection import detect, detect_reasoning
from .reasoning import ReasoningFormat
from .tool_calls import ToolCallFormat

AUTO, NONE = "auto", "none"
# Names of vLLM and SGLang for formats of thoughts.
_ALIASES: Mapping[str, str] = {
    **dict.fromkeys(
        ("deepseek_r1", "deepseek-r1", "deepseek_v3", "deepseek-v3", "qwen3", "glm45", "minimax"),
        "think",
    ),
    **dict.fromkeys(
        ("deepseek_v4", "glm47", "kimi_k2", "minimax_m2", "mimo", "nemotron_v3", "olmo3"), "think"
    ),
    **dict.fromkeys(("step3", "step3p5", "poolside_v1", "holo2"), "think"),
    **dict.fromkeys(("openai_gptoss", "gpt-oss", "openai", "harmony"), "gpt_oss"),
    **dict.fromkeys(("cohere_command3", "cohere_command4"), "cohere_command"),
    "ernie45": "think_response",
    "hunyuan_a13b": "think_answer",
}


def choose_format(name: str, templates: ChatTemplates | None) -> ToolCallFormat:
    """The format that `--tool-call-parser` names. The chat template decides for `auto`, and if
    several formats have the name. Raises `ValueError` with the names that there are.
    """
    known = formats()
    named = [form.name for form in known.values() if name in (AUTO, form.name, *form.aliases)]
    if not named:
        raise ValueError(
            f"--tool-call-parser must be {AUTO} or one of {', '.join(known)}, got {name}"
        )
    if templates is None or len(named) == 1:
        return known["generic"] if name == AUTO else known[named[0]]
    if name == AUTO:
        return detect(templates).form
    found = detect(templates, tuple(named)).form
    return found if found.name in named else known.get(name, known[named[0]])


def choose_reasoning(name: str, templates: ChatTemplates | None) -> ReasoningFormat | None:
    """The format that `--reasoning-parser` names. The chat template decides for `auto`. None if the
    model does not think. Raises `ValueError` with the names that there are.
    """
    known = reasoning_formats()
    if name == NONE:
        return None
    if name == AUTO:
        return None if templates is None else detect_reasoning(templates)
    found = known.get(_ALIASES.get(name, name))
    if found is None:
        raise ValueError(
            f"--reasoning-parser must be {AUTO}, {NONE} or one of {', '.join(known)}, got {name}"
        )
    return found
