"""The fields that say what form an answer must have: OpenAI's `response_format` and vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from ..errors import invalid

Kind = Literal["json", "json_object", "regex", "choice"]


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """A schema with a name. It is enforced whether `strict` or not; without `schema` any JSON object will do."""

    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """Unknown fields are refused: servers have a `schema` here too, and an answer that does not obey it is not what
    was asked for."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's newer form of its `guided_...` fields: one of the first five."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    json_object: bool | None = None
    grammar: Any = None
    structural_tag: Any = None
    disable_fallback: bool | None = None
    """There is only one way here, so nothing to fall back to."""
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


@dataclass(frozen=True)
class Form:
    """What an answer must be, and the request's field that says so."""

    field: str
    kind: Kind
    value: Any = None


def of_response_format(field: ResponseFormat | None) -> list[Form]:
    """None or one. Raises `invalid_request`."""
    if field is None:
        return []
    if field.type != "json_schema" and field.json_schema is not None:
        raise invalid(
            f"response_format: json_schema goes with type json_schema, not {field.type}", "response_format"
        )
    if field.type == "text":
        return []
    if field.type == "json_object":
        return [Form("response_format", "json_object")]
    if field.json_schema is None:
        raise invalid("response_format: json_schema is missing", "response_format")
    if field.json_schema.schema is None:
        return [Form("response_format", "json_object")]
    return [Form("response_format", "json", field.json_schema.schema)]


def of_structured_outputs(field: StructuredOutputs | None) -> list[Form]:
    """All that are given. Raises `invalid_request` for settings that are not served."""
    if field is None:
        return []
    for name in ("grammar", "structural_tag", "whitespace_pattern"):
        if getattr(field, name) is not None:
            raise invalid(f"structured_outputs.{name} is not served here", "structured_outputs")
    for name in ("disable_any_whitespace", "disable_additional_properties"):
        if getattr(field, name):
            raise invalid(f"structured_outputs.{name} is not served here", "structured_outputs")
    kinds: tuple[Kind, ...] = ("json", "regex", "choice")
    forms = [
        Form("structured_outputs", kind, getattr(field, kind))
        for kind in kinds
        if getattr(field, kind) is not None
    ]
    if field.json_object:
        forms.append(Form("structured_outputs", "json_object"))
    if len(forms) != 1:
        given = ", ".join(form.kind for form in forms) or "none"
        raise invalid(
            f"structured_outputs takes one of json, regex, choice and json_object; given: {given}",
            "structured_outputs",
        )
    return forms


def the_one(forms: list[Form]) -> Form | None:
    """Raises `invalid_request` that names them where there are more."""
    if len(forms) > 1:
        names = " and ".join(form.field for form in forms)
        raise invalid(f"{names} exclude each other; give one of them", forms[1].field)
    return forms[0] if forms else None
