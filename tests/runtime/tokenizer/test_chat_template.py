"""Chat templates: rendered as transformers renders them, and refused with a clear message."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import CHATML, SPECIAL, byte_level, write_folder
from transformers.utils.chat_template_utils import render_jinja_template

from piecework.runtime.tokenizer.chat_template import ChatTemplateError, ChatTemplates
from piecework.runtime.tokenizer.data import TokenizerData
from piecework.runtime.tokenizer.tokenizer import (
    Tokenizer,
    load_tokenizer,
)

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
LLAMA2 = """{{ bos_token }}{% for message in messages %}
    {% if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'].strip() + ' [/INST]' -}}
    {% elif message['role'] == 'assistant' %}
        {{- ' ' ~ message['content'] ~ eos_token -}}
    {% else %}
        {{- raise_exception('Only user and assistant roles are supported, not ' ~ message.role) -}}
    {% endif %}
{% endfor %}"""
EVERYTHING = """
{%- set ns = namespace(count=0) %}
{%- if tools %}
<tools>{{ tools | tojson(indent=2) }}</tools>
{% endif %}
{%- if documents %}{{ documents | length }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- generation %}
    {%- set inner = 'x' %}
<|{{ message.role }}|>{{ message.content | trim }}{{ inner }}
    {% endgeneration %}
    {%- if inner is defined %}LEAK{% endif %}
    {%- if ns.count > 3 %}{% break %}{% endif %}
{%- endfor %}
{{ messages | tojson }} {{ thinking | default('off') }} {{ strftime_now('%Y') }}
{%- if add_generation_prompt %}
<|assistant|>
{% endif -%}
"""


def tokenizer_with(template: str | None, **more: str) -> Tokenizer:
    templates = more if template is None else {"default": template, **more}
    return Tokenizer(
        TokenizerData(backend=byte_level(), special_tokens=VARIABLES, chat_templates=templates)
    )


def render(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return tokenizer_with(template).apply_chat_template(messages, **options)


def theirs(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    kwargs = {"add_generation_prompt": True, **options.pop("template_kwargs", {}), **options}
    texts, _ = render_jinja_template([messages], chat_template=template, **VARIABLES, **kwargs)
    return texts[0]


TEXTS = st.text(st.sampled_from(" \n<>&\"'\\{}%|aé日😀")) | st.just("END")
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "skip"]), "content": TEXTS}
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("template", [CHATML, EVERYTHING])
@given(
    messages=MESSAGES,
    prompt=st.booleans(),
    tools=st.sampled_from([None, [{"type": "function", "function": {"name": "é"}}]]),
)
def test_prompts_are_those_of_transformers(
    template: str, messages: list[dict[str, Any]], prompt: bool, tools: Any
) -> None:
    options = {
        "add_generation_prompt": prompt,
        "tools": tools,
        "template_kwargs": {"thinking": "on"},
    }
    assert render(template, messages, **options) == theirs(template, messages, **options)


@pytest.mark.parametrize("template", [CHATML, LLAMA2])
@given(content=TEXTS)
def test_a_final_message_is_continued_as_in_transformers(template: str, content: str) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(template, messages, **options) == theirs(template, messages, **options)


def test_a_template_that_trims_messages_continues_after_the_trimmed_one() -> None:
    template = "{% for message in messages %}[{{ message.content | trim }}]{% endfor %}"
    assert (
        render(
            template,
            [{"role": "assistant", "content": "so "}],
            add_generation_prompt=False,
            continue_final_message=True,
        )
        == "[so"
    )


def test_continuing_leaves_the_callers_messages_alone() -> None:
    messages = [{"role": "assistant", "content": "so"}]
    render(CHATML, messages, add_generation_prompt=False, continue_final_message=True)
    assert messages == [{"role": "assistant", "content": "so"}]


@pytest.mark.parametrize(
    ("messages", "template"),
    [
        ([], CHATML),
        ([{"role": "user", "content": None}], CHATML),
        ([{"role": "user", "content": "x"}], "{{ 1 }}"),
    ],
)
def test_what_cannot_be_continued_is_refused(messages: list[dict[str, Any]], template: str) -> None:
    with pytest.raises(ChatTemplateError, match="final message"):
        render(template, messages, add_generation_prompt=False, continue_final_message=True)


def test_a_prompt_for_an_answer_and_an_open_message_exclude_each_other() -> None:
    with pytest.raises(ChatTemplateError, match="add_generation_prompt and continue_final_message"):
        render(
            CHATML,
            [{"role": "user", "content": "x"}],
            add_generation_prompt=True,
            continue_final_message=True,
        )


def test_what_the_template_says_is_in_the_error() -> None:
    with pytest.raises(
        ChatTemplateError, match=r"^Only user and assistant roles are supported, not wizard$"
    ):
        render(LLAMA2, [{"role": "wizard", "content": "x"}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content.strip() }}",
        "{{ undefined_name | tojson }}",
        "{{ 1 // 0 }}",
        "{{ [] | first.x }}",
    ],
)
def test_whatever_goes_wrong_in_a_template_is_a_chat_template_error(template: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"\w"):
        render(template, [{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages.__init__.__globals__ }}",
    ],
)
def test_templates_run_in_a_sandbox(template: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(ChatTemplateError):
        render(template, messages)
    assert len(messages) == 1


def test_a_model_without_a_template_says_how_to_give_one() -> None:
    assert tokenizer_with(None).chat_template is None
    with pytest.raises(ChatTemplateError, match="--chat-template"):
        tokenizer_with(None).apply_chat_template([{"role": "user", "content": "x"}])
    with pytest.raises(ChatTemplateError, match="only rag"):
        tokenizer_with(None, rag="x").apply_chat_template([{"role": "user", "content": "x"}])


def test_conversations_with_tools_take_the_template_for_tools() -> None:
    tokenizer = tokenizer_with("plain", tool_use="with {{ tools | length }} tools")
    assert tokenizer.apply_chat_template([]) == "plain"
    assert tokenizer.apply_chat_template([], tools=[{"type": "function"}]) == "with 1 tools"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_template_arguments_cannot_replace_the_request(name: str) -> None:
    with pytest.raises(ChatTemplateError, match=name):
        render(CHATML, [{"role": "user", "content": "x"}], template_kwargs={name: []})


def test_template_arguments_reach_the_template_and_may_replace_special_tokens() -> None:
    text = render(
        "{{ bos_token }}{{ enable_thinking }}",
        [],
        template_kwargs={"enable_thinking": False, "bos_token": "!"},
    )
    assert text == "!False"


def test_strftime_now_is_now() -> None:
    assert render("{{ strftime_now('%Y-%m') }}", []) == datetime.now().strftime("%Y-%m")


CONFIG = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2]}


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}config",
        [
            {"name": "default", "template": "{{ bos_token }}config"},
            {"name": "rag", "template": "x"},
        ],
    ],
)
def test_a_folders_config_gives_the_template(tmp_path: Path, template: object) -> None:
    tokenizer = load_tokenizer(
        str(
            write_folder(
                tmp_path, byte_level(), tokenizer_config={**CONFIG, "chat_template": template}
            )
        )
    )
    assert tokenizer.apply_chat_template([]) == "<|im_start|>config"


def test_template_files_count_more_than_the_config(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path, byte_level(), tokenizer_config={**CONFIG, "chat_template": "config"}
    )
    (folder / "chat_template.jinja").write_text("file")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.apply_chat_template([]) == "file"
    assert tokenizer.apply_chat_template([], tools=[{"type": "function"}]) == "tools"


def test_a_given_template_counts_most(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path, byte_level(), tokenizer_config={**CONFIG, "chat_template": "config"}
    )
    (tmp_path / "mine.jinja").write_text("mine {{ eos_token }}")
    assert (
        load_tokenizer(str(folder), None, str(tmp_path / "mine.jinja")).apply_chat_template([])
        == "mine <|im_end|>"
    )
    assert (
        load_tokenizer(str(folder), None, "literal {{ eos_token }}").apply_chat_template([])
        == "literal <|im_end|>"
    )


@pytest.mark.parametrize(
    ("given_template", "message"), [("/no/such/file", "--chat-template"), ("{% if %}", "line 1")]
)
def test_a_given_template_that_cannot_be_used_is_refused_at_once(
    tmp_path: Path, given_template: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_tokenizer(str(write_folder(tmp_path, byte_level())), None, given_template)


def test_a_model_with_a_broken_template_still_completes_texts(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), tokenizer_config={"chat_template": "{% for %}"})
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.encode("a")
    with pytest.raises(ChatTemplateError, match="broken"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_json_is_written_as_it_is() -> None:
    value = {"b": "<é&'>", "a": [1, None]}
    templates = ChatTemplates({"default": "{{ value | tojson }}"}, {})
    text = templates.render(
        [],
        add_generation_prompt=False,
        continue_final_message=False,
        tools=None,
        template_kwargs={"value": value},
    )
    assert text == json.dumps(value, ensure_ascii=False)
