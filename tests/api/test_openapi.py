"""The OpenAPI document: every route is in it, and what it says is what the code does."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
from heddle.api.app import routed
from heddle.api.config import ServerConfig
from heddle.api.errors import STATUS
from heddle.api.http.openapi_document import document
from heddle.api.protocol.completions import CompletionRequest
from heddle.api.state import ServerState
from heddle.core.config import EngineConfig
from litestar import Litestar
from litestar.handlers import HTTPRouteHandler
from litestar.routes import HTTPRoute
from openapi_spec_validator import OpenAPIV31SpecValidator


@pytest.fixture(scope="module")
def app() -> Litestar:
    return routed(ServerState(ServerConfig(engine=EngineConfig(model="none"))))


@pytest.fixture(scope="module")
def described(app: Litestar) -> dict[str, Any]:
    return document(app, needs_key=True)


def handlers(app: Litestar) -> Iterator[tuple[str, str, HTTPRouteHandler]]:
    for route in app.routes:
        assert isinstance(route, HTTPRoute)
        for method, (handler, _) in route.route_handler_map.items():
            if method != "OPTIONS":
                yield route.path_format, method.lower(), handler


@pytest.mark.parametrize("needs_key", [True, False])
def test_the_document_is_valid(app, needs_key):
    OpenAPIV31SpecValidator(document(app, needs_key=needs_key)).validate()


def test_every_route_is_in_the_document_and_nothing_else(app, described):
    real = {(path, method) for path, method, _ in handlers(app)}
    told = {(path, method) for path, item in described["paths"].items() for method in item}
    assert told == real


def test_options_name_the_methods_of_the_document(server):
    paths = server.client.get("/openapi.json").json()["paths"]
    for path, item in paths.items():
        answer = server.client.options(path.format(tenant="public", name="x", key_id="x"))
        assert answer.status_code == 204
        head = {"HEAD"} if "get" in item else set()
        expected = {"OPTIONS", *(method.upper() for method in item)} | head
        assert set(answer.headers["allow"].split(", ")) == expected


def test_every_call_says_what_it_does_and_its_own_status(app, described):
    for path, method, handler in handlers(app):
        operation = described["paths"][path][method]
        assert operation["summary"], f"{method} {path} has no docstring"
        assert str(handler.status_code) in operation["responses"], f"{method} {path}"


def test_the_body_a_handler_reads_is_the_one_the_document_names(app, described):
    for path, method, handler in handlers(app):
        tree = ast.parse(textwrap.dedent(inspect.getsource(handler.fn)))
        calls = [call for call in ast.walk(tree) if isinstance(call, ast.Call)]
        read = {
            ast.unparse(call.args[1])
            for call in calls
            if ast.unparse(call.func) in ("read_json", "read_optional_json")
        }
        body = described["paths"][path][method].get("requestBody", {"content": {}})["content"]
        named = {body["application/json"]["schema"]["$ref"].rpartition("/")[2]} if body else set()
        assert read == named, f"{method} {path}"


def test_every_refusal_has_the_error_shape_and_every_code_is_somewhere(described):
    seen = set()
    for item in described["paths"].values():
        for operation in item.values():
            for status, response in operation["responses"].items():
                if int(status) < 400:
                    continue
                schema = response["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorEnvelope"}
                codes = re.findall(r"`(\w+)`", response["description"])
                assert all(STATUS[code] == int(status) for code in codes)
                seen |= set(codes)
    assert seen == set(STATUS)


def test_fields_that_are_not_served_say_so(described):
    fields = described["components"]["schemas"]["CompletionRequest"]["properties"]
    assert set(fields) == set(CompletionRequest.__struct_encode_fields__)
    assert fields["use_beam_search"]["enum"] == [None, False]
    assert "refused" in fields["use_beam_search"]["description"]


def test_docstrings_beside_fields_are_their_descriptions(described):
    fields = described["components"]["schemas"]["Adapter"]["properties"]
    assert fields["in_use"]["description"] == "Requests."


def test_the_server_hands_it_out(server, app):
    answer = server.client.get("/openapi.json")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == document(app, needs_key=False)
    assert "security" not in answer.json()


def test_it_is_asked_for_with_a_key_where_there_are_keys(base, serve, tmp_path):
    with serve(tmp_path, base, admin_key="secret") as server:
        assert server.client.get("/openapi.json").status_code == 401
        answer = server.client.get("/openapi.json", headers={"Authorization": "Bearer secret"}).json()
        assert answer["security"] == [{"key": []}]
        opened = {p for p, item in answer["paths"].items() if item.get("get", {}).get("security") == []}
        assert opened == {"/health", "/ready"}
