"""The OpenAPI document of the application, made from its routes, its handlers' declarations and their structs."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from litestar import Litestar
from litestar.handlers import HTTPRouteHandler
from litestar.routes import HTTPRoute

from ... import __version__
from ..errors import RETRY_AFTER, STATUS, ErrorEnvelope
from ..protocol.unserved import Refusing
from .front import OPEN
from .openapi import KEY, Answer, AnyObject, Operation, Text

REF = "#/components/schemas/{name}"
EVERY_CALL = ("invalid_api_key", "permission_denied", "overloaded", "shutting_down", "internal_error")
WITH_INPUT = ("invalid_request",)
WITH_BODY = ("body_too_large",)

Json = dict[str, Any]


def document(app: Litestar, *, needs_key: bool) -> Json:
    """The whole document. `needs_key`: whether this server asks for one."""
    found = list(_operations(app))
    schemas = _schemas(operation for _, _, _, operation in found)
    paths: dict[str, Json] = {}
    for route, method, handler, operation in found:
        item = paths.setdefault(route.path_format, {})
        item[method.lower()] = _operation(route, method, handler, operation, needs_key)
    result: Json = {
        "openapi": "3.1.0",
        "info": {
            "title": "Heddle",
            "version": __version__,
            "description": "Many LoRA adapters over one quantised LLaMA base, behind OpenAI's interface.",
        },
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if needs_key:
        result["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        result["security"] = [{"key": []}]
    return result


def _operations(app: Litestar) -> Iterator[tuple[HTTPRoute, str, HTTPRouteHandler, Operation]]:
    """Every declared handler of every route; the framework's own answers to OPTIONS are not among them."""
    for route in app.routes:
        if isinstance(route, HTTPRoute):
            for handler in route.route_handlers:
                for method in sorted(handler.http_methods):
                    if method != "OPTIONS" and KEY in handler.opt:
                        yield route, method, handler, handler.opt[KEY]


def _operation(
    route: HTTPRoute, method: str, handler: HTTPRouteHandler, operation: Operation, needs_key: bool
) -> Json:
    room = handler.fn.__module__.rpartition(".")[2]
    name = [room, handler.fn.__name__]
    if len(handler.http_methods) > 1:
        name.append(method.lower())
    if _inside_tenant(route, handler):
        name.append("in_tenant")
    summary, _, description = (inspect.getdoc(handler.fn) or "").partition("\n")
    result: Json = {
        "operationId": "_".join(name),
        "summary": summary.strip(),
        "tags": [room],
        "parameters": [*_path_parameters(route), *_query_parameters(operation)],
        "responses": _responses(route, handler, operation, needs_key),
    }
    if description.strip():
        result["description"] = " ".join(description.split())
    if operation.body is not None:
        result["requestBody"] = _body(operation)
    if needs_key and route.path in OPEN:
        result["security"] = []
    return result


def _inside_tenant(route: HTTPRoute, handler: HTTPRouteHandler) -> bool:
    """Whether this is one of the root's calls, made inside a tenant."""
    return route.path.startswith("/tenants/{") and not handler.fn.__module__.endswith(".tenants")


def _path_parameters(route: HTTPRoute) -> list[Json]:
    schema = {"type": "string", "minLength": 1}
    return [
        {"name": name, "in": "path", "required": True, "schema": schema} for name in route.path_parameters
    ]


def _query_parameters(operation: Operation) -> list[Json]:
    return [
        {"name": name, "in": "query", "required": False, "schema": msgspec.json.schema(kind)}
        for name, kind in operation.query.items()
    ]


# ------------------------------------------------------------------ bodies and answers


def _body(operation: Operation) -> Json:
    assert operation.body is not None
    content: Json = {"application/json": {"schema": _reference(operation.body)}}
    if operation.upload is not None:
        content["multipart/form-data"] = {"schema": _parts(operation.upload)}
    return {"required": not operation.body_optional, "content": content}


def _parts(upload: type[msgspec.Struct]) -> Json:
    """A multipart body. A part that is there is never null."""
    schema = msgspec.json.schema(upload)["$defs"][upload.__name__]
    properties = {name: _without_null(part) for name, part in schema["properties"].items()}
    return {**schema, "properties": properties}


def _without_null(schema: Json) -> Json:
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"]
    return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}


