"""schemathesis, let loose on the OpenAPI document and a whole server: no 500, no hang, no answer that it does not tell.

`pytest tests/api/test_schemathesis.py --long -s` goes on for 20 minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from .peft_reference import reference, text_of
from .server_process import PROMPT, served

KEY = "admin-key-of-the-tests"
SHORT = (
    *("--max-examples", "3", "--generation-deterministic"),
    *("--exclude-operation-id-regex", "_in_tenant$"),  # the same handlers once more
)
LONG = ("--max-time", "1200", "--seed", "1", "--generation-database", "none")
LEFT_OUT = ("positive_data_acceptance", "ensure_resource_availability")
"""Checks that cannot hold: bounds that one field sets for another are in no schema, and a dry run creates nothing; for
the second `schemathesis_hooks` has one that can."""


def schemathesis(
    url: str, folder: Path, *options: str, key: str | None = None
) -> subprocess.CompletedProcess[str]:
    """A run against the server at `url`, with our hooks."""
    authorization = () if key is None else ("--header", f"Authorization: Bearer {key}")
    return subprocess.run(
        [
            Path(sys.executable).with_name("schemathesis"),
            *("run", f"{url}/openapi.json"),
            *authorization,
            *("--exclude-checks", ",".join(LEFT_OUT)),
            *("--request-timeout", "30", "--no-color"),
            *("--warnings", "off", "--suppress-health-check", "all", "--continue-on-failure"),
            *options,
        ],
        env={
            **os.environ,
            "SCHEMATHESIS_HOOKS": "schemathesis_hooks",
            "PYTHONPATH": str(Path(__file__).parent),
        },
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.timeout(1800)
def test_every_answer_is_one_that_the_document_tells(world, tmp_path, long):
    expected = text_of(reference(world, None, [*PROMPT.encode()], 12)[0])
    settings = {
        "engine": {"model": str(world["base"]), "max_model_len": 64},
        "served_model_name": "tiny",
        "adapter_roots": [world["adapters"]],
        "data_dir": tmp_path,
        "admin_key": KEY,
    }
    with served(**settings) as process:
        process.client.headers["authorization"] = f"Bearer {KEY}"
        for name, source in (("one", "one"), ("two", "five")):
            process.client.post("/adapters", json={"name": name, "source": source}).raise_for_status()
        process.client.post("/tenants", json={"name": "someone"}).raise_for_status()
        length = LONG if long else SHORT
        began = time.monotonic()
        done = schemathesis(process.url, tmp_path, *length, key=KEY)
        print(done.stdout, f"{time.monotonic() - began:.0f} s")
        assert done.returncode == 0, done.stdout + done.stderr
        assert process.complete().json()["choices"][0]["text"] == expected


# ------------------------------------------------------------------ the check of what was created


class Shelf(BaseHTTPRequestHandler):
    """A small `/adapters`. `wrong`: what it gets wrong."""

    wrong = ""
    kept: set[str]

    def do_GET(self) -> None:
        if self.path == "/openapi.json":
            self.answer(200, SHELF)
        elif unquote(self.path).removeprefix("/adapters/") in self.kept:
            self.answer(200, {})
        else:
            self.answer(404, {})

    def do_POST(self) -> None:
        name = json.loads(self.rfile.read(int(self.headers["content-length"])))["name"]
        dry = "dry_run=true" in self.path
        if not dry and self.wrong != "it forgets":
            self.kept.add(name)
        self.answer(
            200 if dry and self.wrong != "dry runs are answered as creations" else 201, {"name": name}
        )

    def answer(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


NAME = {"type": "string", "pattern": "^[a-z]{9}$"}
TOLD = {
    "description": "Done",
    "content": {
        "application/json": {"schema": {"type": "object", "properties": {"name": NAME}, "required": ["name"]}}
    },
    "links": {"itself": {"operationId": "show", "parameters": {"path.name": "$response.body#/name"}}},
}
SHELF = {
    "openapi": "3.1.0",
    "info": {"title": "Shelf", "version": "1"},
    "paths": {
        "/adapters": {
            "post": {
                "operationId": "create",
                "parameters": [
                    {"name": "dry_run", "in": "query", "required": True, "schema": {"type": "boolean"}}
                ],
                "requestBody": {
                    "required": True,
                    "content": TOLD["content"],
                },
                "responses": {"200": TOLD, "201": TOLD},
            }
        },
        "/adapters/{name}": {
            "get": {
                "operationId": "show",
                "parameters": [{"name": "name", "in": "path", "required": True, "schema": NAME}],
                "responses": {"200": {"description": "Done"}, "404": {"description": "Not there"}},
            }
        },
    },
}


@pytest.mark.parametrize("wrong", ["", "it forgets", "dry runs are answered as creations"])
def test_what_was_created_is_looked_for_and_what_was_planned_is_not(tmp_path: Path, wrong: str) -> None:
    handler = type("Handler", (Shelf,), {"wrong": wrong, "kept": set()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        only = (
            "--phases",
            "stateful",
            "--mode",
            "positive",
            "--max-examples",
            "20",
            "--generation-deterministic",
            "--no-shrink",
        )
        try:
            done = schemathesis(url, tmp_path, *only)
        finally:
            server.shutdown()
            thread.join()
    assert done.returncode == (1 if wrong else 0), done.stdout + done.stderr
    words = {"it forgets": "just created", "dry runs are answered as creations": "answered as a creation"}
    assert words.get(wrong, "") in done.stdout
    if wrong:
        assert "1 failed" in done.stdout.lower() or "FAILURES" in done.stdout
