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


_M3 = "]<]minimax[>["
_NESTED = (
    "{% macro tags(value) %}{% if value is mapping %}{% for key, one in value.items() %}"
    + _M3 + "<{{ key }}>{{ tags(one) }}" + _M3 + "</{{ key }}>{% endfor %}"
    "{% elif value is sequence and value is not string %}{% for one in value %}"
    + _M3 + "<item>{{ tags(one) }}" + _M3 + "</item>{% endfor %}"
    "{% else %}" + BARE + "{% endif %}{% endmacro %}"
)  # fmt: skip


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


_PYTHON_ARGUMENT = "{{ key }}={{ value | tojson }}" + SEPARATED
_PYTHON_CALL = "{{ call.name }}(" + _arguments(_PYTHON_ARGUMENT) + ")"


def _python(opening: str, closing: str) -> str:
    return _calls(_PYTHON_CALL + SEPARATED, f"{opening}[", f"]{closing}")


def _dsml(section: str) -> str:
    argument = (
        '<｜DSML｜parameter name="{{ key }}" string="{{ (value is string) | tojson }}">'
        + BARE
        + "</｜DSML｜parameter>\n"
    )
    invoke = '<｜DSML｜invoke name="{{ call.name }}">\n' + _arguments(argument)
    return _calls(invoke + "</｜DSML｜invoke>\n", f"<｜DSML｜{section}>\n", f"</｜DSML｜{section}>")


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
    "minimax_m3": _NESTED
    + _calls(
        _M3 + '<invoke name="{{ call.name }}">{{ tags(call.arguments) }}' + _M3 + "</invoke>\n",
        f"{_M3}<tool_call>\n",
        f"{_M3}</tool_call>",
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
    "apertus": _calls(
        "{{ {call.name: call.arguments} | tojson }}" + SEPARATED,
        "<|tools_prefix|>[",
        "]<|tools_suffix|>",
    ),
    "cohere_command": _calls(
        "{{ {'tool_call_id': '0', 'tool_name': call.name, 'parameters': call.arguments} | tojson }}"
        + SEPARATED,
        "<|START_ACTION|>[\n",
        "\n]<|END_ACTION|>",
    ),
    "command_r": _calls(
        "{{ {'tool_name': call.name, 'parameters': call.arguments} | tojson }}" + SEPARATED,
        "Action:\n```json\n[\n",
        "\n]\n```",
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "functionary_v3_1": _calls("<function={{ call.name }}>" + JSON + "</function>"),
    "gigachat3": _calls("<|message_sep|>\n\nfunction call<|role_sep|>\n" + OBJECT),
    "gigachat31": _calls("<|function_call|>" + OBJECT),
    "hy_v3": _calls(
        "<tool_call:opensource>{{ call.name }}<tool_sep:opensource>\n"
        + _arguments(
            "<arg_key:opensource>{{ key }}</arg_key:opensource>\n<arg_value:opensource>"
            + BARE
            + "</arg_value:opensource>\n"
        )
        + "</tool_call:opensource>\n",
        "<tool_calls:opensource>\n",
        "</tool_calls:opensource>",
    ),
    "internlm": _calls("<|action_start|><|plugin|>\n" + OBJECT + "<|action_end|>\n"),
    "jamba": _calls(OBJECT + SEPARATED, "<tool_calls>[\n    ", "\n]</tool_calls>"),
    "kimi_k3": _calls(
        '<|open|>call tool="{{ call.name }}" index="{{ loop.index }}"<|sep|>'
        + _arguments(
            '<|open|>argument key="{{ key }}" type="{{ '
            "'string' if value is string else 'number' if value is number else 'array' }}"
            '"<|sep|>' + BARE + "<|close|>argument<|sep|>"
        )
        + "<|close|>call<|sep|>",
        "<|open|>tools<|sep|>",
        "<|close|>tools<|sep|>",
    ),
    "lfm2": _python("<|tool_call_start|>", "<|tool_call_end|>"),
    "longcat": _calls(f"<longcat_tool_call>\n{OBJECT}\n</longcat_tool_call>"),
    "minicpm5": _calls(
        '<function name="{{ call.name }}">'
        + _arguments('<param name="{{ key }}">{{ value }}</param>')
        + "</function>"
    ),
    "minimax_m1": _calls(f"{OBJECT}\n", "<tool_calls>\n", "</tool_calls>"),
    "nemotron_nano_v2": _calls(OBJECT + SEPARATED, "<TOOLCALL>[", "]</TOOLCALL>"),
    "olmo3": _calls(_PYTHON_CALL + "\n", "<function_calls>", "</function_calls>"),
    "solar_open": _calls(
        "<|tool_call:begin|>{{ each.id }}<|tool_call:name|>{{ call.name }}<|tool_call:args|>"
        + JSON
        + "<|tool_call:end|>",
        "<|tool_calls|>",
    ),
    "step3": _calls(
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{{ call.name }}">\n'
        + _arguments('<steptml:parameter name="{{ key }}">' + BARE + "</steptml:parameter>\n")
        + "</steptml:invoke><｜tool_call_end｜>\n",
        "<｜tool_calls_begin｜>\n",
        "<｜tool_calls_end｜>",
    ),
    "xlam": _calls(OBJECT + SEPARATED, "[", "]"),
    "generic": _turns("{{ message.content }}", tools=""),
}


def _thought(opening: str, closing: str) -> str:
    thought = "{% if message.reasoning_content %}" + opening + "{{ message.reasoning_content }}"
    return _turns(thought + closing + "{% endif %}{{ message.content }}")


THOUGHTS = {
    "think": _thought("<think>\n", "\n</think>\n"),
    "think_answer": _thought("<think>\n", "\n</think>\n<answer>\n"),
    "think_response": "{# Write <response></response>. #}" + _thought("<think>", "</think>"),
    "kimi_k3": _thought("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "minimax_m3": _thought("<mm:think>", "</mm:think>"),
    "hy_v3": "{% set model = ':opensource' %}"
    + _thought("{{ '<think' + model + '>' }}", "{{ '</think' + model + '>' }}"),
    "exaone_deep": _thought("<thought>\n", "\n</thought>\n"),
    "apertus": _thought("<|inner_prefix|>", "<|inner_suffix|>"),
    "apriel": _thought("Here are my reasoning steps:\n", "\n[BEGIN FINAL RESPONSE]\n"),
    "cohere_command": _thought("<|START_THINKING|>", "<|END_THINKING|><|START_RESPONSE|>"),
    "mistral": _thought("[THINK]", "[/THINK]"),
    "kimi": _thought("◁think▷", "◁/think▷"),
    "seed_oss": _thought("<seed:think>", "</seed:think>"),
    "granite": _thought("Here is my thought process:", "Here is my response:"),
    "gemma4": _thought("<|channel>thought\n", "<channel|>"),
    "gpt_oss": _thought(f"{_CHANNEL}analysis<|message|>", f"<|end|>{_CHANNEL}final<|message|>"),
}
