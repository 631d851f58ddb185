"""Formats are found by chat templates and named in the manual, and hold with tokenizers to which
their marks are special tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded_calls import RECORDED, TOOLS
from tiny_tokenizers import byte_level

from piecework.runtime.parsing.reasoning import choose_reasoning, reasoning_formats
from piecework.runtime.parsing.tool_calls import CallRules, choose_format, formats
from piecework.runtime.sampling import grammar
from piecework.runtime.sampling.grammar import Grammars
from piecework.runtime.tokenizer.data import TokenizerData
from piecework.runtime.tokenizer.detokenizer import Detokenizer
from piecework.runtime.tokenizer.tokenizer import Tokenizer
from piecework.server.config import ServerConfig

ROOT = Path(__file__).parents[3]
TEMPLATES = {
    "hermes": r"<tool_call>\n{\"name\": NAME, \"arguments\": OBJECT}\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE",
    "seed_oss": "<seed:tool_call>\n<function=NAME>\n<parameter=KEY>VALUE",
    "glm45": "<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE",
    "glm47": "<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE",
    "minimax_m2": "{{ '<minimax:tool_call>' }}\n<invoke name=",
    "llama3_json": '<|start_header_id|>{{ \'{"name": NAME, "parameters": OBJECT}\' }}',
    "pythonic": "<|start_header_id|>[name(key=value, key=value)]",
    "llama4_pythonic": "<|header_start|><|python_start|>[name(key=value)]<|python_end|>",
    "mistral": "[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS] [{{ calls }}]",
    "mistral_args": "[TOOL_CALLS]{{ name }}[CALL_ID]{{ id }}[ARGS]{{ arguments }}",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>N\n```json",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ n }}<｜tool▁sep｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}",
    "granite": "<|start_of_role|>assistant<|tool_call|>{{ calls }}",
    "phi4_mini": "<|tool|>{{ tools }}<|/tool|><|tool_call|>{{ calls }}<|/tool_call|>",
    "functiongemma": "<start_function_call>call:{{ name }}{",
    "gemma4": '<|tool_call>call:{{ name }}{key:<|"|>value<|"|>}<tool_call|>',
    "openai": "<|start|>assistant<|channel|>commentary to=functions.{{ name }}",
    "generic": "{{ messages }}",
}
THOUGHTS = {
    "think": "{{ content.split('</think>') }}",
    "mistral": "[THINK]{{ thought }}[/THINK]",
    "kimi": "◁think▷{{ thought }}◁/think▷",
    "seed_oss": "<seed:think>{{ thought }}</seed:think>",
    "granite": "after 'Here is my thought process:' and 'Here is my response:'",
    "gemma4": "<|channel>thought\n{{ thought }}<channel|>",
    "gpt_oss": "<|start|>assistant<|channel|>analysis<|message|>{{ thought }}<|end|>",
}


def test_chat_templates_say_how_calls_are_written() -> None:
    assert set(TEMPLATES) == set(formats())
    for name, template in TEMPLATES.items():
        fitting = [form.name for form in formats().values() if form.matches(template)]
        assert fitting == [name] * (name != "generic")
        assert choose_format("auto", template).name == name


def test_chat_templates_say_how_thoughts_are_written() -> None:
    assert set(THOUGHTS) == set(reasoning_formats())
    for name, template in THOUGHTS.items():
        assert [form.name for form in reasoning_formats().values() if form.matches(template)] == [
            name
        ]


def test_names_of_other_projects() -> None:
    assert choose_format("mistral", TEMPLATES["mistral_args"]).name == "mistral_args"
    assert choose_format("mistral", None).name == "mistral"
    assert choose_format("gpt-oss", None).name == "openai"
    assert choose_format("qwen25", None).name == "hermes"
    form = choose_reasoning("openai_gptoss", None)
    assert form is not None and form.name == "gpt_oss"


def test_the_manual_names_every_format() -> None:
    fields = ServerConfig.__dataclass_fields__
    told = {name: str(fields[name].metadata) for name in ("tool_call_parser", "reasoning_parser")}
    manual = (ROOT / "docs/agents.md").read_text()
    for name in formats():
        assert f" {name}" in told["tool_call_parser"] and f"`{name}`" in manual
    for name in reasoning_formats():
        assert f" {name}" in told["reasoning_parser"] and f"`{name}`" in manual


@pytest.mark.parametrize("name", RECORDED)
def test_marks_that_are_special_tokens(name: str) -> None:
    """The grammar takes the tokens, the parser sees them, and their letters are not they."""
    form = formats()[name]
    backend = byte_level()
    backend.add_special_tokens(list(form.marks))
    tokenizer = Tokenizer(
        TokenizerData(backend=backend, special_tokens={}, eos_token_ids=[0], chat_templates={})
    )
    special = tokenizer.special_ids(form.marks)
    assert set(special) == set(form.marks)
    grammars = Grammars(lambda: tokenizer, tokenizer.vocab_size, frozenset([0]))
    text = RECORDED[name][0][0].removesuffix("<|call|>")
    calls = text[text.index(form.marks[0]) :] if form.marks[0] in text else text

    lark = form.grammar(TOOLS, CallRules(special=special))
    matcher = grammars.matcher(grammar.from_lark(lark, list(special.values())))
    ids = tokenizer.encode(text, add_special_tokens=False)
    matcher.accept(ids)
    assert matcher.fault is None
    shown = Detokenizer(
        tokenizer,
        [],
        stop=[],
        include_stop=False,
        skip_special_tokens=True,
        visible=frozenset(special.values()),
    )
    assert shown.push(ids)[0] + shown.finish() == text

    if form.marks[0] in text:
        lark = form.grammar(TOOLS, CallRules(required=True, special=special))
        matcher = grammars.matcher(grammar.from_lark(lark, list(special.values())))
        matcher.accept([tokenizer.encode(char, add_special_tokens=False)[0] for char in calls[:3]])
        assert matcher.fault is not None
