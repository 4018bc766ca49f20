"""Multipart registrations: what is taken, what is refused, and that files go to disk and not to memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest


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
        (lambda f: [*files(f), *(("note%d" % i, (None, b"x")) for i in range(20))], "invalid_request", ""),
        (lambda f: [*files(f), ("source", (None, b"a"))], "invalid_request", "source"),
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
            yield b'--zz\r\nContent-Disposition: form-data; name="files"; filename="adapter_config.json"\r\n\r\n'
            for _ in range(200):
                yield bytes(1_000_000)

        headers = {"content-type": "multipart/form-data; boundary=zz"}
        answer = server.client.post("/adapters", content=endless(), headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        server.wait_until(lambda: nothing_left(server))


def test_a_client_that_leaves_in_the_middle_leaves_nothing(own_server):
    head = b'--zz\r\nContent-Disposition: form-data; name="files"; filename="adapter_config.json"\r\n\r\n'
    request = (
        b"POST /adapters HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n"
        b"Content-Type: multipart/form-data; boundary=zz\r\n\r\n" + head + bytes(2_000_000)
    )
    import socket

    host, port = own_server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(request)
        own_server.wait_until(lambda: not nothing_left(own_server))
    own_server.wait_until(lambda: nothing_left(own_server) and not own_server.state.in_flight)


MEMORY_SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from importlib import util
from heddle.api.server import run
import heddle.api.server as server, heddle.core.client as client
import types
package = types.ModuleType("stubs"); package.__path__ = [{tests!r}]
sys.modules["stubs"] = package
spec = util.spec_from_file_location("stubs.stub_engine", {tests!r} + "/stub_engine.py")
module = util.module_from_spec(spec); sys.modules[spec.name] = module; spec.loader.exec_module(module)
server.EngineClient = lambda config, progress: module.StubEngine(config)
from heddle.api.config import ServerConfig
from heddle.core.config import EngineConfig
config = ServerConfig(
    engine=EngineConfig(model={base!r}), port={port}, served_model_name="tiny", data_dir=Path({data!r}),
    log_level="warning")
sys.exit(run(config))
"""


def _rss(pid: int, field: str = "VmRSS") -> int:
    """Bytes of a process's memory, its peak with VmHWM."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def test_a_500_mb_upload_grows_the_server_by_less_than_64_mb(base, sources, tmp_path):
    """A process of its own, so that its memory is its own. The file is 500 MB of an adapter that is then refused."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    script = MEMORY_SCRIPT.format(
        tests=str(Path(__file__).parent), base=str(base), port=port, data=str(tmp_path / "data")
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            url = f"http://127.0.0.1:{port}"
            assert (
                httpx.post(f"{url}/adapters", data={"name": "a"}, files=files(sources / "a")).status_code
                == 201
            )
            before = _rss(process.pid)
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # the peak counts from here

            def body():
                head = 'Content-Disposition: form-data; name="files"; filename="{}"\r\n\r\n'
                config = (sources / "a" / "adapter_config.json").read_bytes()
                yield b"--zz\r\n" + head.format("adapter_config.json").encode() + config
                yield b"\r\n--zz\r\n" + head.format("adapter_model.safetensors").encode()
                yield (8).to_bytes(8, "little") + b"{}      "
                for _ in range(500):
                    yield bytes(1_000_000)
                yield b'\r\n--zz\r\nContent-Disposition: form-data; name="name"\r\n\r\nbig\r\n--zz--\r\n'

            began = time.monotonic()
            headers = {"content-type": "multipart/form-data; boundary=zz"}
            answer = httpx.post(f"{url}/adapters", content=body(), headers=headers, timeout=120)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["code"] == "adapter_invalid"
            grown = _rss(process.pid, "VmHWM") - before
            print(f"500 MB in {time.monotonic() - began:.1f} s, grew by {grown / 1e6:.1f} MB at most")
            assert grown < 64_000_000
        finally:
            process.terminate()
            assert process.wait(20) == 0
    assert not os.listdir(tmp_path / "data" / "uploads")
