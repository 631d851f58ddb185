"""Mistral writes `[TOOL_CALLS]` and a JSON array, or from tokenizer version 11 on a name and
`[ARGS]`.

Format: the chat templates of Mistral-7B-Instruct-v0.3, Mistral-Small-3.1 and 3.2, Devstral and
Magistral; mistral-common.
"""

from __future__ import annotations

from .calls_grammar import Section, literal
from .json_calls import OBJECT_END, OBJECT_HEAD, JsonFormat
from .tool_calls import CallRules

CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ARGS_HEAD = r"NAME(?:\[CALL_ID\]\w{1,64})?\s{0,4}(?:\[ARGS\])?\s{0,8}(?=\{)"


class MistralArgs(JsonFormat):
    """A `JsonFormat` whose calls may have an id."""

    def head_of(self, name: str, rules: CallRules) -> str:
        call_id, args = literal(CALL_ID, rules.special), literal(ARGS, rules.special)
        return f"{literal(name, {})} ({call_id} /[a-zA-Z0-9]{{9}}/)? {args}"


MISTRAL = JsonFormat(
    name="mistral",
    section=Section(CALLS, "[", ", ", "]"),
    before='{"name": "NAME", "arguments": ',
    after="}",
    head=rf"\s{{0,8}}(?:\[?{OBJECT_HEAD}|{_ARGS_HEAD})",
    follows=rf"(?:{OBJECT_END}\s{{0,20}},|\s{{0,8}}\[TOOL_CALLS\])",
    end=rf"{OBJECT_END}\s{{0,20}}\]",
    found_by=lambda template: CALLS in template and ARGS not in template,
    marks=(CALLS, CALL_ID, ARGS),
)
FORMATS = (
    MISTRAL,
    MistralArgs(
        name="mistral_args",
        aliases=("mistral",),
        section=Section(CALLS, "", CALLS, ""),
        before=f"NAME{ARGS}",
        after="",
        head=MISTRAL.head,
        follows=MISTRAL.follows,
        end=MISTRAL.end,
        found_by=lambda template: CALLS in template and ARGS in template,
        marks=MISTRAL.marks,
    ),
)
