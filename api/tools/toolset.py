"""The tools of one request: checked, as the chat template takes them, and as the model must or may call them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.text.grammar import Grammar, GrammarError, lark_json, lark_text
from ...core.text.tokenizer import Tokenizer
from ..errors import invalid
from ..protocol.chat import ChatRequest
from ..protocol.tools import NamedToolChoice, Tool, ToolChoice
from .formats import ToolFormat, format_in
from .parser import ToolParser

MAX_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
NO_ARGUMENTS: Mapping[str, Any] = {**NO_PARAMETERS, "additionalProperties": False}


@dataclass(frozen=True)
class Toolset:
    """What a request's `tools` and `tool_choice` come to."""

    tools: Sequence[Tool]
    choice: ToolChoice
    many: bool
    """More than one call may be made."""
    format: ToolFormat | None
    """None: the model's chat template takes tools, and asks for calls in a way that is not known here."""
    tokenizer: Tokenizer

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """For the chat template."""
        return definitions(self.tools)

    @property
    def kept(self) -> frozenset[int]:
        """Special tokens that the parser has to see."""
        markers = () if self.format is None else self.format.markers
        ids = (self.tokenizer.special_id(marker) for marker in markers)
        return frozenset(token for token in ids if token is not None)

    @property
    def forced(self) -> bool:
        """The answer must be a call."""
        return self.choice != "auto"

    @property
    def _strict(self) -> bool:
        return any(tool.function.strict for tool in self.tools)

    def schemas(self) -> list[tuple[int, Mapping[str, Any]]]:
        """Index and schema of every function that has one."""
        parameters = [tool.function.parameters for tool in self.tools]
        return [(index, schema) for index, schema in enumerate(parameters) if schema is not None]

    def parser(self, sure: bool) -> ToolParser | None:
        """For one answer. `sure`: a grammar that was made here guides it."""
        if self.format is None:
            return None
        names = [tool.function.name for tool in self.tools]
        return ToolParser(self.format, names, many=self.many, sure=sure)

    def grammar(self, answer: Mapping[str, Any] | None) -> str | None:
        """What guides the model: to the calls it must make, to arguments as strict functions want them, or to
        an `answer` that obeys a schema where it makes no call. None: nothing does.

        Raises `invalid_request`.
        """
        if not (self.forced or self._strict or answer is not None):
            return None
        if self.format is None:
            field = "tool_choice" if self.forced else "tools" if self._strict else "response_format"
            raise invalid(
                f"{field}: how this model writes calls is not known, so they cannot be guided", field
            )
        functions = {tool.function.name: self._schema(tool) for tool in self._callable()}
        if self.forced:
            return self.format.must_call(functions, self.many, self._spell)
        if answer is not None:
            return self.format.answer_or_call(lark_json(answer), functions, self.many, self._spell)
        return self.format.may_call(functions, self.many, self._spell)

    def _callable(self) -> list[Tool]:
        if isinstance(self.choice, NamedToolChoice):
            return [tool for tool in self.tools if tool.function.name == self.choice.function.name]
        return list(self.tools)

    def _schema(self, tool: Tool) -> Mapping[str, Any]:
        """What a guided call's arguments obey."""
        if not (self.forced or tool.function.strict):
            return {"type": "object"}
        parameters = tool.function.parameters or NO_PARAMETERS
        schema = {"type": "object", **(NO_ARGUMENTS if _names_none(parameters) else parameters)}
        try:
            Grammar.json(schema)
        except GrammarError as error:
            raise invalid(f"tools: parameters of {tool.function.name}: {error}", "tools") from error
        return schema

    def _spell(self, marker: str) -> str:
        token = self.tokenizer.special_id(marker)
        return lark_text(marker) if token is None else f"<[{token}]>"


def toolset_of(body: ChatRequest, tokenizer: Tokenizer) -> Toolset | None:
    """None where the request has no tools, or wants none used: then the model does not hear of them.

    Raises `invalid_request` that names the field, and `ChatTemplateError` where the template takes no tools.
    """
    tools, choice = body.tools or [], body.tool_choice or "auto"
    if not tools:
        if choice in ("none", "auto"):
            return None
        raise invalid("tool_choice is only allowed together with tools", "tool_choice")
    names = check_tools(tools)
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        raise invalid(
            f"tool_choice: there is no function {choice.function.name[:64]!r} in tools", "tool_choice"
        )
    if choice == "none":
        return None
    tokenizer.refuse_unheard_tools()
    source = "" if tokenizer.chat_template is None else tokenizer.chat_template.tool_source
    many = body.parallel_tool_calls is not False and not isinstance(choice, NamedToolChoice)
    return Toolset(tools, choice, many, format_in(source), tokenizer)


def check_tools(tools: Sequence[Tool]) -> set[str]:
    """The functions' names. Raises `invalid_request` that names the place."""
    if len(tools) > MAX_TOOLS:
        raise invalid(f"tools: at most {MAX_TOOLS} functions, got {len(tools)}", "tools")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        _check(tool, f"tools[{index}].function")
        if tool.function.name in names:
            raise invalid(f"tools: there are two functions named {tool.function.name!r}", "tools")
        names.add(tool.function.name)
    return names


def definitions(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """As the chat template takes them."""
    return [_definition(tool) for tool in tools]


def _check(tool: Tool, where: str) -> None:
    function = tool.function
    if not NAME.fullmatch(function.name):
        raise invalid(
            f"{where}.name must be 1 to 64 letters, digits, _ and -, got {function.name[:80]!r}", "tools"
        )
    if function.parameters is not None and function.parameters.get("type", "object") != "object":
        raise invalid(f"{where}.parameters must be a schema of type object", "tools")


def _names_none(parameters: Mapping[str, Any]) -> bool:
    """Whether a function takes no arguments, as callers mean it: to JSON schema anything could be added to none."""
    return not parameters.get("properties") and parameters.keys() <= {
        "type",
        "properties",
        "required",
        "title",
    }


def _definition(tool: Tool) -> dict[str, Any]:
    """As templates know tools. `strict` is between the caller and the server."""
    function = tool.function
    definition: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        definition["description"] = function.description
    definition["parameters"] = function.parameters or dict(NO_PARAMETERS)
    return {"type": "function", "function": definition}
