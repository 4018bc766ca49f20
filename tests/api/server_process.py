"""A whole server in its own processes, as `heddle serve` runs it: API process and engine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

SCRIPT = """
import sys
import msgspec
from heddle.api.server import ServerConfig, run

config = msgspec.json.decode(sys.argv[1], type=ServerConfig, dec_hook=lambda kind, value: kind(value))
sys.exit(run(config))
"""
PROMPT = "The quick brown fox"


class Process:
    """`run` in a process."""

    def __init__(self, **settings: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        engine = {
            "num_threads": 1,
            "pool_memory": 8_000_000,
            "check_invariants": True,
            **settings.pop("engine"),
        }
        config = {"engine": engine, "port": self.port, "log_level": "warning", **settings}
        self.popen = subprocess.Popen(
            [sys.executable, "-P", "-c", SCRIPT, json.dumps(config, default=str)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def until_ready(self) -> None:
        assert self.popen.stdout is not None
        assert self.popen.stdout.readline() == "ready\n"

    def end(self) -> int:
        self.client.close()
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(30)

    def kill(self) -> None:
        """kill -9 to the API process and the engine at the same moment, where they are not dead yet."""
        self.client.close()
        if self.popen.poll() is not None:
            return
        os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait(30)

    def complete(self, **fields: Any) -> httpx.Response:
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, **fields}
        return self.client.post("/v1/completions", json=body)

    def metric(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"heddle_{name} "))

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text().split()
        (pid,) = [int(child) for child in children if "heddle.core.engine.process" in _command(child)]
        return pid

    def wait_until(self, condition: Callable[[], bool], seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not come true in time"
            time.sleep(0.05)

    def is_up(self, path: str) -> bool:
        try:
            return self.client.get(path).status_code == 200
        except httpx.TransportError:
            return False


def _command(pid: str) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


@contextmanager
def served(**settings: Any) -> Iterator[Process]:
    process = Process(**settings)
    try:
        process.until_ready()
        yield process
    finally:
        if process.popen.poll() is None:
            process.end()
