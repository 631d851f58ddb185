"""Texts with calls, as each format has them: written after the chat templates that the formats'
files name.
"""

from __future__ import annotations

from typing import Any

from call_samples import BONN, ODD, SCHEMA, TOOLS, TWO, Said, as_json, as_object
from recorded_sections import SECTIONS

__all__ = ["RECORDED", "SCHEMA", "TOOLS", "Said"]

V3_BEGIN, V3_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def _objects(opening: str, closing: str) -> list[tuple[str, Said]]:
    """Of formats that have a JSON array between two marks."""
    both = f"{as_object('weather', BONN)}, {as_object('now', {})}"
    return [
        (f"Let me see.\n\n{opening}[{both}]{closing}", ["Let me see.", *TWO]),
        (f"{opening}[{as_object('weather', ODD)}]{closing}\n", [("weather", ODD)]),
        (f"{opening} [{{'no JSON'}}]", [f"{opening} [{{'no JSON'}}]"]),
        (f'{opening}[{{"arguments": {{}}, "name": "now"}}]{closing}', [("now", {})]),
        (f"{opening}[{as_object('rm', {})}]", [f"{opening}[{as_object('rm', {})}]"]),
    ]


def _hermes(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{as_object(name, arguments)}\n</tool_call>"


def _v3(name: str, arguments: Any) -> str:
    return (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{as_json(arguments)}\n```"
        "<｜tool▁call▁end｜>"
    )


def _v31(name: str, arguments: Any) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{as_json(arguments)}<｜tool▁call▁end｜>"


def _kimi(name: str, number: int, arguments: Any) -> str:
    return (
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
        f"{as_json(arguments)}<|tool_call_end|>"
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else as_json(value)


def _function(name: str, arguments: dict[str, Any], line: str) -> str:
    """Of Qwen3-Coder."""
    told = [
        f"<parameter={key}>{line}{_text(value)}{line}</parameter>\n"
        for key, value in arguments.items()
    ]
    return f"<function={name}>\n{''.join(told)}</function>"


def _glm(name: str, arguments: dict[str, Any], line: str) -> str:
    told = [
        f"{line}<arg_key>{key}</arg_key>{line}<arg_value>{_text(value)}</arg_value>"
        for key, value in arguments.items()
    ]
    return f"<tool_call>{name}{''.join(told)}{line}</tool_call>"


def _invoke(name: str, arguments: dict[str, Any]) -> str:
    told = [
        f'<parameter name="{key}">{_text(value)}</parameter>\n' for key, value in arguments.items()
    ]
    return f'<invoke name="{name}">\n{"".join(told)}</invoke>\n'


def _tagged(opening: str, closing: str, line: str) -> list[tuple[str, Said]]:
    def call(name: str, arguments: dict[str, Any]) -> str:
        return f"{opening}\n{_function(name, arguments, line)}\n{closing}"

    return [
        (f"Let me.\n{call('weather', BONN)}\n{call('now', {})}\n", ["Let me.", *TWO]),
        (call("weather", ODD), [("weather", ODD)]),
        (
            f"{opening}\n<function=weather>\n<parameter=city>{line}\n {line}</parameter>\n"
            f"<parameter=days> 3 </parameter></function>{closing}",
            [("weather", {"city": "\n ", "days": 3})],
        ),
        (call("rm", {}), [call("rm", {})]),
        (f"{opening} is a mark", [f"{opening} is a mark"]),
    ]


def _gemma(opening: str, closing: str, quote: str) -> list[tuple[str, Said]]:
    def text(value: str) -> str:
        return f"{quote}{value}{quote}"

    bonn = f"{opening}call:weather{{city:{text(BONN['city'])},days:7}}{closing}"
    parts = f"[{text('sun')},true,null]"
    odd = f"{opening}call:weather{{city:{text(ODD['city'])},days:1,parts:{parts}}}{closing}"
    nested = f"{opening}call:now{{a:{{b:{text('{c:1}')},d:[{{e:2.5}}]}}}}{closing}"
    return [
        (f"Hm.{bonn}{opening}call:now{{}}{closing}", ["Hm.", *TWO]),
        (odd, [("weather", ODD)]),
        (nested, [("now", {"a": {"b": "{c:1}", "d": [{"e": 2.5}]}})]),
        (f"{opening}call:rm{{}}{closing}", [f"{opening}call:rm{{}}{closing}"]),
    ]


def _channel(name: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"


_PYTHONIC: list[tuple[str, Said]] = [
    (r"""[weather(city="Bö\"n", days=7), now()]""", TWO),
    ("""[weather(city="</x> {é]", days=1, parts=['sun', True, None])]""", [("weather", ODD)]),
    (
        r"""<|python_start|>[weather(city='a\n"),', days = -1, o={'a': (1, 2.5)},)]"""
        "<|python_end|>",
        [("weather", {"city": 'a\n"),', "days": -1, "o": {"a": [1, 2.5]}})],
    ),
    ("[weather(city=Bonn)]", [("weather", {"city": "Bonn"})]),
    ("[rm(a=1)]", ["[rm(a=1)]"]),
    ("[1] says now()", ["[1] says now()"]),
]


RECORDED: dict[str, list[tuple[str, Said]]] = {
    "hermes": [
        (f"Well.\n{_hermes('weather', BONN)}\n{_hermes('now', {})}\n", ["Well.", *TWO]),
        (_hermes("weather", ODD), [("weather", ODD)]),
        (
            f"{_hermes('now', {})} and then {_hermes('rm', {})}",
            [("now", {}), f" and then {_hermes('rm', {})}"],
        ),
    ],
    "mistral": [
        *_objects("[TOOL_CALLS]", ""),
        (
            '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "a1b2c3d4e"}]',
            [("now", {})],
        ),
    ],
    "mistral_args": [
        (
            f"Hm.[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{as_json(BONN)}"
            "[TOOL_CALLS]now[CALL_ID]b1b2c3d4e[ARGS]{}",
            ["Hm.", *TWO],
        ),
        (f"[TOOL_CALLS]weather[ARGS]{as_json(ODD)}", [("weather", ODD)]),
        ("[TOOL_CALLS]nowadays[ARGS]{}", ["[TOOL_CALLS]nowadays[ARGS]{}"]),
    ],
    "deepseek_v3": [
        (
            f"Ja.{V3_BEGIN}{_v3('weather', BONN)}\n{_v3('now', {})}{V3_END}",
            ["Ja.", *TWO],
        ),
        (f"{V3_BEGIN}{_v3('weather', ODD)}{V3_END}", [("weather", ODD)]),
        (f"{V3_BEGIN}{_v3('rm', {})}", [f"{V3_BEGIN}{_v3('rm', {})}"]),
    ],
    "deepseek_v31": [
        (
            f"Ja.{V3_BEGIN}{_v31('weather', BONN)}{_v31('now', {})}{V3_END}",
            ["Ja.", *TWO],
        ),
        (f"{V3_BEGIN}{_v31('weather', ODD)}{V3_END}", [("weather", ODD)]),
        ("<｜tool▁calls▁begin｜>none", ["<｜tool▁calls▁begin｜>none"]),
    ],
    "kimi_k2": [
        (
            f"I look.<|tool_calls_section_begin|>{_kimi('weather', 0, BONN)}{_kimi('now', 1, {})}"
            "<|tool_calls_section_end|>",
            ["I look.", *TWO],
        ),
        (
            f"<|tool_calls_section_begin|>{_kimi('weather', 3, ODD)}<|tool_calls_section_end|>",
            [("weather", ODD)],
        ),
        ("<|tool_calls_section_begin|> ?", ["<|tool_calls_section_begin|> ?"]),
    ],
    "granite": _objects("<|tool_call|>", ""),
    "phi4_mini": [
        *_objects("<|tool_call|>", "<|/tool_call|>"),
        (f"<|tool_call|>{as_object('now', {})}<|/tool_call|>", [("now", {})]),
    ],
    "llama3_json": [
        (
            f"{as_object('weather', BONN, 'parameters')}; {as_object('now', {}, 'parameters')}",
            TWO,
        ),
        (f"<|python_tag|>{as_object('weather', ODD, 'parameters')}", [("weather", ODD)]),
        (
            '\n\n{"type": "function", "name": "now", "parameters": {}}',
            [("now", {})],
        ),
        ('{"name": "rm", "parameters": {}}', ['{"name": "rm", "parameters": {}}']),
        ('See: {"name": "now"}', ['See: {"name": "now"}']),
        ('{"name": "no', ['{"name": "no']),
    ],
    "qwen3_coder": _tagged("<tool_call>", "</tool_call>", "\n"),
    "seed_oss": _tagged("<seed:tool_call>", "</seed:tool_call>", ""),
    "glm45": [
        (f"So:\n{_glm('weather', BONN, line)}\n{_glm('now', {}, line)}", ["So:", *TWO])
        for line in ("\n",)
    ]
    + [
        (_glm("weather", ODD, "\n"), [("weather", ODD)]),
        (_glm("nowhere", {}, "\n"), [_glm("nowhere", {}, "\n")]),
    ],
    "glm47": [
        (f"So:{_glm('weather', BONN, '')}{_glm('now', {}, '')}", ["So:", *TWO]),
        (_glm("weather", ODD, ""), [("weather", ODD)]),
    ],
    "minimax_m2": [
        (
            f"Ok\n<minimax:tool_call>\n{_invoke('weather', BONN)}{_invoke('now', {})}"
            "</minimax:tool_call>",
            ["Ok", *TWO],
        ),
        (
            f"<minimax:tool_call>\n{_invoke('weather', ODD)}</minimax:tool_call>",
            [("weather", ODD)],
        ),
        ("<minimax:tool_call>\n<invoke>", ["<minimax:tool_call>\n<invoke>"]),
    ],
    "pythonic": _PYTHONIC,
    "llama4_pythonic": _PYTHONIC,
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "openai": [
        (
            f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{_channel('weather')}"
            f"{as_json(BONN)}<|call|>",
            ["I look.", ("weather", BONN)],
        ),
        (f"{_channel('weather')}{as_json(ODD)}", [("weather", ODD)]),
        (
            " to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
            [("now", {})],
        ),
        ("<|channel|>final<|message|>2 <| 3 <|mess|> x<|return|>", ["2 <| 3 <|mess|> x"]),
        (f"{_channel('rm')}{{}}", ["{}"]),
        ("No <|channel|> here", ["No <|channel|> here"]),
    ],
    **SECTIONS,
}
