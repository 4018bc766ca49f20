"""Heads of requests over the wire: `HEAD`, which host and key a call names, and what its trailer may say."""

from __future__ import annotations

import json
import re
import socket
from typing import Any

import pytest
from heddle.api import logs
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from .conftest import RunningServer, running

KEY = b"authorization: Bearer s3cret\r\n"


def talk(server: RunningServer, sent: bytes) -> tuple[int, dict[str, str], bytes]:
    """The last answer to `sent`, with whose end the server or this client ends the connection."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(sent)
        data = connection.recv(1 << 16)
        while b"\r\n\r\n" not in data:
            data += connection.recv(1 << 16)
        head, _, body = data.partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        if headers.get("connection") == "close":
            while more := connection.recv(1 << 16):
                body += more
    return int(status.split()[1]), headers, body


def code_of(body: bytes) -> Any:
    return json.loads(body)["error"]["code"]


@pytest.fixture(scope="module")
def keyed(base, sources, tmp_path_factory):
    folder = tmp_path_factory.mktemp("keyed")
    with running(folder, base, adapter_roots=(sources,), admin_key="s3cret") as server:
        yield server


# ------------------------------------------------------------------ HEAD


def test_head_is_answered_as_get_without_the_body(server):
    document = server.client.get("/openapi.json").json()
    varying = {"date", "x-request-id"}
    for path, item in document["paths"].items():
        path = path.format(tenant="public", name="a", key_id="x")
        head = server.client.head(path)
        if "get" not in item:
            assert head.status_code == 405, path
            assert "HEAD" not in head.headers["allow"]
            continue
        get = server.client.get(path)
        assert (head.status_code, head.content) == (get.status_code, b""), path
        told, expected = dict(head.headers), dict(get.headers)
        assert told.keys() == expected.keys(), path
        if path.endswith(("metrics", "memory")):
            varying = varying | {"content-length"}  # they tell of this moment
        assert {k: v for k, v in told.items() if k not in varying} == {
            k: v for k, v in expected.items() if k not in varying
        }, path
        assert int(told["content-length"]) > 0
        assert "HEAD" in server.client.options(path).headers["allow"].split(", ")


def test_head_says_what_is_wrong_by_its_status_alone(keyed):
    assert keyed.client.head("/health").status_code == keyed.client.head("/ready").status_code == 200
    assert keyed.client.head("/v1/models").status_code == 401
    key = {"authorization": "Bearer s3cret"}
    assert keyed.client.head("/v1/models", headers=key).status_code == 200
    missing = keyed.client.head("/adapters/nobodys", headers=key)
    assert (missing.status_code, missing.content) == (404, b"")
    assert keyed.client.head("/nowhere", headers=key).status_code == 404
    refused = keyed.client.request("PUT", "/v1/models", headers=key)
    assert refused.status_code == 405
    assert {"GET", "HEAD"} <= set(refused.headers["allow"].split(", "))


def test_behind_a_head_the_next_answer_follows_at_once(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"HEAD /health HTTP/1.1\r\nhost: a\r\n\r\nGET /ready HTTP/1.1\r\nhost: a\r\n\r\n")
        data = b""
        while b"ready" not in data:
            data += connection.recv(1 << 16)
    first, second, body = data.split(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 200 OK\r\n")
    assert second.startswith(b"HTTP/1.1 200 OK\r\n")
    assert json.loads(body) == {"status": "ready"}


# ------------------------------------------------------------------ one host, one key


@pytest.mark.parametrize("path", [b"/health", b"/v1/models", b"/nowhere"])
@pytest.mark.parametrize(
    "hosts",
    [
        b"",
        b"host: a\r\nhost: b\r\n",
        b"host: a\r\nhost: a\r\n",
        b"host: a\r\nHost:\r\n",
        b"host: a b\r\n",
        b"host: a/b\r\n",
        b"host: someone@a\r\n",
        b"host: a\xff\r\n",
        b"host: a:b\r\n",
        b"host: a:99999\r\n",
        b"host: [::1\r\n",
        b"host: [x]\r\n",
    ],
)
def test_a_request_names_one_host(keyed, path, hosts):
    status, headers, body = talk(keyed, b"GET " + path + b" HTTP/1.1\r\n" + KEY + hosts + b"\r\n")
    assert (status, code_of(body)) == (400, "invalid_request")
    assert "Host header" in json.loads(body)["error"]["message"]
    assert headers["connection"] == "close"


@pytest.mark.parametrize(
    "head",
    [
        b"GET /v1/models HTTP/1.0\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: a\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost:\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: a.b-c:8000\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: [::1]:8000 \r\n",
        b"GET http://a:80/v1/models HTTP/1.1\r\nhost: a\r\n",
        b"GET http://[::1]:80/v1/models HTTP/1.1\r\nhost: a\r\n",
    ],
)
def test_hosts_as_they_may_be(keyed, head):
    assert talk(keyed, head + KEY + b"\r\n")[0] == 200


@pytest.mark.parametrize("target", [b"http://127.0.0.1", b"http://127.0.0.1?x=1"])
def test_a_target_that_is_a_url_without_a_path_is_the_root(server, target):
    status, _, body = talk(server, b"GET " + target + b" HTTP/1.1\r\nhost: a\r\n\r\n")
    assert (status, code_of(body)) == (404, "invalid_request")


@pytest.mark.parametrize(("target", "status"), [(b"http://localhost:1", 200), (b"http://evil.example", 403)])
@pytest.mark.parametrize("host", [b"localhost", b"evil.example"])
def test_the_host_of_a_target_that_is_a_url_is_the_one_that_counts(server, target, host, status):
    answer = talk(server, b"GET " + target + b"/v1/models HTTP/1.1\r\nhost: " + host + b"\r\n\r\n")
    assert answer[0] == status
    assert talk(server, b"GET " + target + b"/v1/models HTTP/1.0\r\n\r\n")[0] == status, (
        "also where it is the only one"
    )


@pytest.mark.parametrize(
    "keys", [KEY + KEY, KEY + b"authorization: Bearer x\r\n", b"Authorization: Basic x\r\n" + KEY]
)
def test_two_keys_are_none(keyed, server, keys):
    for one in (keyed, server):
        status, headers, body = talk(one, b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n" + keys + b"\r\n")
        assert (status, code_of(body)) == (401, "invalid_api_key")
        assert headers["www-authenticate"] == "Bearer"
    assert talk(keyed, b"GET /health HTTP/1.1\r\nhost: a\r\n" + keys + b"\r\n")[0] == 200, "it asks for none"


def test_two_origins_are_refused(server):
    origins = b"origin: https://evil.example\r\norigin: http://localhost\r\n"
    status, _, body = talk(server, b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n" + origins + b"\r\n")
    assert (status, code_of(body)) == (400, "invalid_request")


def test_blanks_around_a_value_are_no_part_of_it(keyed):
    lines = b"authorization:  Bearer s3cret \t\r\nx-request-id: \tabc \r\n"
    status, headers, _ = talk(keyed, b"GET /v1/models HTTP/1.1\r\nhost: a\r\n" + lines + b"\r\n")
    assert (status, headers["x-request-id"]) == (200, "abc")


def test_a_trailer_is_no_part_of_the_head(keyed):
    """A proxy that looks at keys and hosts looks at heads."""
    body = b'{"prompt": "hi"}'
    for trailer in (KEY, b"host: b\r\n", b"x-request-id: abc\r\n"):
        for head, expected in ((b"", 401), (KEY, 200)):
            status, headers, _ = talk(
                keyed,
                b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n" + head + b"transfer-encoding: chunked\r\n\r\n"
                b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, trailer),
            )
            assert status == expected
            assert headers["x-request-id"] != "abc"


# ------------------------------------------------------------------ what is no request


LENGTHS = [
    b"content-length: 2\r\ncontent-length: 3\r\n",
    b"content-length: 2\r\ncontent-length: 2\r\n",
    b"content-length: 2, 2\r\n",
    b"content-length: 2\r\ntransfer-encoding: chunked\r\n",
    b"transfer-encoding: chunked\r\ncontent-length: 2\r\n",
    b"transfer-encoding: chunked, identity\r\n",
    b"transfer-encoding: identity\r\n",
    b"transfer-encoding: gzip, chunked\r\n",
    b"transfer-encoding: xchunked\r\n",
    b"transfer-encoding : chunked\r\n",
    b"content-length: +2\r\n",
    b"content-length: 0x2\r\n",
    b"content-length: 99999999999999999999\r\n",
]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_body_has_one_length(keyed, lengths):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n" + KEY + lengths + b"\r\n"
    status, headers, body = talk(keyed, head + b"{}GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
    assert (status, code_of(body)) == (400, "invalid_request"), "and nothing of what is behind it is answered"
    assert headers["connection"] == "close"


def with_id(_logger: Any, _method: str, event: Any) -> Any:
    """As the server's own logging does it."""
    return {**event, **logs._of_call()}


