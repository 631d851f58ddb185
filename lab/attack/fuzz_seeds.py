"""Valid bodies for endpoints of a language model, paths without a body, and values that harm.

The fuzz campaign mutates the bodies.
"""

from __future__ import annotations

import json
from typing import Any

from .control_seeds import CONTROL_GETS, CONTROL_SEEDS
from .ollama_seeds import OLLAMA_SEEDS
from .stored_seeds import STORED_GETS, STORED_SEEDS

_SAMPLING = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.5, "6": -100},
    "stop": ["x", "yz"],
    "stop_token_ids": [7],
    "ignore_eos": True,
    "skip_special_tokens": False,
    "n": 2,
}
_OPENAI = {
    "model": "default",
    "seed": 1,
    "stream": False,
    "user": "u",
    "best_of": 2,
    "min_tokens": 1,
    "priority": 1,
}
_CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "me"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "The fox"},
]
_BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "The fox"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm", "signature": "s"},
            {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
        ],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x", "is_error": True}],
    },
]
_CALLS = [
    {"role": "developer", "content": "Use tools."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "rain"}]},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    {"role": "user", "content": "Then?"},
]
_SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 9},
        "b": {"type": "array", "items": {"$ref": "#/$defs/s"}, "maxItems": 2},
        "c": {"anyOf": [{"type": "null"}, {"enum": ["x", "y"]}, {"const": 1}]},
        "d": {"type": "string", "format": "date", "maxLength": 10},
    },
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"s": {"type": "string", "pattern": "^[a-z]{1,3}$"}},
}
_TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": _SCHEMA, "strict": True},
    },
    {"type": "function", "function": {"name": "g"}},
]
_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": _SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}
_FORMS: tuple[dict[str, Any], ...] = (
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}}},
    {"response_format": _TAG},
    {"regex": "(a|b)+[0-9]{1,3}"},
    {"ebnf": 'root ::= "a" tail*\ntail ::= [b-d] | "x"'},
    {"guided_grammar": 'start: "a" B+\nB: /[b-d]/'},
    {"guided_choice": ["yes", "no"]},
    {"structured_outputs": {"json": _SCHEMA}},
)
_OTHER_ITEMS = [
    {"type": "message", "role": "developer", "content": "Be brief."},
    {"role": "assistant", "content": [{"type": "output_text", "text": "Hi", "annotations": []}]},
    {"type": "function_call", "call_id": "c", "name": "f", "namespace": "n", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]},
    {"type": "custom_tool_call", "call_id": "d", "name": "c", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "d", "output": "x"},
    {"type": "local_shell_call", "call_id": "e", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "local_shell_call_output", "call_id": "e", "output": "x"},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "q"}},
    {"type": "mcp_call", "id": "mcp_1", "name": "m", "arguments": "{}", "output": None},
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
    {"role": "user", "content": "Hi"},
]
_OTHER_BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "e"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "redacted_thinking", "data": "x"},
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
            {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "t",
                "content": [
                    {"type": "image", "source": {"type": "base64", "data": "x"}},
                    {"type": "tool_reference", "tool_name": "f"},
                ],
            },
            {"type": "text", "text": "Then?"},
        ],
    },
]
_LLAMA_CPP = {
    "n_predict": -1, "max_tokens": 3, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1,
    "repeat_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": -1,
    "ignore_eos": False, "logit_bias": [[5, 1.5], ["Hi", False]], "return_tokens": True,
    "response_fields": ["content", "timings/prompt_n"], "timings_per_token": True, "id_slot": 0,
}  # fmt: skip
# Valid bodies for the endpoints of a language model. The first of each endpoint is minimal.
TEXT_SEEDS: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/completions": (
        {"prompt": "The fox", "max_tokens": 4},
        {"prompt": ["The fox", "Zwölf Boxkämpfer"], "max_tokens": 4, "echo": True, "logprobs": 2},
        {
            "prompt": [[5, 6, 7], [8]],
            "max_tokens": 3,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        {"prompt": "The fox", "max_tokens": 4, **_SAMPLING, **_OPENAI},
        {"prompt": "The fox", "max_tokens": 4, "prompt_logprobs": 1},
        *({"prompt": "The fox", "max_tokens": 4, **form} for form in _FORMS),
    ),
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
        {
            "messages": _CHAT,
            "max_completion_tokens": 4,
            "logprobs": True,
            "top_logprobs": 2,
            "stream": True,
        },
        {
            "messages": _CHAT,
            "max_tokens": 4,
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        {
            "messages": _CHAT,
            "max_tokens": 4,
            "chat_template_kwargs": {"a": 1},
            **_SAMPLING,
            **_OPENAI,
        },
        {
            "messages": _CALLS,
            "max_tokens": 4,
            "tools": _TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "parallel_tool_calls": False,
            "reasoning_effort": "low",
            "max_thinking_tokens": 2,
        },
        {"messages": _CALLS, "max_tokens": 4, "tools": _TOOLS, "tool_choice": "required"},
        {"messages": _CHAT, "max_tokens": 4, "store": True, "metadata": {"a": "b"}},
        *({"messages": _CHAT, "max_tokens": 4, **form} for form in _FORMS),
    ),
    "/generate": (
        {"text": "The fox", "sampling_params": {"max_new_tokens": 4}},
        {
            "text": ["The fox", "Hi"],
            "sampling_params": [{"max_new_tokens": 4}, {"max_new_tokens": 3, **_SAMPLING}],
        },
        {
            "input_ids": [[5, 6], [7]],
            "sampling_params": {"max_new_tokens": 4},
            "return_logprob": True,
            "top_logprobs_num": [1, 2],
        },
        {
            "text": "The fox",
            "sampling_params": {"max_new_tokens": 4, "no_stop_trim": True},
            "stream": True,
            "logprob_start_len": 0,
        },
        *(
            {"text": "The fox", "sampling_params": {"max_new_tokens": 4, **form}}
            for form in (
                {"json_schema": _SCHEMA},
                {"regex": "[ab]{1,3}"},
                {"ebnf": "root ::= [a-c]+"},
                {"structural_tag": json.dumps(_TAG)},
            )
        ),
    ),
    "/completion": (
        {"prompt": "The fox", "n_predict": 4},
        {"prompt": ["The fox", [5, "Hi", 6], {"prompt_string": "Hi"}], "n_predict": 3, "n_cmpl": 2},
        {"prompt": [5, "Hi"], "n_predict": 4, "stream": True, "n_probs": 2, "stop": ["x", ""]},
        {"prompt": "The fox", **_LLAMA_CPP},
        {"prompt": "The fox", "n_predict": 4, "logit_bias": {"5": 1, "Hi": -1}},
        {"prompt": "The fox", "n_predict": 4, "grammar": 'root ::= "a" [b-d]*'},
        {"prompt": "The fox", "n_predict": 4, "json_schema": _SCHEMA},
    ),
    "/completions": ({"prompt": "The fox", "n_predict": 4},),
    "/infill": (
        {"input_prefix": "def f(", "input_suffix": ")", "n_predict": 4},
        {"input_prefix": "", "input_suffix": ")", "input_extra": [{"text": "x"}], "stream": True},
    ),
    "/apply-template": ({"messages": _CHAT}, {"messages": _CALLS, "tools": _TOOLS}),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
        {
            "messages": _BLOCKS,
            "max_tokens": 4,
            "system": [{"type": "text", "text": "Be brief."}],
            "stream": True,
            "temperature": 0.7,
            "top_k": 5,
            "top_p": 0.9,
            "stop_sequences": ["x"],
            "tools": [{"name": "f", "input_schema": {"type": "object"}, "strict": True}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "thinking": {"type": "adaptive"},
            "metadata": {"user_id": "u"},
        },
        {
            "messages": _OTHER_BLOCKS,
            "max_tokens": 4,
            "tools": [
                {"type": "web_search_20250305", "name": "web_search"},
                {"name": "f", "input_schema": _SCHEMA},
            ],
            "tool_choice": {"type": "tool", "name": "f"},
            "thinking": {"type": "enabled", "budget_tokens": 2},
            "output_config": {"effort": "low"},
        },
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 4,
            "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}},
        },
    ),
    "/v1/messages/count_tokens": (
        {"messages": _BLOCKS, "system": "Be brief."},
        {"messages": _OTHER_BLOCKS},
    ),
    "/v1/responses": (
        {"model": "default", "input": "Hi", "max_output_tokens": 4, "store": False},
        {
            "model": "default",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {
                    "type": "reasoning",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "Hm."}],
                },
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
                {"type": "custom_tool_call", "call_id": "d", "name": "c", "input": "x"},
            ],
            "instructions": "Be brief.",
            "tools": [
                {"type": "function", "name": "f", "strict": True},
                {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
                {"type": "custom", "name": "c"},
            ],
            "tool_choice": "auto",
            "text": {"format": {"type": "text"}},
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "metadata": {"a": "b"},
            "max_output_tokens": 4,
            "stream": True,
        },
        {"model": "default", "input": "Hi", "max_output_tokens": 4, "background": True},
        {"model": "default", "input": "Hi", "previous_response_id": "resp_1"},
        {"model": "default", "input": [{"type": "item_reference", "id": "msg_1"}]},
        {"model": "default", "input": "Hi", "conversation": {"id": "conv_1"}},
        {
            "model": "default",
            "input": _OTHER_ITEMS,
            "tools": [
                {"type": "web_search"},
                {"type": "mcp", "server_label": "m", "server_url": "http://127.0.0.1:1/mcp"},
                {"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "c"}]},
                {
                    "type": "custom",
                    "name": "c",
                    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'},
                },
                {"type": "function", "name": "f", "parameters": _SCHEMA, "strict": True},
            ],
            "tool_choice": {"type": "function", "name": "f"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}},
            "reasoning": {"effort": "low", "summary": "auto"},
            "truncation": "auto",
            "max_output_tokens": 4,
        },
    ),
    "/v1/responses/input_tokens": ({"model": "default", "input": "Hi"},),
    **OLLAMA_SEEDS,
    **STORED_SEEDS,
    "/v1/tokenize": (
        {"prompt": "The fox"},
        {"messages": _CALLS, "tools": _TOOLS, "reasoning_effort": "high"},
        {"messages": _CHAT},
        {"prompt": ["a", "b"], "add_special_tokens": False},
        {"content": "The fox", "add_special": True, "with_pieces": True, "parse_special": False},
    ),
    "/tokenize": ({"prompt": "The fox"},),
    "/detokenize": ({"tokens": [5, 6]},),
    "/v1/detokenize": ({"tokens": [5, 6]}, {"tokens": [[5], [6, 7]], "skip_special_tokens": False}),
    **CONTROL_SEEDS,
}
GETS = (
    "/health", "/ready", "/metrics", "/version", "/v1/models", "/v1/models/default", "/server_info",
    "/get_model_info", "/health_generate",
    "/props", "/slots", "/slots?fail_on_no_slot=1", "/slots?fail_on_no_slot=%ff",
    "/docs", "/openapi.json", "/v1/completions", "/nothing", "/v1/models/%00%ff", "/?a=%", "//",
    "/v1/images/files/x", "/v1/status", "/v1/loads", "/tokenizer_info", "/v1/responses/resp_1",
    "/v1/responses/resp_1?stream=x&starting_after=-1", "/v1/responses/resp_1/input_items?limit=0",
    "/v1/responses/resp_1/input_items?order=%ff&after=%00", "/v1/files?limit=1e9&after=x",
    "/v1/files/..%2f..%2fetc", "/v1/files/file-1/content", "/v1/batches?limit=-1",
    "/v1/batches/batch_1", "/v1/models/" + "a" * 5000,
    "/api/tags", "/api/ps", "/api/version", "/api/blobs/..%2fa", "/api/" + "a" * 5000,
    "/api/delete", "/page/app.js", "/page/..%2f..%2fetc", *CONTROL_GETS, *STORED_GETS,
)  # fmt: skip
# The values that a member may be replaced by.
HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 0.0, -0.0, 0.5, 1e-46, 1e-40, 5e-324, 3.5e38, 1e308, 2**31,
    2**63, -(2**63), 10**400,
    "", "\x00", "a", "\ud7ff", "😀" * 50, "a" * 5000, "<|im_start|>", "<|endoftext|>", "default",
    "user", "text", "nan", "Infinity", "1e400",
    [], {}, [[]], [{}], {"": None}, [0], [-1], [511], [699], [49151], [2**40], ["a"], [None],
    {"type": "text", "text": "x"}, [["a"], [1]],
    {"role": "user", "content": "x"}, {"role": "tool", "content": None}, [1] * 300, ["a"] * 300,
    [[5]] * 40, {"5": 1e300}, {"a": 1},
)  # fmt: skip
