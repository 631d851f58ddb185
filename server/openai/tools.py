"""Tools of chat completions: their declaration in requests, and the grammar of their calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import FailFast, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from ...runtime.sampling.grammar import INVALID_GRAMMAR
from ...runtime.sampling.json_schema import ignore
from ..core.errors import InvalidRequest
from ..core.schemas import WireModel, disagreement
from ..parsing.choice import choose_format
from ..parsing.events import Parser
from ..parsing.tool_calls import CallRules, Tool, ToolCallFormat
from ..serving.state import Serving
from ..serving.structured import OpenAIStructuredFields, grammar_of, json_schema_of
from ..serving.structured import made_grammar as made

MAX_TOOLS = 128
FUNCTION_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"  # The pattern of names in OpenAI's API.
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class FunctionDefinition(WireModel):
    """`parameters` is a JSON schema. Without a schema the function has no arguments.

    If `strict`, a schema that grammars cannot follow is refused.
    """

    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: dict(_NO_ARGUMENTS))
    strict: bool = False


class ToolDefinition(WireModel):
    type: Literal["function"] = "function"
    function: FunctionDefinition


class FunctionName(WireModel):
    name: str


class NamedTool(WireModel):
    type: Literal["function"] = "function"
    function: FunctionName


def parse_tool_choice(value: Any) -> str | NamedTool:
    """Return a word or a tool by its name."""
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value
    if isinstance(value, dict):
        return NamedTool.model_validate(value)
    raise PydanticCustomError(
        "tool_choice",
        'Input should be "none", "auto", "required", or '
        '{{"type": "function", "function": {{"name": NAME}}}}',
    )


ToolChoice = Annotated[
    Any,
    PlainValidator(parse_tool_choice),
    WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]}),
]


class ToolFields(WireModel):
    """OpenAI's parameters for tools."""

    tools: Annotated[list[ToolDefinition], FailFast(), Field(max_length=MAX_TOOLS)] = Field(
        default_factory=list
    )
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _choice_is_a_tool(self) -> Self:
        names = [tool.function.name for tool in self.tools]
        if len(names) > len(set(names)):
            raise disagreement("tools", "two tools have the same name")
        for index, tool in enumerate(self.tools):
            if tool.function.parameters.get("type", "object") != "object":
                raise disagreement(
                    f"tools[{index}].function.parameters",
                    "the arguments of a function are an object: the type of the schema must be "
                    '"object"',
                )
        if isinstance(self.tool_choice, NamedTool):
            if self.tool_choice.function.name not in names:
                raise disagreement("tool_choice", "tool_choice names none of the tools")
        elif self.tool_choice == "required" and not names:
            raise disagreement("tool_choice", "tool_choice needs tools")
        return self

    @property
    def prompt_tools(self) -> list[Tool]:
        """The tools that the prompt describes to the model."""
        functions = [tool.function for tool in self.tools] if self.tool_choice != "none" else []
        return [
            Tool(each.name, each.description, each.parameters, each.strict) for each in functions
        ]


def format_of(serving: Serving) -> ToolCallFormat:
    """Return the format in which the served model writes calls."""
    return choose_format(serving.config.tool_call_parser, serving.engine.tokenizer.templates)


class ToolUse(NamedTuple):
    """The tools that one chat may call.

    Attributes:
        required: Whether the answer must be a call.
        parallel: Whether the answer may hold several calls.
    """

    form: ToolCallFormat
    tools: Sequence[Tool]
    required: bool
    parallel: bool

    def parser(self) -> Parser:
        return self.form.parser(self.tools)


def tool_use(serving: Serving, fields: ToolFields) -> ToolUse | None:
    """Return the tool use of a request, or None if it has no tools to call."""
    tools, choice = fields.prompt_tools, fields.tool_choice
    if not tools:
        return None
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.name == choice.function.name]
    return ToolUse(
        format_of(serving),
        tools,
        required=choice != "auto",
        parallel=fields.parallel_tool_calls and not isinstance(choice, NamedTool),
    )


async def chat_grammar(
    serving: Serving, fields: OpenAIStructuredFields, use: ToolUse | None
) -> str | None:
    """Return the grammar of the answer, or None. Raise `InvalidRequest`.

    The grammar allows calls of the tools, the requested format of the text, or both.
    """
    if use is None:
        return await grammar_of(serving, fields)
    content: Mapping[str, Any] | None = None
    if not use.required and (await grammar_of(serving, fields)) is not None:
        content = json_schema_of(fields)
        if content is None:
            raise InvalidRequest(
                "tools can be combined only with a JSON schema for the text; send one of them.",
                param="tools",
                code="invalid_value",
            )
    special = serving.engine.tokenizer.special_ids(use.form.marks)
    rules = CallRules(use.required, use.parallel, content, special)
    try:
        return await _calls_grammar(serving, use, rules)
    except InvalidRequest:
        tools = [await _followed(serving, use.form, tool, special) for tool in use.tools]
        if all(old is new for old, new in zip(use.tools, tools, strict=True)):
            raise
        return await _calls_grammar(serving, use._replace(tools=tools), rules)


async def _followed(
    serving: Serving, form: ToolCallFormat, tool: Tool, special: Mapping[str, int]
) -> Tool:
    """Return the tool, with any object as arguments if no text satisfies its schema.

    Raise `InvalidRequest` with the function's name if the tool is strict.
    """
    rules = CallRules(True, False, None, special)
    try:
        await _calls_grammar(serving, ToolUse(form, [tool], True, False), rules)
    except InvalidRequest as error:
        reason = error.message.removeprefix("tools: ")
        if tool.strict or tool.whose in reason:
            named = reason if tool.whose in reason else f"{tool.whose}: {reason}"
            raise InvalidRequest(f"tools: {named}", param="tools", code=INVALID_GRAMMAR) from None
        ignore(tool.whose, "schemas without values", f"its schema is not followed: {reason}")
        return tool._replace(parameters={"type": "object", "additionalProperties": True})
    return tool


async def _calls_grammar(serving: Serving, use: ToolUse, rules: CallRules) -> str:
    try:
        lark = await serving.threads.run(use.form.grammar, use.tools, rules)
    except (RecursionError, TypeError):
        raise InvalidRequest(
            "tools: a schema is nested too deeply, or is not a schema; correct it.",
            param="tools",
            code=INVALID_GRAMMAR,
        ) from None
    except ValueError as error:
        raise InvalidRequest(f"tools: {error}.", param="tools", code=INVALID_GRAMMAR) from None
    return await made(serving, "tools", "calls", [lark, sorted(rules.special.values())])
