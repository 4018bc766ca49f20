"""`heddle adapters …` against a server: what is sent, what is printed, which status it ends with."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import subprocess
import sys
from email import message_from_bytes
from pathlib import Path
from typing import Any

import pytest


def test_list_is_a_table_with_every_column(heddle, server, adapter):
    server.answer({"data": [adapter, adapter | {"name": "sql", "version": 1, "status": "incompatible"}]})
    result = heddle("adapters", "list", "--url", server.url)
    assert result.exit_code == 0
    header, *_ = (line for line in result.stdout.splitlines() if line.strip())
    assert [word.strip() for word in header.split("  ") if word.strip()] == [
        "name",
        "tenant",
        "version",
        "rank",
        "size",
        "residency",
        "pinned",
        "in use",
        "last used",
    ]
    (pirate,) = (line.split() for line in result.stdout.splitlines() if "pirate" in line)
    assert pirate == ["pirate", "public", "2", "8", "450.0", "KiB", "device", "yes", "1", "never"]
    assert "device (incompatible)" in result.stdout
    assert (server.asked[0].method, server.asked[0].path) == ("GET", "/adapters")


def test_a_long_name_is_not_cut_when_the_output_is_piped(heddle, server, adapter):
    name = "n" * 128
    server.answer({"data": [adapter | {"name": name}]})
    assert name in heddle("adapters", "list", "--url", server.url).stdout


def test_a_name_that_looks_like_markup_is_printed_as_it_is(heddle, server, adapter):
    server.answer(adapter | {"description": "[bold]loud[/bold]"})
    assert "[bold]loud[/bold]" in heddle("adapters", "show", "pirate", "--url", server.url).stdout


def test_json_is_the_servers_answer(heddle, server, adapter):
    server.answer({"data": [adapter]})
    result = heddle("adapters", "list", "--url", server.url, "--json")
    assert json.loads(result.stdout) == {"data": [adapter]}


def test_show_has_every_field(heddle, server, adapter):
    server.answer(adapter)
    text = heddle("adapters", "show", "pirate", "--url", server.url).stdout
    for part in ("q_proj, v_proj", "120 of 120 tensors", "450.0 KiB (460800)", adapter["digest"], "420"):
        assert part in text


@pytest.mark.parametrize(
    ("args", "method", "path", "body"),
    [
        (["versions", "a"], "GET", "/adapters/a/versions", None),
        (["load", "a"], "POST", "/adapters/a/load", None),
        (["evict", "a"], "POST", "/adapters/a/evict", {"to": "host"}),
        (["evict", "a", "--to", "disk"], "POST", "/adapters/a/evict", {"to": "disk"}),
        (["pin", "a"], "PATCH", "/adapters/a", {"pinned": True}),
        (["unpin", "a"], "PATCH", "/adapters/a", {"pinned": False}),
        (["remove", "a@3"], "DELETE", "/adapters/a@3", None),
        (["show", "../x"], "GET", "/adapters/..%2Fx", None),
    ],
)
def test_each_command_is_one_call(heddle, server, adapter, args, method, path, body):
    server.answer({"data": [adapter]} if args[0] == "versions" else None if args[0] == "remove" else adapter)
    assert heddle("adapters", *args, "--url", server.url + "/").exit_code == 0
    (asked,) = server.asked
    assert (asked.method, asked.path) == (method, path)
    assert asked.body == b"" if body is None else asked.json == body


def test_a_tenants_adapters_lie_below_its_path(heddle, server, adapter):
    server.answer(adapter)
    heddle("adapters", "load", "a", "--tenant", "team one", "--url", server.url)
    assert server.asked[0].path == "/tenants/team%20one/adapters/a/load"


def test_key_and_url_come_from_flags_or_environment(heddle, server):
    server.answer({"data": []})
    heddle("adapters", "list", env={"HEDDLE_URL": server.url, "HEDDLE_ADMIN_KEY": "from-env"})
    heddle("adapters", "list", "--url", server.url, "--key", "given", env={"HEDDLE_ADMIN_KEY": "from-env"})
    heddle("adapters", "list", "--url", server.url)
    headers = [{key.lower(): value for key, value in asked.headers.items()} for asked in server.asked]
    assert [header.get("authorization") for header in headers] == ["Bearer from-env", "Bearer given", None]


def test_a_refusal_is_the_servers_message_on_stderr_and_status_1(heddle, server):
    server.refuse(409, "adapter pirate is in use by 2 requests", "adapter_in_use")
    result = heddle("adapters", "evict", "pirate", "--url", server.url)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "heddle: adapter pirate is in use by 2 requests (adapter_in_use)\n"


@pytest.mark.parametrize("body", [b"<html>Bad gateway</html>", b"{}", b'{"error": "text"}', b""])
def test_a_refusal_that_is_no_error_object_still_names_the_status(heddle, server, body):
    server.answers[:] = [(502, body)]
    result = heddle("adapters", "list", "--url", server.url)
    assert (result.exit_code, result.stderr) == (1, "heddle: the server answered with status 502\n")


def test_an_answer_that_is_not_json_is_status_1(heddle, server):
    server.answers[:] = [(200, b"<html>hello</html>")]
    result = heddle("adapters", "list", "--url", server.url)
    assert result.exit_code == 1
    assert "is it a Heddle server?" in result.stderr


def test_no_server_is_status_1_and_names_the_address(heddle):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    result = heddle("adapters", "list", "--url", url)
    assert result.exit_code == 1
    assert f"no answer from {url}" in result.stderr


# ---------------------------------------------------------------- add


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text('{"r": 4}')
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(range(256)) * 1024)
    return tmp_path


def parts_of(asked: Any) -> dict[str, list[tuple[str | None, bytes]]]:
    """The parts of a multipart body by name: (file name, content)."""
    kind = next(value for key, value in asked.headers.items() if key.lower() == "content-type")
    message = message_from_bytes(b"Content-Type: " + kind.encode() + b"\r\n\r\n" + asked.body)
    parts: dict[str, list[tuple[str | None, bytes]]] = {}
    for part in message.get_payload():
        name = part.get_param("name", header="content-disposition")
        parts.setdefault(name, []).append((part.get_filename(), part.get_payload(decode=True)))
    return parts


def test_add_uploads_a_local_folder(heddle, server, adapter, folder):
    server.answer(adapter, 201)
    result = heddle("adapters", "add", "pirate", str(folder), "--pinned", "--url", server.url)
    assert (result.exit_code, result.stdout) == (0, "added pirate@2: device, 3 blocks\n")
    (asked,) = server.asked
    assert (asked.method, asked.path) == ("POST", "/adapters")
    parts = parts_of(asked)
    assert parts.pop("files") == [
        (name, (folder / name).read_bytes()) for name in ("adapter_config.json", "adapter_model.safetensors")
    ]
    assert parts == {"name": [(None, b"pirate")], "pinned": [(None, b"true")]}


def test_add_sends_its_options(heddle, server, adapter, folder):
    server.answer(adapter | {"version": None})
    options = ["--replace", "--no-preload", "--description", "talks like one", "--dry-run"]
    result = heddle("adapters", "add", "pirate", str(folder), *options, "--url", server.url)
    assert result.stdout == "would add pirate: device, 3 blocks\n"
    (asked,) = server.asked
    assert asked.path == "/adapters?dry_run=true"
    fields = {name: values[0][1] for name, values in parts_of(asked).items() if name != "files"}
    assert fields == {
        "name": b"pirate",
        "replace": b"true",
        "preload": b"false",
        "description": b"talks like one",
    }


@pytest.mark.parametrize(
    ("args", "source"), [(["hf:org/name@main"], "hf:org/name@main"), (["/srv/a", "--server-path"], "/srv/a")]
)
def test_add_lets_the_server_fetch_what_only_it_can_read(heddle, server, adapter, args, source):
    server.answer(adapter, 201)
    assert heddle("adapters", "add", "pirate", *args, "--preload", "--url", server.url).exit_code == 0
    assert server.asked[0].json == {"name": "pirate", "source": source, "preload": True}


def test_add_prints_warnings_on_stderr(heddle, server, adapter, folder):
    server.answer(adapter | {"warnings": ["it names another base"]}, 201)
    result = heddle("adapters", "add", "pirate", str(folder), "--url", server.url)
    assert result.stderr == "warning: it names another base\n"


@pytest.mark.parametrize("missing", ["folder", "adapter_config.json", "adapter_model.safetensors"])
def test_add_without_the_files_is_status_1(heddle, server, folder, missing):
    if missing == "folder":
        folder = folder / "nowhere"
    else:
        (folder / missing).unlink()
    result = heddle("adapters", "add", "pirate", str(folder), "--url", server.url)
    assert result.exit_code == 1
    assert ("--server-path" if missing == "folder" else missing) in result.stderr
    assert server.asked == []


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_that_cannot_be_read_is_status_1_and_named(heddle, server, folder, monkeypatch, file):
    """Whoever runs the tests may be let in everywhere, so the refusal is planted."""
    real = Path.open

    def refusing(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == file:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(Path, "open", refusing)
    result = heddle("adapters", "add", "pirate", str(folder), "--url", server.url)
    assert (result.exit_code, result.stderr) == (1, f"heddle: {folder / file}: Permission denied\n")
    assert server.asked == []


def test_a_large_upload_is_not_held_in_memory(server, tmp_path):
    """In less memory than the file is large, the upload still goes through."""
    (tmp_path / "adapter_config.json").write_text("{}")
    with (tmp_path / "adapter_model.safetensors").open("wb") as file:
        file.truncate(300 << 20)
    server.refuse(400, "that is no adapter", "adapter_invalid")
    command = [
        sys.executable,
        "-m",
        "heddle.api.cli",
        "adapters",
        "add",
        "big",
        str(tmp_path),
        "--url",
        server.url,
    ]

    def bound() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (200 << 20, 200 << 20))

    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=bound, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (1, "heddle: that is no adapter (adapter_invalid)\n")
    assert server.asked[0].length > 300 << 20
