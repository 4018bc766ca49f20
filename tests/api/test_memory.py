"""A server process of its own: what an upload costs it, and what it has imported."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

LAYERS, HIDDEN, INNER = 6, 2048, 8192
SCRIPT = """
import importlib.util, sys, types
from pathlib import Path

package = types.ModuleType("stubs")
package.__path__ = [{tests!r}]
sys.modules["stubs"] = package
from stubs.stub_engine import StubEngine
import heddle.api.server as server
from heddle.api.config import ServerConfig
from heddle.core.config import EngineConfig

server.EngineClient = lambda config, progress: StubEngine(config)
engine = EngineConfig(model={base!r})
config = ServerConfig(engine=engine, port={port}, data_dir=Path({data!r}), log_level="warning")
status = server.run(config)
print(sorted(name for name in sys.modules if name in ("torch", "transformers", "numba", "pandas")))
sys.exit(status)
"""


@contextmanager
def process_of(base: Path, data: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`run` in a process, with the stub engine in place of the client's; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    script = SCRIPT.format(tests=str(Path(__file__).parent), base=str(base), port=port, data=str(data))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(20)


def memory(pid: int, field: str) -> int:
    """Bytes: VmRSS now, VmHWM at most."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def large_adapter(folder: Path, layers: int, hidden: int, inner: int, rank: int) -> int:
    """A valid adapter on all modules, its weights zeros in a sparse file; how many bytes they are."""
    shapes = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
    shapes |= {
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    header: dict[str, object] = {}
    place = 0
    for layer in range(layers):
        for module, (rows, columns) in shapes.items():
            for side, shape in (("A", [rank, columns]), ("B", [rows, rank])):
                size = 4 * math.prod(shape)
                key = f"base_model.model.model.layers.{layer}.{module}.lora_{side}.weight"
                header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [place, place + size]}
                place += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir()
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + place)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return place


@pytest.fixture
def large_base(model_folder: Callable[..., Path], tmp_path: Path) -> Path:
    """Shapes as of a real model, so that an adapter can be large."""
    folder = model_folder(tmp_path / "large")
    changes = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": INNER}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 64}
    config = json.loads((folder / "config.json").read_text()) | changes | heads
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_500_mb_upload_grows_the_server_by_less_than_64_mb(large_base, tmp_path):
    small, large = tmp_path / "small", tmp_path / "500mb"
    large_adapter(small, LAYERS, HIDDEN, INNER, rank=1)
    assert large_adapter(large, LAYERS, HIDDEN, INNER, rank=443) >= 500_000_000
    with process_of(large_base, tmp_path / "data") as (process, url):

        def upload(folder: Path) -> httpx.Response:
            config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
            with config.open("rb") as first, weights.open("rb") as second:
                parts = [("files", (config.name, first)), ("files", (weights.name, second))]
                return httpx.post(f"{url}/adapters", data={"name": folder.name}, files=parts, timeout=200)

        assert upload(small).status_code == 201
        before = memory(process.pid, "VmRSS")
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # its peak counts from here
        answer = upload(large)
        assert answer.status_code == 201, answer.text
        assert memory(process.pid, "VmHWM") - before < 64_000_000
    assert not os.listdir(tmp_path / "data" / "uploads")


def test_a_server_process_never_loads_torch(base, tmp_path):
    with process_of(base, tmp_path / "data") as (process, url):
        assert httpx.post(f"{url}/v1/chat/completions", json={"messages": []}).status_code == 400
        turn = {"role": "user", "content": "hi"}
        assert httpx.post(f"{url}/v1/chat/completions", json={"messages": [turn]}).status_code == 200
        assert httpx.get(f"{url}/metrics").status_code == 200
        process.terminate()
        assert process.wait(20) == 0
        assert process.stdout is not None
        assert process.stdout.read() == "[]\n"
