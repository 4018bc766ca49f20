"""Multipart registrations: what is taken, what is refused, and that files go to disk and not to memory."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

HEAD = b'--zz\r\nContent-Disposition: form-data; name="files"; filename="adapter_config.json"\r\n\r\n'


def files(folder: Path, **replaced):
    """The two parts, with contents put in place of a file's by its name's first word."""
    names = {"adapter_config.json": "config", "adapter_model.safetensors": "model"}
    return [("files", (name, replaced.get(key, (folder / name).read_bytes()))) for name, key in names.items()]


def upload(server, parts, fields=None, **kwargs):
    return server.client.post("/adapters", data={"name": "a", **(fields or {})}, files=parts, **kwargs)


def nothing_left(server) -> bool:
    return not list((server.config.data_dir / "uploads").iterdir())


def test_an_upload_is_the_same_adapter_as_its_folder(own_server, sources):
    receipt = upload(own_server, files(sources / "a"), {"description": "up"})
    assert receipt.status_code == 201, receipt.text
    assert receipt.json()["description"] == "up"
    again = own_server.register("a", "a")
    assert again.status_code == 200
    assert again.json()["digest"] == receipt.json()["digest"]
    own_server.wait_until(lambda: nothing_left(own_server))


def test_booleans_are_words(own_server, sources):
    fields = {"pinned": "true", "replace": "false", "preload": "false"}
    receipt = upload(own_server, files(sources / "a"), fields).json()
    assert receipt["pinned"] is True
    assert own_server.engine.adapters[receipt["digest"]].residency == "disk"
    answer = upload(own_server, files(sources / "a"), {"pinned": "yes"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "pinned")


def test_a_dry_run_of_an_upload(own_server, sources):
    answer = upload(own_server, files(sources / "a"), params={"dry_run": "true"})
    assert (answer.status_code, answer.json()["version"]) == (200, None)
    assert own_server.client.get("/adapters").json() == {"data": []}


@pytest.mark.parametrize(
    ("change", "code", "hint"),
    [
        (lambda f: files(f)[:1], "adapter_invalid", "adapter_model.safetensors"),
        (lambda f: files(f)[1:], "adapter_invalid", "adapter_config.json"),
        (lambda f: files(f) + files(f)[:1], "invalid_request", "twice"),
        (lambda f: files(f, config=b"{"), "adapter_invalid", "adapter_config.json"),
        (lambda f: files(f, model=b"\xff" * 64), "adapter_invalid", ""),
        (lambda f: files(f, model=b""), "adapter_invalid", ""),
        (lambda f: [("files", ("adapter_model.bin", b"x"))], "adapter_invalid", "safetensors"),
        (lambda f: [("files", ("../adapter_config.json", b"x"))], "adapter_invalid", "not one of"),
        (lambda f: [("files", ("evil.py", b"x"))], "adapter_invalid", "not one of"),
        (lambda f: [*files(f), ("note", (None, b"x" * 100_000))], "invalid_request", "note"),
        (lambda f: [*files(f), *((f"note{i}", (None, b"x")) for i in range(20))], "invalid_request", ""),
        (lambda f: [*files(f), ("source", (None, b"a"))], "invalid_request", "source"),
        (lambda f: [*files(f), ("description", (None, b"x" * 5000))], "invalid_request", "4096"),
    ],
)
def test_bad_uploads_leave_nothing(own_server, sources, change, code, hint):
    answer = upload(own_server, change(sources / "a"))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == code
    assert hint in answer.json()["error"]["message"]
    assert own_server.client.get("/adapters").json() == {"data": []}
    own_server.wait_until(lambda: nothing_left(own_server))


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=", b"x"),
        ("multipart/form-data; boundary=zz", b"no boundary here"),
        ("multipart/form-data; boundary=zz", b"--zz\r\nbroken"),
        (
            "multipart/form-data; boundary=zz",
            b"--zz\r\nContent-Disposition: form-data; name=a\r\n\r\ncut off",
        ),
        (
            "multipart/form-data; boundary=zz",
            b'--zz\r\nContent-Disposition: form-data; name="n"\r\n\r\n\xff\r\n--zz--',
        ),
        ("multipart/form-data; boundary=" + "z" * 5000, b"--zz--"),
        ("multipart/form-data; boundary=zz", b""),
    ],
)
def test_malformed_multipart_bodies(own_server, content_type, body):
    answer = own_server.client.post("/adapters", content=body, headers={"content-type": content_type})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "invalid_request"
    own_server.wait_until(lambda: nothing_left(own_server))


def test_the_size_limit_counts_while_it_streams(base, serve, sources, tmp_path):
    with serve(tmp_path, base, adapter_roots=(sources,), max_adapter_bytes=1_000_000) as server:
        assert upload(server, files(sources / "a")).status_code == 201
        answer = upload(server, files(sources / "a", model=bytes(1_500_000)))
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")

        def endless():
            yield HEAD
            for _ in range(200):
                yield bytes(1_000_000)

        headers = {"content-type": "multipart/form-data; boundary=zz"}
        answer = server.client.post("/adapters", content=endless(), headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        server.wait_until(lambda: nothing_left(server))


def test_a_client_that_leaves_in_the_middle_leaves_nothing(own_server):
    request = (
        b"POST /adapters HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n"
        b"Content-Type: multipart/form-data; boundary=zz\r\n\r\n" + HEAD + bytes(2_000_000)
    )
    host, port = own_server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(request)
        own_server.wait_until(lambda: not nothing_left(own_server))
    own_server.wait_until(lambda: nothing_left(own_server) and not own_server.state.in_flight)
