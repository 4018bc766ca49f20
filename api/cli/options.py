"""The flags that `heddle serve` and `heddle demo` share, and the `ServerConfig` they become."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import rich_click as click

from ...core.config import EngineConfig
from ..config import ServerConfig
from .failure import USAGE, fail, note
from .render import size
from .values import ByteSize, FiniteRange, NamedPath

Command = TypeVar("Command", bound=Callable[..., object])
Flag = tuple[tuple[str, ...], dict[str, Any]]
"""Names and attributes of an option."""

ENGINE: dict[str, Any] = {field.name: field.default for field in msgspec.structs.fields(EngineConfig)}
SERVER: dict[str, Any] = {field.name: field.default for field in msgspec.structs.fields(ServerConfig)}
"""Defaults of the settings, so that none is written twice."""

QUANTIZATIONS = ("auto", "none", "int8", "bitsandbytes", "gptq", "awq")
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "float16", "half", "bfloat16")
LOG_LEVELS = ("debug", "info", "warning", "error")
ADAPTER_FLAGS = ("--adapter", "--lora-modules")
NOT_NEEDED = {
    "enable_lora": "adapters are always served",
    "max_loras": "adapters of any rank share the block pool, as many as fit",
    "max_cpu_loras": "host copies are bounded by --swap-space",
}
"""vLLM's flags that are accepted and mean nothing here, and why."""

POSITIVE = click.IntRange(min=1)


def quantization_name(name: str) -> str:
    """vLLM's name for LLM.int8() is taken too."""
    return "int8" if name == "bitsandbytes" else name


