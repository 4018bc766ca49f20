"""`heddle generate`: one completion in this process, without a server."""

from __future__ import annotations

import importlib
from typing import Any

import rich_click as click

from .failure import REFUSED, fail
from .options import DEVICES, DTYPES, ENGINE, QUANTIZATIONS, quantization_name


@click.command()
@click.argument("model")
@click.argument("prompt")
@click.option(
    "--adapter",
    type=click.Path(exists=True, file_okay=False),
    help="A PEFT folder whose delta is added to the base.",
)
@click.option(
    "--chat", is_flag=True, help="Send PROMPT as a user's message through the base's chat template."
)
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option(
    "--temperature", type=click.FloatRange(0, 2), default=0.0, show_default=True, help="0 is greedy."
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--quantization", "-q", type=click.Choice(QUANTIZATIONS), default="auto", show_default=True)
@click.option("--device", type=click.Choice(DEVICES), default=ENGINE["device"], show_default=True)
@click.option("--dtype", type=click.Choice(DTYPES), default=ENGINE["dtype"], show_default=True)
def generate(
    model: str,
    prompt: str,
    adapter: str | None,
    chat: bool,
    max_tokens: int,
    temperature: float,
    quantization: str,
    **settings: Any,
) -> None:
    """Complete PROMPT with MODEL and print the new text.

    MODEL is a local folder, a .gguf file or a hub name.
    """
    # By name: this process serves nothing and may load torch; no other part of the api folder may.
    heddle = importlib.import_module(__name__.partition(".")[0])
    errors = importlib.import_module(f"{heddle.__name__}.core.errors")
    try:
        llm = heddle.LLM(
            model,
            adapters={"adapter": adapter} if adapter else {},
            quantization=quantization_name(quantization),
            **settings,
        )
    except (ValueError, errors.EngineStartError) as error:  # what model, adapter or settings can cause
        fail(str(error), REFUSED)
    params = heddle.SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=settings["seed"])
    name = "adapter" if adapter else None
    with llm:
        try:
            if chat:
                outputs = llm.chat([{"role": "user", "content": prompt}], params, adapter=name)
            else:
                outputs = llm.generate([prompt], params, adapter=name)
        except (ValueError, errors.EngineFailure) as error:
            fail(str(error), REFUSED)
    click.echo(outputs[0].outputs[0].text)
