"""The flags that `heddle serve` and `heddle demo` share, and the `ServerConfig` they become."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import rich_click as click

from ...core.config import EngineConfig
from ..config import ServerConfig
from .failure import USAGE, fail, note
from .values import ByteSize, NamedPath

Decorated = TypeVar("Decorated", bound=Callable[..., object])

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


def server_options(
    quantization: str = "auto", pool_memory: int | None = None
) -> Callable[[Decorated], Decorated]:
    """Every flag of a server; the arguments are defaults in which the two commands differ."""

    def plain(*names: str, help: str, **settings: Any) -> Callable[[Decorated], Decorated]:
        """A flag whose default is the setting's own."""
        field = names[-1].removeprefix("--").replace("-", "_") if names[-1].startswith("--") else names[-1]
        default = ENGINE[field] if field in ENGINE else SERVER[field]
        return click.option(*names, default=default, show_default=default is not None, help=help, **settings)

    options = (
        plain("--host", help="Address to listen on."),
        plain("--port", type=click.IntRange(0, 65535), help="0: any free port."),
        plain(
            "--served-model-name", help="The base's name in requests.  [default: its folder's or hub name]"
        ),
        click.option(
            "--quantization",
            "-q",
            type=click.Choice(QUANTIZATIONS),
            default=quantization,
            show_default=True,
            help="Number form of the base's weights (bitsandbytes: int8; auto: as the checkpoint says).",
        ),
        plain("--device", type=click.Choice(DEVICES), help="Where the model runs."),
        plain(
            "--dtype", type=click.Choice(DTYPES), help="auto: float32 on a CPU, the checkpoint's own on CUDA."
        ),
        plain(
            "--max-model-len", type=POSITIVE, help="Tokens of prompt and answer.  [default: the model's own]"
        ),
        plain("--block-size", type=POSITIVE, help="Tokens in one block of the pool."),
        plain(
            "--gpu-memory-utilization", type=click.FloatRange(0, 1, min_open=True), help="CUDA: share to use."
        ),
        click.option(
            "--pool-memory",
            type=ByteSize(),
            default=pool_memory,
            show_default="512MiB" if pool_memory else False,
            help="Bytes for the block pool (KV and adapters), such as 4GiB."
            + (
                ""
                if pool_memory
                else "  [default: CPU: a quarter of what is available, at most 4GiB; CUDA: the rest]"
            ),
        ),
        plain(
            "--swap-space",
            type=click.FloatRange(min=0),
            metavar="GIB",
            help="Host memory for what was swapped out.",
        ),
        plain("--max-num-seqs", type=POSITIVE, help="Sequences in one step."),
        plain("--max-num-batched-tokens", type=POSITIVE, help="Tokens in one step."),
        plain("--max-queued-requests", type=POSITIVE, help="Beyond them a request gets 503."),
        plain(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            "enable_prefix_caching",
            help="Reuse prompts' KV.",
        ),
        click.option(
            *ADAPTER_FLAGS,
            "adapters",
            type=NamedPath(),
            multiple=True,
            metavar="NAME=PATH",
            help="Register this PEFT folder (or hf:org/name) at the start; repeatable.",
        ),
        click.option(
            "--adapter-root",
            "adapter_roots",
            type=click.Path(path_type=Path),
            multiple=True,
            help="Where local sources of POST /adapters may lie; repeatable.  [default: ./adapters]",
        ),
        plain(
            "--max-lora-rank", type=POSITIVE, help="Adapters beyond it are refused; nothing is padded to it."
        ),
        plain("--max-adapter-bytes", type=ByteSize(), help="Larger adapters are refused."),
        plain("--max-body-bytes", type=ByteSize(), help="Larger bodies of all other requests are refused."),
        plain(
            "--request-timeout", type=click.FloatRange(min=0, min_open=True), help="Seconds.  [default: none]"
        ),
        click.option(
            "--data-dir",
            type=click.Path(path_type=Path, file_okay=False),
            help="Where registry and adapters are kept.  [default: ~/.local/share/heddle]",
        ),
        plain("--database", metavar="URL", help="Registry.  [default: SQLite in the data folder]"),
        plain(
            "--blob-store",
            metavar="URL",
            help="Adapters' files, as an fsspec URL.  [default: in the data folder]",
        ),
        click.option(
            "--admin-key",
            "--api-key",
            "admin_key",
            envvar="HEDDLE_ADMIN_KEY",
            show_envvar=True,
            help="Every call but /health and /ready then needs a key.",
        ),
        plain("--allow-anonymous", is_flag=True, help="Serve beyond loopback without a key."),
        plain(
            "--enforce-eager/--no-enforce-eager", "enforce_eager", help="Run without captured CUDA graphs."
        ),
        plain(
            "--batch-invariant/--no-batch-invariant",
            "batch_invariant",
            help="Equal bits whatever shares the batch.  [default: where it is nearly free]",
        ),
        plain(
            "--int8-activations",
            is_flag=True,
            help="INT8 base: activations in 8 bits too. Faster, less exact.",
        ),
        plain("--quantize-head", is_flag=True, help="Quantise the head as well."),
        plain(
            "--kv-cache-dtype", type=click.Choice(["auto", "int8"]), help="Number form of keys and values."
        ),
        plain("--seed", type=int, help="For requests that bring none."),
        plain("--log-level", type=click.Choice(LOG_LEVELS), help="What is logged."),
        click.option("--tensor-parallel-size", "-tp", type=POSITIVE, default=1, help="Only 1 is possible."),
        click.option("--enable-lora", is_flag=True, help="Accepted for vLLM users; not needed."),
        click.option("--max-loras", type=int, help="Accepted for vLLM users; not needed."),
        click.option("--max-cpu-loras", type=int, help="Accepted for vLLM users; not needed."),
    )

    def decorate(command: Decorated) -> Decorated:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def server_config(
    model: str, flags: dict[str, Any], adapters: dict[str, str], default_roots: tuple[Path, ...]
) -> ServerConfig:
    """The flags as settings; what cannot be served ends the command with status 2 and the reason.

    `adapters` are registered too, unless a flag gives their name to something else.
    """
    flags = dict(flags)
    if flags.pop("tensor_parallel_size") > 1:
        fail("--tensor-parallel-size: one engine runs on one device; only 1 is possible", USAGE)
    for flag, reason in NOT_NEEDED.items():
        if flags.pop(flag):
            note(f"--{flag.replace('_', '-')} is not needed: {reason}")
    flags["quantization"] = quantization_name(flags["quantization"])
    flags["adapters"] = tuple((adapters | named_adapters(flags["adapters"])).items())
    flags["adapter_roots"] = flags["adapter_roots"] or default_roots
    if flags["data_dir"] is None:
        del flags["data_dir"]
    engine = EngineConfig(model=model, **{name: flags.pop(name) for name in list(flags) if name in ENGINE})
    config = ServerConfig(engine=engine, **flags)
    if reason := config.problem():
        fail(reason, USAGE)
    return config


def named_adapters(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Adapters of the command line by name: every local folder exists, no name comes twice."""
    named: dict[str, str] = {}
    for name, path in pairs:
        if name in named:
            fail(f"--adapter {name}: the name is given twice", USAGE)
        if not path.startswith("hf:") and not Path(path).expanduser().is_dir():
            fail(f"--adapter {name}: there is no folder {path}", USAGE)
        named[name] = path
    return named