def _responses(route: HTTPRoute, handler: HTTPRouteHandler, operation: Operation, needs_key: bool) -> Json:
    result: Json = {}
    for status, answer in operation.answers.items():
        result[str(status)] = {"description": "Done", "headers": _headers(status), **_content(answer)}
    if operation.events is not None:
        stream = {
            "type": "string",
            "description": "Server-sent events; the last one is `[DONE]`, after an error there is none.",
            "contentMediaType": "application/json",
            "contentSchema": _reference(operation.events),
        }
        result["200"]["content"]["text/event-stream"] = {"schema": stream}
    by_status: dict[int, list[str]] = {}
    for code in _codes(route, handler, operation, needs_key):
        by_status.setdefault(STATUS[code], []).append(code)
    for status, codes in sorted(by_status.items()):
        result[str(status)] = {
            "description": "Refused, with the code " + " or ".join(f"`{code}`" for code in codes),
            "headers": _headers(status),
            "content": {"application/json": {"schema": _reference(ErrorEnvelope)}},
        }
    return result


def _codes(
    route: HTTPRoute, handler: HTTPRouteHandler, operation: Operation, needs_key: bool
) -> Iterable[str]:
    codes: list[str] = [*operation.errors]
    if _inside_tenant(route, handler):
        codes.append("tenant_not_found")
    if operation.body is not None or operation.query:
        codes += WITH_INPUT
    if operation.body is not None:
        codes += WITH_BODY
    if route.path in OPEN:
        codes += ("internal_error",)
    else:
        codes += EVERY_CALL if needs_key else EVERY_CALL[1:]
    return dict.fromkeys(codes)


def _headers(status: int) -> Json:
    text = {"schema": {"type": "string"}}
    result: Json = {"X-Request-Id": {**text, "description": "The call's id; a caller may send its own."}}
    if any(STATUS[code] == status for code in RETRY_AFTER):
        seconds = {"type": "string", "pattern": "^[0-9]+$"}
        result["Retry-After"] = {"schema": seconds, "description": "Seconds, where trying again makes sense."}
    if status == STATUS["invalid_api_key"]:
        result["WWW-Authenticate"] = text
    return result


def _content(answer: Answer) -> Json:
    if answer is None:
        return {}
    if isinstance(answer, Text):
        return {"content": {answer.media_type: {"schema": {"type": "string"}}}}
    schema = {"type": "object"} if isinstance(answer, AnyObject) else _reference(answer)
    return {"content": {"application/json": {"schema": schema}}}


# ------------------------------------------------------------------ schemas


def _reference(struct: type[msgspec.Struct]) -> Json:
    return {"$ref": REF.format(name=struct.__name__)}


def _schemas(operations: Iterable[Operation]) -> dict[str, Json]:
    """By name: every struct that goes in or out, with the docstrings beside its fields as their descriptions."""
    wanted: dict[type[msgspec.Struct], None] = {ErrorEnvelope: None}
    for operation in operations:
        for kind in (operation.body, operation.events, *operation.answers.values()):
            if isinstance(kind, type):
                wanted[kind] = None
    _, schemas = msgspec.json.schema_components(wanted, ref_template=REF)
    structs = {struct.__name__: struct for struct in _all_structs(wanted)}
    for name, schema in schemas.items():
        if (struct := structs.get(name)) is not None:
            _describe(schema, struct)
    return schemas


def _all_structs(kinds: Iterable[type[msgspec.Struct]]) -> set[type[msgspec.Struct]]:
    """`kinds` and every struct that their fields lead to."""
    found: set[type[msgspec.Struct]] = set()
    left: list[Any] = list(msgspec.inspect.multi_type_info(kinds))
    while left:
        kind = left.pop()
        if isinstance(kind, msgspec.inspect.StructType):
            if kind.cls in found:
                continue
            found.add(kind.cls)
            left += [field.type for field in kind.fields]
        for part in ("item_type", "value_type", "types", "item_types", "type"):
            inner = getattr(kind, part, None)
            left += inner if isinstance(inner, tuple) else [] if inner is None else [inner]
    return found


def _describe(schema: Json, struct: type[msgspec.Struct]) -> None:
    properties = schema.get("properties", {})
    for name, text in _field_docs(struct).items():
        if name in properties:
            properties[name] = {**properties[name], "description": text}
    if issubclass(struct, Refusing):
        for name, harmless in struct.UNSERVED.items():
            words = "Known and not served: any other value is refused by name."
            properties[name] = {"enum": [None, *harmless], "description": words}


def _field_docs(struct: type[msgspec.Struct]) -> dict[str, str]:
    """The docstring below each field, inherited fields included."""
    docs: dict[str, str] = {}
    for kind in reversed(struct.__mro__):
        if not issubclass(kind, msgspec.Struct) or kind is msgspec.Struct:
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(tree, ast.ClassDef)
        for field, below in zip(tree.body, tree.body[1:]):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = " ".join(text.split())
    return docs
