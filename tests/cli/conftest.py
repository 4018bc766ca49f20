"""A command runner, and a small HTTP server that answers as told and remembers what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from click.testing import CliRunner, Result

MIB = 1 << 20
ADAPTER: dict[str, Any] = {
    "id": "pirate@2",
    "name": "pirate",
    "tenant": "public",
    "version": 2,
    "digest": "sha256:" + "ab" * 32,
    "status": "ready",
    "error": None,
    "residency": "device",
    "pinned": True,
    "rank": 8,
    "target_modules": ["q_proj", "v_proj"],
    "size_bytes": 460800,
    "blocks": 3,
    "matched": {"tensors": 120, "total": 120},
    "warnings": [],
    "base_model": "SmolLM2-135M-Instruct",
    "in_use": 1,
    "requests": 7,
    "tokens": 420,
    "created_at": "2025-01-02T03:04:05Z",
    "last_used_at": None,
    "description": None,
}


@dataclass
class Asked:
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    """Its first MiB."""
    length: int

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class FakeServer:
    """Answers every request with the next of `answers`, the last one for ever."""

    url: str
    answers: list[tuple[int, bytes]]
    asked: list[Asked] = field(default_factory=list)

    def answer(self, body: Any, status: int = 200) -> None:
        self.answers[:] = [(status, b"" if body is None else json.dumps(body).encode())]

    def refuse(self, status: int, message: str, code: str) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        self.answer({"error": error}, status)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            left = length = int(self.headers.get("content-length", 0))
            body = self.rfile.read(min(left, MIB))
            left -= len(body)
            while left:
                left -= len(self.rfile.read(min(left, MIB)))
            fake.asked.append(Asked(self.command, self.path, dict(self.headers), body, length))
            status, content = fake.answers[0] if len(fake.answers) == 1 else fake.answers.pop(0)
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PATCH = do_DELETE = handle_any

        def log_message(self, format: str, *args: Any) -> None: ...

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake = FakeServer(f"http://127.0.0.1:{listening.server_address[1]}", [(200, b"{}")])
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    yield fake
    listening.shutdown()
    listening.server_close()
    thread.join()


class Heddle:
    """Runs `heddle …` in this process."""

    def __call__(self, *args: str, env: dict[str, str] | None = None) -> Result:
        from heddle.api.cli import main

        clean = dict.fromkeys(("HEDDLE_URL", "HEDDLE_ADMIN_KEY", "HEDDLE_API_KEY")) | (env or {})
        return CliRunner().invoke(main, list(args), env=clean, catch_exceptions=False)


@pytest.fixture
def heddle() -> Heddle:
    return Heddle()


@pytest.fixture
def adapter() -> dict[str, Any]:
    """The HTTP interface's adapter object, every field filled."""
    return dict(ADAPTER)
