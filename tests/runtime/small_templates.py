"""Small chat templates, one for each format of tool calls and of thoughts, that write them as the
templates of real models do.
"""

from __future__ import annotations

from piecework.runtime.tokenizer.chat_template import DEFAULT, ChatTemplates

JSON = "{{ call.arguments | tojson }}"
OBJECT = '{"name": "{{ call.name }}", "arguments": ' + JSON + "}"
SEPARATED = "{{ ', ' if not loop.last }}"
BARE = "{{ value if value is string else value | tojson }}"


def templates(source: str) -> ChatTemplates:
    return ChatTemplates({DEFAULT: source}, {"bos_token": "<s>"})


def _turns(said: str, *, tools: str = "{{ tools | tojson }}") -> str:
    """A template whose assistant's turns hold `said`."""
    return (
        "{{ bos_token }}{% if tools %}Tools: " + tools + "\n{% endif %}"
        "{% for message in messages %}<|{{ message.role }}|>"
        "{% if message.role == 'assistant' %}" + said + "{% else %}{{ message.content }}{% endif %}"
        "<|over|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


def _calls(call: str, opening: str = "", closing: str = "") -> str:
    """A template with `call` for each tool call, all between `opening` and `closing`."""
    each = "{% for each in message.tool_calls %}{% set call = each.function %}" + call
    calls = opening + each + "{% endfor %}" + closing
    return _turns("{{ message.content }}{% if message.tool_calls %}" + calls + "{% endif %}")


def _arguments(argument: str) -> str:
    return "{% for key, value in call.arguments.items() %}" + argument + "{% endfor %}"


def _tags(mark: str, line: str) -> str:
    value = "<parameter={{ key }}>" + line + BARE + line + "</parameter>\n"
    function = "<function={{ call.name }}>\n" + _arguments(value) + "</function>"
    return _calls(f"<{mark}>\n{function}\n</{mark}>")


def _glm(line: str) -> str:
    argument = line + "<arg_key>{{ key }}</arg_key>" + line + f"<arg_value>{BARE}</arg_value>"
    return _calls("<tool_call>{{ call.name }}" + _arguments(argument) + f"{line}</tool_call>")


def _gemma(opening: str, closing: str, quote: str) -> str:
    text = quote + "{{ VALUE }}" + quote
    item = "{% for item in value %}" + text.replace("VALUE", "item") + "{{ ',' if not loop.last }}"
    value = (
        "{{ key }}:{% if value is string %}" + text.replace("VALUE", "value") + "{% elif value is "
        "sequence %}[" + item + "{% endfor %}]{% else %}{{ value | tojson }}{% endif %}"
        "{{ ',' if not loop.last }}"
    )
    name = "{{ call.name + '{' }}"
    return _calls(f"{opening}call:{name}" + _arguments(value) + f"{{{{ '}}' }}}}{closing}")


def _python(opening: str, closing: str) -> str:
    argument = "{{ key }}={{ value | tojson }}" + SEPARATED
    call = "{{ call.name }}(" + _arguments(argument) + ")" + SEPARATED
    return _calls(call, f"{opening}[", f"]{closing}")


_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
_CHANNEL = "<|start|>assistant<|channel|>"

TEMPLATES = {
    "hermes": _calls(f"<tool_call>\n{OBJECT}\n</tool_call>"),
    "qwen3_coder": _tags("tool_call", "\n"),
    "seed_oss": _tags("seed:tool_call", ""),
    "glm45": _glm("\n"),
    "glm47": _glm(""),
    "minimax_m2": _calls(
        '<invoke name="{{ call.name }}">\n'
        + _arguments('<parameter name="{{ key }}">' + BARE + "</parameter>\n")
        + "</invoke>\n",
        "<minimax:tool_call>\n",
        "</minimax:tool_call>",
    ),
    "llama3_json": _calls(OBJECT.replace("arguments", "parameters", 1)),
    "pythonic": _python("", ""),
    "llama4_pythonic": _python("<|python_start|>", "<|python_end|>"),
    "mistral": _calls(OBJECT + SEPARATED, "[TOOL_CALLS] [", "]"),
    "mistral_args": _calls("[TOOL_CALLS]{{ call.name }}[CALL_ID]{{ each.id }}[ARGS]" + JSON),
    "deepseek_v3": _calls(
        _DEEPSEEK_CALL + "function<｜tool▁sep｜>{{ call.name }}\n```json\n" + JSON + "\n```"
        "<｜tool▁call▁end｜>",
        *_DEEPSEEK,
    ),
    "deepseek_v31": _calls(
        _DEEPSEEK_CALL + "{{ call.name }}<｜tool▁sep｜>" + JSON + "<｜tool▁call▁end｜>", *_DEEPSEEK
    ),
    "kimi_k2": _calls(
        "<|tool_call_begin|>functions.{{ call.name }}:0<|tool_call_argument_begin|>"
        + JSON
        + "<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    "granite": _calls(OBJECT + SEPARATED, "<|tool_call|>[", "]"),
    "phi4_mini": _calls(OBJECT + SEPARATED, "<|tool_call|>[", "]<|/tool_call|>"),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "openai": _calls(
        f"{_CHANNEL}commentary to=functions.{{{{ call.name }}}}<|message|>{JSON}<|call|>"
    ),
    "generic": _turns("{{ message.content }}", tools=""),
}


def _thought(opening: str, closing: str) -> str:
    thought = "{% if message.reasoning_content %}" + opening + "{{ message.reasoning_content }}"
    return _turns(thought + closing + "{% endif %}{{ message.content }}")


THOUGHTS = {
    "think": _thought("<think>\n", "\n</think>\n"),
    "mistral": _thought("[THINK]", "[/THINK]"),
    "kimi": _thought("◁think▷", "◁/think▷"),
    "seed_oss": _thought("<seed:think>", "</seed:think>"),
    "granite": _thought("Here is my thought process:", "Here is my response:"),
    "gemma4": _thought("<|channel>thought\n", "<channel|>"),
    "gpt_oss": _thought(f"{_CHANNEL}analysis<|message|>", f"<|end|>{_CHANNEL}final<|message|>"),
}
