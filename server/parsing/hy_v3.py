"""Hunyuan 3 writes the name, then keys and values in tags. All tags end with `:opensource`.

Format: the chat template of tencent/Hy3.
"""

from __future__ import annotations

from .calls_grammar import Section
from .tagged_calls import TaggedFormat

_MODEL = ":opensource"


def _tag(name: str) -> str:
    return f"<{name}{_MODEL}>"


CALLS, CALLS_END = _tag("tool_calls"), _tag("/tool_calls")

FORMATS = (
    TaggedFormat(
        name="hy_v3",
        section=Section(CALLS, "\n", "", CALLS_END),
        before=f"{_tag('tool_call')}NAME{_tag('tool_sep')}\n",
        opening=f"{_tag('arg_key')}KEY{_tag('/arg_key')}\n{_tag('arg_value')}",
        closing=f"{_tag('/arg_value')}\n",
        after=f"{_tag('/tool_call')}\n",
        head=rf"\s{{0,8}}{_tag('tool_call')}NAME{_tag('tool_sep')}",
        key=rf"\s{{0,8}}{_tag('arg_key')}KEY{_tag('/arg_key')}\s{{0,8}}{_tag('arg_value')}",
        value_end=_tag("/arg_value"),
        follows=rf"\s{{0,8}}{_tag('/tool_call')}",
        end=rf"\s{{0,8}}{_tag('/tool_call')}\s{{0,8}}{CALLS_END}",
        found_by=lambda template: "tool_sep" in template and _MODEL in template,
        marks=(
            CALLS,
            CALLS_END,
            *map(_tag, ("tool_call", "/tool_call", "tool_sep", "arg_key", "/arg_key")),
            *map(_tag, ("arg_value", "/arg_value")),
        ),
    ),
)
