"""Texts with calls of formats that have a section of their own for calls; see `recorded_calls`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from call_samples import BONN, ODD, TWO, Said, as_json, as_object

Call = Callable[[str, dict[str, Any]], str]


def _section(
    call: Call, opening: str = "", between: str = "", closing: str = ""
) -> list[tuple[str, Said]]:
    """Two calls behind a text, one with arguments that are hard to read, and one that is none."""
    both = f"{opening}{call('weather', BONN)}{between}{call('now', {})}{closing}"
    unknown = f"{opening}{call('rm', {})}{closing}"
    return [
        (f"Let me see.\n\n{both}", ["Let me see.", *TWO]),
        (f"{opening}{call('weather', ODD)}{closing}\n", [("weather", ODD)]),
        (unknown, [unknown]),
    ]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else as_json(value)


def _tagged(before: str, argument: str, after: str) -> Call:
    """NAME, KEY, TYPE and VALUE stand for what they say."""

    def call(name: str, arguments: dict[str, Any]) -> str:
        told = [
            argument.replace("KEY", key)
            .replace("TYPE", "true" if isinstance(value, str) else "false")
            .replace("VALUE", _text(value))
            for key, value in arguments.items()
        ]
        return before.replace("NAME", name) + "".join(told) + after

    return call


def _command(name: str, arguments: dict[str, Any]) -> str:
    told = f'"tool_name": "{name}", "parameters": {as_json(arguments)}'
    return f'    {{"tool_call_id": "0", {told}}}'


def _command_r(name: str, arguments: dict[str, Any]) -> str:
    call = {"tool_name": name, "parameters": arguments}
    return json.dumps([call], indent=4, ensure_ascii=False)[2:-2]


def _python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={as_json(value)}' for key, value in arguments.items())})"


def _in_python(opening: str, between: str, closing: str) -> list[tuple[str, Said]]:
    odd = f"weather({', '.join(f'{key}={value!r}' for key, value in ODD.items())})"
    return [
        *_section(_python, opening, between, closing),
        (f"{opening}{odd}{closing}", [("weather", ODD)]),
    ]


def _kimi(name: str, arguments: dict[str, Any]) -> str:
    types = {str: "string", int: "number", list: "array"}
    told = [
        f'<|open|>argument key="{key}" type="{types[type(value)]}"<|sep|>{_text(value)}'
        "<|close|>argument<|sep|>"
        for key, value in arguments.items()
    ]
    return f'<|open|>call tool="{name}" index="1"<|sep|>{"".join(told)}<|close|>call<|sep|>'


def _dsml(section: str) -> list[tuple[str, Said]]:
    call = _tagged(
        '<｜DSML｜invoke name="NAME">\n',
        '<｜DSML｜parameter name="KEY" string="TYPE">VALUE</｜DSML｜parameter>\n',
        "</｜DSML｜invoke>\n",
    )
    return _section(call, f"<｜DSML｜{section}>\n", "", f"</｜DSML｜{section}>")


M3 = "]<]minimax[>["


def _lines(name: str, arguments: dict[str, Any]) -> str:
    return f"{as_object(name, arguments)}\n"


SECTIONS: dict[str, list[tuple[str, Said]]] = {
    "apertus": _section(
        lambda name, arguments: f'{{"{name}": {as_json(arguments)}}}',
        "<|tools_prefix|>[",
        ", ",
        "]<|tools_suffix|>",
    ),
    "cohere_command": _section(_command, "<|START_ACTION|>[\n", ",\n", "\n]<|END_ACTION|>"),
    "command_r": _section(_command_r, "Action:\n```json\n[\n", ",\n", "\n]\n```"),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "functionary_v3_1": _section(
        lambda name, arguments: f"<function={name}>{as_json(arguments)}</function>"
    ),
    "gigachat3": _section(
        lambda name, arguments: (
            f"<|message_sep|>\n\nfunction call<|role_sep|>\n{as_object(name, arguments)}"
        )
    ),
    "gigachat31": _section(
        lambda name, arguments: f"<|function_call|>{as_object(name, arguments)}"
    ),
    "hy_v3": _section(
        _tagged(
            "<tool_call:opensource>NAME<tool_sep:opensource>\n",
            "<arg_key:opensource>KEY</arg_key:opensource>\n"
            "<arg_value:opensource>VALUE</arg_value:opensource>\n",
            "</tool_call:opensource>\n",
        ),
        "<tool_calls:opensource>\n",
        "",
        "</tool_calls:opensource>",
    ),
    "internlm": _section(
        lambda name, arguments: (
            f"<|action_start|><|plugin|>\n{as_object(name, arguments, 'parameters')}\n"
            "<|action_end|>\n"
        )
    ),
    "jamba": _section(as_object, "<tool_calls>[", ", ", "]</tool_calls>"),
    "kimi_k3": _section(_kimi, "<|open|>tools<|sep|>", "", "<|close|>tools<|sep|>"),
    "lfm2": _in_python("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "longcat": _section(
        lambda name, arguments: (
            f"<longcat_tool_call>\n{as_object(name, arguments)}\n</longcat_tool_call>\n"
        )
    ),
    "minicpm5": [
        *_section(
            _tagged('<function name="NAME">', '<param name="KEY">VALUE</param>', "</function>\n")
        ),
        (
            '<function name="weather"><param name="city"><![CDATA[a\n</p>]]></param>'
            '<param name="days">7</param></function>',
            [("weather", {"city": "a\n</p>", "days": 7})],
        ),
    ],
    "minimax_m1": _section(_lines, "<tool_calls>\n", "", "</tool_calls>"),
    "minimax_m3": [
        *_section(
            _tagged(f'{M3}<invoke name="NAME">', f"{M3}<KEY>VALUE{M3}</KEY>", f"{M3}</invoke>\n"),
            f"{M3}<tool_call>\n",
            "",
            f"{M3}</tool_call>",
        ),
        (
            f'{M3}<tool_call>{M3}<invoke name="weather">\n{M3}<days>7{M3}</days>\n{M3}<more>'
            f"{M3}<item>1{M3}</item>{M3}<item>{M3}<more>x{M3}</more>{M3}</item>{M3}</more>"
            f"{M3}</invoke>{M3}</tool_call>",
            [("weather", {"days": 7, "more": [1, {"more": "x"}]})],
        ),
    ],
    "nemotron_nano_v2": _section(as_object, "<TOOLCALL>[", ", ", "]</TOOLCALL>"),
    "olmo3": _in_python("<function_calls>\n", "\n", "\n</function_calls>"),
    "solar_open": _section(
        lambda name, arguments: (
            f"<|tool_call:begin|>a1<|tool_call:name|>{name}<|tool_call:args|>"
            f"{as_json(arguments)}<|tool_call:end|>"
        ),
        "<|tool_calls|>",
    ),
    "step3": _section(
        _tagged(
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">\n',
            '<steptml:parameter name="KEY">VALUE</steptml:parameter>\n',
            "</steptml:invoke><｜tool_call_end｜>\n",
        ),
        "<｜tool_calls_begin｜>\n",
        "",
        "<｜tool_calls_end｜>",
    ),
    "xlam": [
        (f"[{as_object('weather', BONN)}, {as_object('now', {})}]", TWO),
        (f" [{as_object('weather', ODD)}]\n", [("weather", ODD)]),
        ('[{"name": "rm", "arguments": {}}]', ['[{"name": "rm", "arguments": {}}]']),
        ('[{"name": "no', ['[{"name": "no']),
    ],
}
