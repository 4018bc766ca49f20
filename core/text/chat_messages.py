"""A request's messages, checked and made into what chat templates expect. Control code: no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .chat_template import ChatTemplateError

MAX_NAME = 64
"""Characters, as OpenAI has it."""
ROLE_OF = {
    "tool_calls": "assistant",
    "function_call": "assistant",
    "refusal": "assistant",
    "audio": "assistant",
    "tool_call_id": "tool",
}
"""Fields that messages of one role alone have."""


def normalise_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages of a request as templates expect them; `ChatTemplateError` names what is wrong with them.

    - `content` becomes one text: text parts are joined with a line break (as vLLM does), "" stays "". An assistant's
      `refusal`, and its parts of that type, are text too.
    - A null or missing `content` is taken from an assistant alone, beside `refusal`, `tool_calls` or the older
      `function_call`, and becomes "".
    - Parts of any other type (images, audio, files) are refused by name.
    - The arguments of tool calls, JSON text in the OpenAI form, become values.
    - A `tool` message answers a call of an assistant before it.
    - A field of another role's messages is refused. Fields that OpenAI does not know are the template's business.

    Roles are the template's business too: it accepts or refuses them in its own words.
    """
    if not messages:
        raise ChatTemplateError("messages must not be empty")
    result, called = [], set[str]()
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        normal = _normalised(message, where)
        if normal["role"] == "tool":
            _check_answers(normal, called, where)
        called.update(call["id"] for call in normal.get("tool_calls", ()) if "id" in call)
        result.append(normal)
    return result


def _normalised(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f"{where} must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ChatTemplateError(f"{where}.role must be a non-empty string")
    # A null is as good as a missing key in a request; in a template it would be the word "None".
    result = {key: value for key, value in message.items() if value is not None}
    for field, owner in ROLE_OF.items():
        if role != owner and result.get(field):
            raise _wrong(f"{where}.{field}", f"is of {owner} messages alone (role {role!r})")
    if "name" in result:
        _check_name(result["name"], f"{where}.name")
    elif role == "function":
        raise _wrong(f"{where}.name", "is missing: a function's message says whose it is")
    if "tool_calls" in result:
        result["tool_calls"] = _tool_calls(result["tool_calls"], f"{where}.tool_calls")
    result["content"] = _content(result, role, where)
    return result


def _content(message: dict[str, Any], role: str, where: str) -> str:
    """One text; a `refusal` beside it, which is taken out of the message, stands behind it."""
    content, texts = message.get("content"), []
    refusal = message.pop("refusal", None)
    if isinstance(content, str):
        texts = [content]
    elif isinstance(content, list):
        texts = [_text(part, role, f"{where}.content[{i}]") for i, part in enumerate(content)]
    elif content is not None:
        raise ChatTemplateError(f"{where}.content must be a string or a list of text parts")
    elif not refusal and not (
        role == "assistant" and (message.get("tool_calls") or message.get("function_call"))
    ):
        raise ChatTemplateError(f"{where}.content must be a string or a list of text parts (role {role!r})")
    if refusal:
        if not isinstance(refusal, str):
            raise _wrong(f"{where}.refusal", "must be a string")
        texts = [*filter(None, texts), refusal]
    return "\n".join(texts)


def _text(part: Any, role: str, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "refusal" and role != "assistant":
        raise ChatTemplateError(f"{where}: parts of type 'refusal' are an assistant's alone (role {role!r})")
    if kind in ("text", "refusal"):
        text = part.get(kind)
        if not isinstance(text, str):
            raise ChatTemplateError(f"{where}.{kind} must be a string")
        return text
    if isinstance(kind, str):
        raise ChatTemplateError(f"{where}: parts of type {kind!r} are not served, only text")
    raise ChatTemplateError(f"{where} must be an object with a type")


def _check_name(name: Any, where: str) -> None:
    if not isinstance(name, str):
        raise _wrong(where, "must be a string")
    if not 1 <= len(name) <= MAX_NAME:
        raise _wrong(where, f"must have 1 to {MAX_NAME} characters, and has {len(name)}")


def _check_answers(message: Mapping[str, Any], called: set[str], where: str) -> None:
    """`called`: the ids of the calls before this message."""
    place, call_id = f"{where}.tool_call_id", message.get("tool_call_id")
    if call_id is None:
        raise _wrong(place, "is missing: a tool's message says which call it answers")
    if not isinstance(call_id, str):
        raise _wrong(place, "must be a string")
    if call_id not in called:
        raise _wrong(place, f"{call_id[:80]!r} is no call in the tool_calls of an assistant's message before")


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise ChatTemplateError(f"{where} must be a list of objects")
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    result = {key: value for key, value in call.items() if value is not None}
    if not isinstance(result.get("id", ""), str):
        raise ChatTemplateError(f"{where}.id must be a string")
    if (kind := result.get("type", "function")) != "function":
        raise ChatTemplateError(f"{where}: calls of type {str(kind)[:80]!r} are not served, only functions")
    function = result.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ChatTemplateError(f"{where}.function must be an object with name and arguments")
    result["function"] = {**function, "arguments": _arguments(function.get("arguments"), f"{where}.function")}
    return result


def _arguments(arguments: Any, where: str) -> dict[str, Any]:
    """OpenAI has them as JSON text; missing and empty ones are none."""
    try:
        value = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
        if not isinstance(value, dict):
            raise ValueError("it is another value")
    except (ValueError, RecursionError) as error:
        raise ChatTemplateError(f"{where}.arguments must hold a JSON object: {error}") from error
    return value


def _wrong(place: str, what: str) -> ChatTemplateError:
    """A fault whose `param` is the place itself."""
    return ChatTemplateError(f"{place} {what}", place)
