"""A whole API process on an engine that computes nothing, for benches of the API alone."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
from heddle.core.checkpoint.demo import demo_base
from heddle.core.model.config import ModelConfig
from safetensors.numpy import save_file

SCRIPT = """
import socket, subprocess, sys
import msgspec
from heddle.api.server import ServerConfig, run
from heddle.core import client
from heddle.core.engine.launch import LaunchedEngine
from heddle.core.messages import frame

def launch_stub(config):
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-P", sys.argv[2], str(theirs.fileno()), sys.argv[3]]
    with theirs:
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    ours.sendall(frame(config))
    return LaunchedEngine(process, ours)

client.launch = launch_stub
exec(sys.argv[4])
config = msgspec.json.decode(sys.argv[1], type=ServerConfig, dec_hook=lambda kind, value: kind(value))
sys.exit(run(config))
"""
IDLE_SECONDS = 2.0


class Server:
    """As `heddle serve` runs it, with the demo base's tokenizer and `stub_engine.py` in the engine's place."""

    def __init__(self, home: Path, step_seconds: float, log_level: str, extra: str) -> None:
        """`extra`: Python that its process runs first."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        config = {
            "engine": {
                "model": str(demo_base()),
                "num_threads": 1,
                "max_model_len": 8192,
                "max_queued_requests": 4096,
            },
            "served_model_name": "demo",
            "port": port,
            "data_dir": str(home / "data"),
            "adapter_roots": [str(home / "adapters")],
            "log_level": log_level,
        }
        stub = str(Path(__file__).with_name("stub_engine.py"))
        arguments = [json.dumps(config), stub, str(step_seconds), extra]
        log = home / "server.log"
        with log.open("wb") as output:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-c", SCRIPT, *arguments], stdout=subprocess.PIPE, stderr=output
            )
        assert self._popen.stdout is not None
        if self._popen.stdout.readline() != b"ready\n":
            raise SystemExit(log.read_text())
        self.url = f"http://127.0.0.1:{port}"
        self.process = psutil.Process(self._popen.pid)
        self.idle_share = 0.0
        """CPU seconds a second that it uses for nobody."""

    def measure_idle(self) -> None:
        time.sleep(IDLE_SECONDS / 2)
        before = self.cpu_seconds()
        time.sleep(IDLE_SECONDS)
        self.idle_share = (self.cpu_seconds() - before) / IDLE_SECONDS

    def cpu_seconds(self) -> float:
        """Of all its threads, in the kernel too."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def end(self) -> None:
        self._popen.send_signal(signal.SIGTERM)
        self._popen.wait(30)


@contextlib.contextmanager
def served(
    step_seconds: float, log_level: str = "warning", adapters: int = 0, extra: str = ""
) -> Iterator[tuple[Server, Path]]:
    """A server with adapters a0, a1, … registered, and the folder that sources may lie in."""
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        make_adapters(home / "adapters", adapters)
        server = Server(home, step_seconds, log_level, extra)
        try:
            with httpx.Client(base_url=server.url, timeout=60) as client:
                for number in range(adapters):
                    body = {"name": f"a{number}", "source": f"a{number}"}
                    client.post("/adapters", json=body).raise_for_status()
            yield server, home / "adapters"
        finally:
            server.end()


def make_adapters(folder: Path, count: int, rank: int = 1) -> None:
    """PEFT folders on one projection of the demo base, a0, a1, …, no two alike."""
    rows, columns = ModelConfig.load(demo_base()).base_model("demo", demo_base()).shapes["q_proj"]
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    for number in range(count):
        random = np.random.default_rng(number)
        path = folder / f"a{number}"
        path.mkdir(parents=True)
        tensors = {
            f"{name}.lora_A.weight": random.standard_normal((rank, columns)).astype(np.float32),
            f"{name}.lora_B.weight": random.standard_normal((rows, rank)).astype(np.float32),
        }
        save_file(tensors, path / "adapter_model.safetensors")
        write_config(path, rank, ["q_proj"])


def make_large_adapter(folder: Path, size: int) -> None:
    """A PEFT folder on every projection of the demo base, of the rank that makes about `size` bytes of float32."""
    base = ModelConfig.load(demo_base()).base_model("demo", demo_base())
    rank = size // (4 * base.num_layers * sum(rows + columns for rows, columns in base.shapes.values()))
    random = np.random.default_rng(0)
    tensors = {}
    for layer in range(base.num_layers):
        for module, (rows, columns) in base.shapes.items():
            block = "self_attn" if module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            name = f"base_model.model.model.layers.{layer}.{block}.{module}"
            tensors[f"{name}.lora_A.weight"] = random.random((rank, columns), np.float32)
            tensors[f"{name}.lora_B.weight"] = random.random((rows, rank), np.float32)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    write_config(folder, rank, list(base.shapes))


def write_config(folder: Path, rank: int, modules: list[str]) -> None:
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 1, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
