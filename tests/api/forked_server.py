"""A server's API process that starts in a moment: forked from one that has imported everything, stub engine inside.

For tests that start many. It has a process of its own, with the real registry, files and HTTP; only the model is
missing.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

SCRIPT = """
import importlib.util, os, sys
import msgspec
from heddle.api import server

spec = importlib.util.spec_from_file_location("stub_engine", sys.argv[1])
stub = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stub)
server.EngineClient = lambda config, on_progress: stub.StubEngine(config)
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        config = msgspec.json.decode(line, type=server.ServerConfig, dec_hook=lambda kind, value: kind(value))
        os._exit(server.run(config))
    print(pid, flush=True)
    os.waitpid(pid, 0)
    print("ended", flush=True)
"""


class Forks:
    """Where servers are forked from, one at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", SCRIPT, Path(__file__).with_name("stub_engine.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        """Of the process that servers are forked from."""
        return self._process.pid

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        self._process.communicate()


class ForkedServer:
    """What `server_process.Process` is, without an engine process."""

    def __init__(self, forks: Forks, **settings: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        config = {"port": port, "log_level": "warning", **settings}
        self._forks = forks
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=60)
        forks.say(json.dumps(config, default=str))
        self._pid = int(forks.hear())
        self.alive = True

    def until_ready(self) -> None:
        assert self._forks.hear() == "ready"

    def complete(self, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": "hi", **fields})

    def kill(self) -> None:
        """kill -9, where it is not dead yet."""
        self.client.close()
        if not self.alive:
            return
        os.kill(self._pid, signal.SIGKILL)
        while self._forks.hear() != "ended":
            pass
        self.alive = False
