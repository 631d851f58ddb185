"""InternLM 2.5 writes one JSON object between `<|action_start|><|plugin|>` and `<|action_end|>`.

Format: the chat guide of internlm/internlm2_5-7b-chat.
"""

from __future__ import annotations

from .calls_grammar import Section
from .json_calls import OBJECT_END, OBJECT_HEAD, JsonFormat

ACTION, PLUGIN, ACTION_END = "<|action_start|>", "<|plugin|>", "<|action_end|>"

FORMATS = (
    JsonFormat(
        name="internlm",
        aliases=("internlm2",),
        section=Section(
            f"{ACTION}{PLUGIN}",
            "\n",
            f"{ACTION_END}\n{ACTION}{PLUGIN}\n",
            ACTION_END,
        ),
        before='{"name": "NAME", "parameters": ',
        after="}\n",
        head=OBJECT_HEAD,
        follows=rf"{OBJECT_END}\s{{0,20}}<\|action_end\|>\s{{0,8}}<\|action_start\|><\|plugin\|>",
        end=rf"{OBJECT_END}\s{{0,20}}<\|action_end\|>",
        found_by=lambda template: ACTION in template,
        marks=(ACTION, PLUGIN, ACTION_END),
    ),
)
