"""Formats are found by chat templates and named in the manual, and hold with tokenizers to which
their marks are special tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded_calls import RECORDED, TOOLS
from small_templates import TEMPLATES, THOUGHTS, templates
from tiny_tokenizers import byte_level

from piecework.runtime.sampling import grammar
from piecework.runtime.sampling.grammar_cache import Grammars
from piecework.runtime.tokenizer.chat_template import DEFAULT, TOOL_USE, ChatTemplates
from piecework.runtime.tokenizer.data import TokenizerData
from piecework.runtime.tokenizer.detokenizer import Detokenizer
from piecework.runtime.tokenizer.tokenizer import Tokenizer
from piecework.server.parsing.catalog import formats, reasoning_formats
from piecework.server.parsing.choice import choose_format, choose_reasoning
from piecework.server.parsing.detection import detect
from piecework.server.parsing.tool_calls import CallRules

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", sorted({*TEMPLATES, *formats()}))
def test_the_format_is_the_one_that_reads_the_call_of_the_template(name: str) -> None:
    found = detect(templates(TEMPLATES[name]))
    assert found.form.name == name
    assert bool(found.reason) == (name == "generic")


@pytest.mark.parametrize("name", sorted({*THOUGHTS, *reasoning_formats()}))
def test_the_marks_of_a_thought_are_those_of_the_template(name: str) -> None:
    found = choose_reasoning("auto", templates(THOUGHTS[name]))
    assert found is not None and found.name == name


def test_the_template_for_conversations_with_tools_decides() -> None:
    both = ChatTemplates({DEFAULT: TEMPLATES["granite"], TOOL_USE: TEMPLATES["qwen3_coder"]}, {})
    assert choose_format("auto", both).name == "qwen3_coder"


def test_a_template_that_refuses_tool_messages_is_told_of_tools_otherwise() -> None:
    refuses = "{% if messages | length > 1 %}{{ raise_exception('one message') }}{% endif %}"
    found = detect(templates(refuses + TEMPLATES["hermes"]))
    assert found.form.name == "generic" and "one message" in found.reason


def test_instructions_decide_where_the_template_leaves_calls_out() -> None:
    instructions = 'Write <tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call>.'
    messages = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tells = instructions + "{{ tools | tojson }}" + messages
    assert detect(templates(tells)).form.name == "hermes"
    assert detect(templates(instructions + messages)).form.name == "generic"


def test_names_of_other_projects() -> None:
    assert choose_format("mistral", templates(TEMPLATES["mistral_args"])).name == "mistral_args"
    assert choose_format("mistral", None).name == "mistral"
    assert choose_format("gpt-oss", None).name == "openai"
    assert choose_format("qwen25", None).name == "hermes"
    form = choose_reasoning("openai_gptoss", None)
    assert form is not None and form.name == "gpt_oss"


def test_the_manual_names_every_format() -> None:
    manual = (ROOT / "docs/agents.md").read_text()
    for name in (*formats(), *reasoning_formats()):
        assert f"`{name}`" in manual


@pytest.mark.parametrize("name", [name for name in RECORDED if formats()[name].marks])
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
