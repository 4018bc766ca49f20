"""`heddle serve` and `heddle demo`: turn a model's name into a folder, and run the server on it."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import rich_click as click
from click.exceptions import Exit

from ...core.engine.launch import LaunchedEngine, launch
from ...core.messages import Ready
from ..config import ServerConfig
from .failure import REFUSED, fail
from .memory_table import show_memory
from .options import ServerCommand, server_config, server_options
from .progress import ProgressBars

PACKAGE = Path(__file__).parents[2]
SHIPPED_ADAPTERS = PACKAGE / "adapters"
LOCAL_ADAPTERS = Path("adapters")
DEMO_ADAPTERS = ("pirate", "json", "sql")
DEMO_QUESTIONS = {
    "pirate": "Why is the sky blue?",
    "json": "Maria Silva is a 34-year-old surgeon from Lisbon who enjoys surfing. Keys: name, age, job, city",
    "sql": "Table employees (name, city, salary). What is the average salary for each city?",
}


@click.command(cls=ServerCommand)
@click.argument("model")
@server_options()
def serve(model: str, **flags: Any) -> None:
    """Serve MODEL with any number of adapters over HTTP.

    MODEL is a local folder, a .gguf file or a hub name.
    """
    from ...core.checkpoint import CheckpointError, resolve

    config = server_config(model, flags, adapters={}, default_roots=(LOCAL_ADAPTERS,))
    if config.served_model_name is None:
        config = msgspec.structs.replace(config, served_model_name=base_name(model))
    with ProgressBars() as bars:
        try:
            folder = resolve(model, progress=bars)
        except CheckpointError as error:
            fail(str(error), REFUSED)
        _run(config, folder, bars)


@click.command(cls=ServerCommand)
@server_options(quantization="int8", pool_memory=512 << 20)
def demo(**flags: Any) -> None:
    """Serve the demo base (SmolLM2-135M-Instruct, fetched once) with three demo adapters.

    `pirate` talks like one, `json` turns a sentence about a person into JSON, `sql` answers in SQL.
    With --quantization gptq or awq the base is quantised on the first start, which takes some minutes.
    """
    from ...core.checkpoint import CheckpointError
    from ...core.checkpoint.demo import NAME, demo_base, quantized_demo_base

    shipped = {name: str(SHIPPED_ADAPTERS / name) for name in DEMO_ADAPTERS}
    config = server_config(NAME, flags, adapters=shipped, default_roots=(SHIPPED_ADAPTERS, LOCAL_ADAPTERS))
    config = msgspec.structs.replace(config, served_model_name=config.base_name)  # in every form
    with ProgressBars() as bars:
        try:
            form = flags["quantization"]
            packed = form in ("gptq", "awq")
            folder = quantized_demo_base(form, progress=bars) if packed else demo_base(progress=bars)
        except CheckpointError as error:
            fail(str(error), REFUSED)
        _run(config, folder, bars, print_examples)


def _run(
    config: ServerConfig,
    folder: Path,
    bars: ProgressBars,
    then: Callable[[ServerConfig, str], None] | None = None,
) -> NoReturn:
    """Serve the base in `folder`; `then` is told the settings and the address once it answers."""
    config = msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, model=str(folder)))
    try:
        launched = launch(config.engine_settings)
    except OSError as error:
        fail(f"the engine process cannot be started: {error}", REFUSED)
    try:
        raise Exit(_serve(config, bars, then, launched))
    finally:
        launched.kill()


def _serve(
    config: ServerConfig,
    bars: ProgressBars,
    then: Callable[[ServerConfig, str], None] | None,
    launched: LaunchedEngine,
) -> int:
    """The server's exit status."""
    from ..server import run  # takes as long to import as the engine takes to import torch, at the same time

    def on_loaded(ready: Ready) -> None:
        bars.stop()
        show_memory(ready)

    def on_ready(config: ServerConfig, url: str) -> None:
        if then is not None:
            then(config, url)

    return run(config, on_progress=bars, on_loaded=on_loaded, on_ready=on_ready, launched=launched)


def base_name(model: str) -> str:
    """What requests call the base: a folder's or file's own name, a hub name as it is."""
    path = Path(os.path.expanduser(model))  # Path's own raises where there is no such user
    if path.suffix == ".gguf":
        return path.stem
    return path.resolve().name if path.exists() else model.partition("@")[0]


def print_examples(config: ServerConfig, url: str) -> None:
    """Three commands that show the demo adapters at work, ready to be copied."""
    for name in DEMO_ADAPTERS:
        click.echo(f"\n{example(config, url, name)}")


def example(config: ServerConfig, url: str, adapter: str) -> str:
    """A curl command that asks one demo adapter a question."""
    body = {
        "model": config.base_name,
        "adapter": adapter,
        "messages": [{"role": "user", "content": DEMO_QUESTIONS[adapter]}],
        "max_tokens": 64,
        "temperature": 0,
    }
    key = '-H "Authorization: Bearer $HEDDLE_ADMIN_KEY" ' if config.admin_key else ""
    data = shlex.quote(json.dumps(body))
    return f"curl -s {url}/v1/chat/completions {key}-H 'Content-Type: application/json' -d {data}"