class ServerCommand(click.RichCommand):
    """A command that lets `--lora-modules` be followed by several adapters, as vLLM does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, repeat_flag(args, ADAPTER_FLAGS))


def repeat_flag(args: Sequence[str], flags: Sequence[str]) -> list[str]:
    """`--flag a=1 b=2` as `--flag a=1 --flag b=2`; a value is what looks like NAME=PATH or JSON."""
    result: list[str] = []
    flag, fresh = None, False
    for arg in args:
        if arg in flags:
            flag, fresh = arg, True
        elif flag is not None and not arg.startswith("-") and ("=" in arg or arg.startswith("{")):
            if not fresh:
                result.append(flag)
            fresh = False
        else:
            flag = None
        result.append(arg)
    return result


def flag(*names: str, **attributes: Any) -> Flag:
    return names, attributes


def setting(*names: str, **attributes: Any) -> Flag:
    """A flag whose default is that of the setting it is named after."""
    field = names[-1].removeprefix("--").replace("-", "_")
    default = ENGINE[field] if field in ENGINE else SERVER[field]
    shown = size(default) if isinstance(attributes.get("type"), ByteSize) else default is not None
    return flag(*names, default=default, show_default=shown, **attributes)


def panels(quantization: str, pool_memory: int | None) -> dict[str, list[Flag]]:
    """All flags, under the headings that the help shows them with."""
    pool_default = (
        "512MiB" if pool_memory else "CPU: a quarter of what is available, at most 4GiB; CUDA: the rest"
    )
    return {
        "Model": [
            setting(
                "--served-model-name", help="The base's name in requests. [default: its folder's or hub name]"
            ),
            flag(
                "--quantization",
                "-q",
                type=click.Choice(QUANTIZATIONS),
                default=quantization,
                show_default=True,
                help="Number form of the base's weights; bitsandbytes: int8, auto: the checkpoint's own.",
            ),
            setting("--device", type=click.Choice(DEVICES), help="Where the model runs."),
            setting(
                "--dtype",
                type=click.Choice(DTYPES),
                help="auto: float32 on a CPU, the checkpoint's own on CUDA.",
            ),
            setting(
                "--max-model-len",
                type=POSITIVE,
                help="Tokens of prompt and answer. [default: the model's own]",
            ),
            setting(
                "--quantize-head",
                is_flag=True,
                help="The head in INT8 as well; where it is tied to the embedding, the one table of both.",
            ),
            setting(
                "--int8-activations",
                is_flag=True,
                help="An INT8 base: round the layers' activations to 8 bits too; faster, less exact.",
            ),
            setting(
                "--kv-cache-dtype",
                type=click.Choice(["auto", "int8"]),
                help="Keys and values; auto: as --dtype, int8: a byte each, scaled by token and head.",
            ),
            setting("--seed", type=int, help="For requests that bring none."),
        ],
        "Memory and scheduling": [
            flag(
                "--pool-memory",
                type=ByteSize(),
                default=pool_memory,
                help=f"Size of the block pool (KV and adapters), such as 4GiB. [default: {pool_default}]",
            ),
            setting(
                "--gpu-memory-utilization",
                type=FiniteRange(0, 1, min_open=True),
                help="CUDA: share to use.",
            ),
            setting(
                "--swap-space",
                type=FiniteRange(min=0),
                metavar="GIB",
                help="Host memory: half for swapped sequences, half for copies of adapters.",
            ),
            setting("--block-size", type=POSITIVE, help="Tokens in one block of the pool."),
            setting("--max-num-seqs", type=POSITIVE, help="Sequences in one step."),
            setting("--max-num-batched-tokens", type=POSITIVE, help="Tokens in one step."),
            setting("--max-queued-requests", type=POSITIVE, help="Beyond them a request gets 503."),
            setting(
                "--scheduling-policy",
                type=click.Choice(("fair", "fcfs")),
                help="fair: between tenants, by the service each was given; fcfs: by arrival.",
            ),
            setting(
                "--step-log",
                type=click.Path(dir_okay=False),
                help="Append one JSON line a step to this file.",
            ),
            setting(
                "--enable-prefix-caching/--no-enable-prefix-caching",
                "enable_prefix_caching",
                help="Reuse the keys and values of equal prompt beginnings.",
            ),
            setting(
                "--enforce-eager/--no-enforce-eager",
                "enforce_eager",
                help="--no-enforce-eager captures decode steps and replays them, on CUDA as graphs made at the start. "
                "[default: on a CPU alone]",
            ),
            setting(
                "--batch-invariant/--no-batch-invariant",
                "batch_invariant",
                help="Equal bits whatever shares the batch. [default: where it is nearly free]",
            ),
        ],
        "Adapters": [
            flag(
                *ADAPTER_FLAGS,
                "adapters",
                type=NamedPath(),
                multiple=True,
                metavar="NAME=PATH",
                help="Register this PEFT folder (or hf:org/name) at the start; repeatable.",
            ),
            flag(
                "--adapter-root",
                "adapter_roots",
                type=click.Path(path_type=Path),
                multiple=True,
                help="Where local sources of POST /adapters may lie; repeatable. [default: ./adapters]",
            ),
            setting(
                "--max-lora-rank",
                type=POSITIVE,
                help="Adapters beyond it are refused; nothing is padded to it.",
            ),
            setting("--max-adapter-bytes", type=ByteSize(), help="Larger adapters are refused."),
        ],
        "Server": [
            setting("--host", help="Address to listen on."),
            setting("--port", type=click.IntRange(0, 65535), help="0: any free port."),
            setting("--max-body-bytes", type=ByteSize(), help="Larger bodies, adapters aside, are refused."),
            setting(
                "--limit-concurrency",
                type=POSITIVE,
                metavar="N",
                help="Connections open at a time; beyond them idle ones are closed, and 503 where there are none. "
                "[default: what `ulimit -n` allows, less 256]",
            ),
            setting(
                "--request-timeout",
                type=FiniteRange(min=0, min_open=True),
                help="Seconds. [default: none]",
            ),
            setting("--log-level", type=click.Choice(LOG_LEVELS), help="What is logged."),
            flag(
                "--admin-key",
                "--api-key",
                "admin_key",
                envvar="HEDDLE_ADMIN_KEY",
                show_envvar=True,
                help="Every call but /health and /ready then needs a key.",
            ),
            setting("--allow-anonymous", is_flag=True, help="Serve beyond loopback without a key."),
            flag(
                "--data-dir",
                type=click.Path(path_type=Path, file_okay=False),
                help="Where registry and adapters are kept. [default: ~/.local/share/heddle]",
            ),
            setting("--database", metavar="URL", help="The registry. [default: SQLite in the data folder]"),
            setting(
                "--blob-store",
                metavar="URL",
                help="Adapters' files, through fsspec. [default: in the data folder]",
            ),
        ],
        "Taken for vLLM's users": [
            flag("--tensor-parallel-size", "-tp", type=POSITIVE, default=1, help="Only 1 is possible."),
            flag("--enable-lora", is_flag=True, help="Not needed."),
            flag("--max-loras", type=int, help="Not needed."),
            flag("--max-cpu-loras", type=int, help="Not needed."),
        ],
    }


def server_options(
    quantization: str = "auto", pool_memory: int | None = None
) -> Callable[[Command], Command]:
    """Every flag of a server; the arguments are the defaults in which `serve` and `demo` differ."""

    def decorate(command: Command) -> Command:
        flags = [
            click.option(*names, panel=heading, **attributes)
            for heading, flags in panels(quantization, pool_memory).items()
            for names, attributes in flags
        ]
        for option in reversed(flags):  # decorators: the last one applied is shown first
            command = option(command)
        return command

    return decorate


def server_config(
    model: str, flags: dict[str, Any], adapters: dict[str, str], default_roots: tuple[Path, ...]
) -> ServerConfig:
    """The flags as settings; what cannot be served ends the command with status 2 and the reason.

    `adapters` are shipped with the base: registered too, unless a flag or a user gave their name to something else.
    """
    flags = dict(flags)
    if flags.pop("tensor_parallel_size") > 1:
        fail("--tensor-parallel-size: one engine runs on one device; only 1 is possible", USAGE)
    for flag, reason in NOT_NEEDED.items():
        if flags.pop(flag):
            note(f"--{flag.replace('_', '-')} is not needed: {reason}")
    flags["quantization"] = quantization_name(flags["quantization"])
    named = named_adapters(flags["adapters"])
    flags["adapters"] = tuple(named.items())
    flags["shipped_adapters"] = tuple((name, path) for name, path in adapters.items() if name not in named)
    flags["adapter_roots"] = flags["adapter_roots"] or default_roots
    if flags["data_dir"] is None:
        del flags["data_dir"]
    own = ENGINE.keys() - SERVER.keys()  # what both have the server hands on
    engine = EngineConfig(model=model, **{name: flags.pop(name) for name in list(flags) if name in own})
    config = ServerConfig(engine=engine, **flags)
    if problem := config.problem():
        fail(problem, USAGE)
    return config


def named_adapters(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Adapters of the command line by name: every local folder exists, no name comes twice."""
    named: dict[str, str] = {}
    for name, path in pairs:
        if name in named:
            fail(f"--adapter {name}: the name is given twice", USAGE)
        if not path.startswith("hf:") and not Path(os.path.expanduser(path)).is_dir():
            fail(f"--adapter {name}: there is no folder {path}", USAGE)
        named[name] = path
    return named
