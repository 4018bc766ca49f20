"""How long `heddle demo` takes from the command to `ready`, and from there to the first token.

    python bench/start.py [--rounds 3] [further flags of `heddle demo`]

A first round, not counted, makes what later starts find on disk: the base, compiled kernels, the registry. Each
round then starts the command, asks one short question as soon as it says `ready`, and asks it again. Besides seconds it
prints the processor time of both processes, which a busy machine changes less, and what the engine had taken in memory
(VmHWM) beside what an interpreter takes that imports torch alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import psutil

PROGRAM = Path(sys.executable).with_name("heddle")
QUESTION = {
    "messages": [{"role": "user", "content": "Why is the sky blue?"}],
    "max_tokens": 2,
    "temperature": 0,
}
TORCH = "import torch; print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"


@dataclass(frozen=True)
class Start:
    """Of one round, in seconds, but for the last two."""

    ready: float
    first_token: float
    """Of the first request."""
    second: float
    """The first token of the second request."""
    api_cpu: float
    """Up to `ready`."""
    engine_cpu: float
    engine_mb: float
    """The most until the second request was answered, beside interpreter and torch; pages of the pool included."""
    api_mb: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    arguments, flags = parser.parse_known_args()
    torch = float(
        subprocess.run([sys.executable, "-c", TORCH], capture_output=True, text=True, check=True).stdout
    )
    print("  ".join(f"{field.name:>11}" for field in fields(Start)))
    with tempfile.TemporaryDirectory(prefix="heddle-start-") as data:
        one_start(data, flags, torch)
        for _ in range(arguments.rounds):
            start = one_start(data, flags, torch)
            print("  ".join(f"{getattr(start, field.name):11.3f}" for field in fields(Start)), flush=True)


def one_start(data: str, flags: list[str], torch_kilobytes: float) -> Start:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    began = time.perf_counter()
    with running([str(PROGRAM), "demo", "--port", str(port), "--data-dir", data, *flags]) as process:
        assert process.stdout is not None
        while (line := process.stdout.readline()) != "ready\n":
            if not line:
                raise SystemExit("the server ended before it was ready")
        ready = time.perf_counter() - began
        api = psutil.Process(process.pid)
        engine = next(child for child in api.children() if "heddle.core.engine.process" in child.cmdline())
        api_cpu, engine_cpu = (sum(one.cpu_times()[:2]) for one in (api, engine))
        first, second = first_token(port), first_token(port)
        return Start(
            ready=ready,
            first_token=first,
            second=second,
            api_cpu=api_cpu,
            engine_cpu=engine_cpu,
            engine_mb=(peak_kilobytes(engine.pid) - torch_kilobytes) * 1.024e-3,
            api_mb=peak_kilobytes(api.pid) * 1.024e-3,
        )


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def first_token(port: int) -> float:
    """Seconds until the first piece of a streamed answer has come."""
    body = json.dumps({**QUESTION, "stream": True}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", body, {"Content-Type": "application/json"}
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                seconds = time.perf_counter() - began
                answer.read()
                return seconds
    raise SystemExit("the answer has no token")


def peak_kilobytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