@pytest.mark.parametrize(
    ("sent", "method", "path"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "_OTHER", ""),
        (b"GARBAGE\r\n\r\n", "_OTHER", ""),
        (b"PUT /odd?a=b HTTP/1.1\r\nno colon\r\n\r\n", "PUT", "/odd"),
        (b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n" + KEY + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
         "POST", "/v1/completions"),
    ],
)  # fmt: skip
def test_what_is_no_http_is_answered_logged_and_counted_like_a_call(keyed, sent, method, path):
    def count() -> float:
        families = text_string_to_metric_families(keyed.client.get("/metrics", headers=key).text)
        wanted = {"method": method, "status": "400"}
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == "heddle_http_requests_total" and sample.labels == wanted
        )

    key = {"authorization": "Bearer s3cret"}
    before, healthy = count(), keyed.client.get("/health").headers
    with capture_logs([with_id]) as lines:
        status, headers, body = talk(keyed, sent)
        keyed.wait_until(lambda: any(line["request_id"] == headers["x-request-id"] for line in lines))
    assert (status, code_of(body)) == (400, "invalid_request")
    assert headers.keys() == {*healthy, "connection"}
    assert re.fullmatch("req-[0-9a-f]{32}", headers["x-request-id"])
    assert count() == before + 1
    (line,) = [line for line in lines if line["request_id"] == headers["x-request-id"]]
    told = {name: line[name] for name in ("event", "method", "path", "status", "code")}
    assert told == {
        "event": "call", "method": method, "path": path, "status": 400, "code": "invalid_request"
    }  # fmt: skip
