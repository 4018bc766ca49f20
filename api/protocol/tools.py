"""OpenAI's tools: functions that a model may ask its user to call, and the calls it answers with."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class FunctionDefinition(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema; without one the function takes nothing."""
    strict: bool | None = None
    """Calls obey the schema whenever the model makes one by itself, not only where it must."""


class Tool(msgspec.Struct):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(msgspec.Struct):
    name: str


class NamedToolChoice(msgspec.Struct):
    """This function must be called."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str
    """JSON text."""


class ToolCall(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionCallDelta(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """The first one of a call has its id and name; all have arguments to append."""

    index: int
    function: FunctionCallDelta
    id: str | None = None
    type: Literal["function"] | None = None
