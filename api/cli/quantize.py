"""`heddle quantize`: a float model turned into INT8, GPTQ or AWQ files, on this machine."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from .failure import REFUSED, USAGE, fail
from .progress import ProgressBars
from .render import size
from .values import FiniteRange

if TYPE_CHECKING:
    from ...core.quantize.settings import QuantizeSettings


@click.command()
@click.argument("model")
@click.option(
    "--method",
    type=click.Choice(["int8", "gptq", "awq"]),
    required=True,
    help="int8: LLM.int8()'s rows, as bitsandbytes; gptq, awq: 4 bit in groups, measured on a text.",
)
@click.option(
    "--output", "-o", type=click.Path(path_type=Path), required=True, help="A folder that is not there yet."
)
@click.option("--bits", type=int, help="gptq: 4 or 8. [default: 8 for int8, else 4]")
@click.option(
    "--group-size",
    type=int,
    help="Weights of a row that share a scale; -1: all. [default: the first of 128, 64, 32 that fits]",
)
@click.option(
    "--desc-act/--no-desc-act",
    default=None,
    help="gptq: begin with the inputs that are largest (act-order): more exact. [default: --desc-act]",
)
@click.option(
    "--sym/--no-sym", default=True, show_default=True, help="gptq: zero in the middle of each range."
)
@click.option(
    "--damp",
    type=FiniteRange(0, 1, min_open=True, max_open=True),
    default=0.01,
    show_default=True,
    help="gptq: added to the diagonal of what is inverted, as a share of its mean.",
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A text like that which will be served. [default: the package's own]",
)
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    help="Pieces of it, at most. [default: 128 for gptq, 32 for awq]",
)
@click.option(
    "--sample-tokens",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Tokens in a piece.",
)
def quantize(model: str, method: str, output: Path, **flags: Any) -> None:
    """Quantise MODEL, a float model, into the folder OUTPUT.

    MODEL is a local folder, a .gguf file or a hub name. What is written is served by `heddle serve OUTPUT`, and
    loaded by AutoGPTQ, AutoAWQ or transformers with bitsandbytes, and by vLLM.
    """
    from ...core.checkpoint import CheckpointError, resolve
    from ...core.model.config import ModelError
    from ...core.quantize.settings import QuantizeSettings

    settings = QuantizeSettings(method=method, **flags)  # type: ignore[arg-type]
    if (contradiction := _contradiction(settings)) is not None:
        fail(contradiction, USAGE)
    with ProgressBars() as bars:
        try:
            folder = resolve(model, progress=bars)
        except CheckpointError as error:
            fail(str(error), REFUSED)
        # By name: this process serves nothing and may load torch; no other part of the api folder may.
        driver = importlib.import_module(f"{__name__.partition('.')[0]}.core.quantize.driver")
        try:
            driver.quantize(folder, output, settings, bars)
        except (ModelError, CheckpointError) as error:
            fail(str(error), REFUSED)
    click.echo(f"{output}: {size(_weights(output))}, from {size(_weights(folder))}")


def _contradiction(settings: QuantizeSettings) -> str | None:
    """What no model could be quantised by; None: nothing."""
    from ...core.quantize.settings import BITS, MULTIPLE

    method, bits, group_size = settings.method, settings.bits, settings.group_size
    if bits is not None and bits not in BITS[method]:
        return f"--bits {bits}: {method} has {' or '.join(map(str, BITS[method]))}"
    grouped = group_size is not None and group_size != -1
    if group_size is not None and grouped and (group_size < MULTIPLE or group_size % MULTIPLE):
        return f"--group-size {group_size}: give -1 or a multiple of {MULTIPLE}"
    foreign: dict[str, dict[str, object]] = {
        "int8": {
            "--group-size": grouped,
            "--desc-act": settings.desc_act,
            "--no-sym": not settings.sym,
            "--calibration": settings.calibration,
            "--samples": settings.samples,
        },
        "gptq": {},
        "awq": {"--desc-act": settings.desc_act, "--no-sym": not settings.sym},
    }
    return next(
        (f"--method {method} takes no {flag}" for flag, given in foreign[method].items() if given), None
    )


def _weights(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
