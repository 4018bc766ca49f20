"""`heddle bench URL`: drive any OpenAI-style server and print what its clients see."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import rich_click as click
from click.exceptions import Exit

from .failure import REFUSED, USAGE, fail, note
from .values import FiniteRange, ServerUrl

if TYPE_CHECKING:
    from ..load_generator.client import Target
    from ..load_generator.plan import Plan
    from ..load_generator.report import Report
    from ..load_generator.run import Run

GOALS = ("ttft", "tpot", "e2e")
BUSY_SHARE = 0.8
"""Of one core: a generator that computes more than this may have been what was measured."""


class Rate(click.ParamType):
    """Requests a second; `inf` for all at once."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            rate = float(value)
        except ValueError:
            rate = math.nan
        if not rate > 0:
            self.fail(f"{value!r} is not a rate: give requests a second, or inf", param, ctx)
        return rate


class Goal(click.ParamType):
    """NAME:MILLISECONDS."""

    name = "name:ms"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, float]:
        if isinstance(value, tuple):
            return value
        name, _, text = str(value).partition(":")
        try:
            limit = float(text)
        except ValueError:
            limit = math.nan
        if name not in GOALS or not (math.isfinite(limit) and limit > 0):
            self.fail(f"{value!r} is not a goal: give ttft:MS, tpot:MS or e2e:MS", param, ctx)
        return name, limit


def _names(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """`a,b` and repeated options alike."""
    return tuple(name for value in values for name in value.split(",") if name)


@click.command()
@click.argument("url", type=ServerUrl())
@click.option("--model", help="The model's name in requests. [default: what the server lists first]")
@click.option(
    "--adapters",
    multiple=True,
    callback=_names,
    help="Adapters' names, most popular first: a,b,c; repeatable.",
)
@click.option(
    "--adapter-field",
    type=click.Choice(["model", "adapter"]),
    default="model",
    show_default=True,
    help="The field of a request that names its adapter; every server knows `model`.",
)
@click.option(
    "--popularity",
    type=click.Choice(["identical", "distinct", "uniform", "zipf"]),
    default="uniform",
    show_default=True,
    help="One adapter for all, each in turn, any of them, or the k-th as often as 1 / k^exponent.",
)
@click.option("--zipf-exponent", type=FiniteRange(min=0), default=1.0, show_default=True, help="Of zipf.")
@click.option(
    "--rate", type=Rate(), help="Open loop: requests a second at Poisson's moments; inf sends all at once."
)
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    help="Closed loop: requests under way. [default: 1, without --rate]",
)
@click.option("--requests", type=click.IntRange(min=1), help="How many. [default: 100, without --duration]")
@click.option("--duration", type=FiniteRange(min=0, min_open=True), help="Send for so many seconds.")
@click.option(
    "--endpoint", type=click.Choice(["completions", "chat"]), default="completions", show_default=True
)
@click.option(
    "--prompt-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Of a prompt, about."
)
@click.option(
    "--output-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="max_tokens."
)
@click.option(
    "--dataset",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="JSONL instead of random words: prompt or messages, and max_tokens, adapter where wanted.",
)
@click.option("--ignore-eos", is_flag=True, help="Have every answer as long as asked (Heddle, vLLM, SGLang).")
@click.option(
    "--stream/--no-stream", default=True, show_default=True, help="Without it no first token is seen."
)
@click.option(
    "--warm-up",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    help="Requests before, not counted.",
)
@click.option(
    "--timeout",
    type=FiniteRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds a request may take.",
)
@click.option(
    "--slo",
    "slo",
    multiple=True,
    type=Goal(),
    help="A goal for the goodput: ttft:MS, tpot:MS, e2e:MS; repeatable.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of arrivals, adapters and prompts.")
@click.option(
    "--key", envvar=["HEDDLE_API_KEY", "HEDDLE_ADMIN_KEY"], show_envvar=True, help="The server's API key."
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    help="Write everything, every request too.",
)
@click.option(
    "--plot",
    "plot_file",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    help="Write a PNG (needs matplotlib).",
)
def bench(url: str, **options: Any) -> None:
    """Send requests to the OpenAI-style server at URL and measure what its clients see.

    In an open loop (--rate) requests go out at their moments however slow the answers are, and latencies count from
    those moments; in a closed one (--concurrency) the next goes out when one has ended. Latencies are of requests
    that succeeded. Status 1 where any failed.
    """
    _check(options)
    raise Exit(asyncio.Runner(loop_factory=_loop_factory()).run(_bench(url, options)))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    import uvloop

    return uvloop.new_event_loop


def _check(options: dict[str, Any]) -> None:
    """What no single option's type can say."""
    if options["rate"] is not None and options["concurrency"] is not None:
        fail("give --rate (an open loop) or --concurrency (a closed one), not both", USAGE)
    if options["rate"] == math.inf and options["requests"] is None:
        fail("--rate inf needs --requests: all are sent at once", USAGE)
    if options["requests"] is None and options["duration"] is None:
        options["requests"] = 100
    if not options["stream"] and any(name in ("ttft", "tpot") for name, _ in options["slo"]):
        fail("--slo ttft and tpot need a stream", USAGE)
    if options["plot_file"] is not None:
        from ..load_generator.plot import PlotError, check_matplotlib

        try:
            check_matplotlib()
        except PlotError as error:
            fail(str(error), REFUSED)


async def _bench(url: str, options: dict[str, Any]) -> int:
    from ..load_generator.report import report
    from ..load_generator.run import measure

    target = await _target(url, options)
    plan = await _plan(target, options)
    settings = {"url": url} | {
        name: str(value) if isinstance(value, Path) or value == math.inf else value
        for name, value in options.items()
        if name != "key"
    }
    with _Progress(plan.requests) as progress:
        run = await measure(plan, target, options["concurrency"], progress.advance)
    made = report(run, dict(options["slo"]))
    _print(made, run, options)
    _write(made, run, settings, options)
    return REFUSED if made.failed or not made.requests else 0


async def _target(url: str, options: dict[str, Any]) -> Target:
    from ..load_generator.client import Refused, Target, first_model

    target = Target(
        url=url,
        model=options["model"],
        key=options["key"],
        **{name: options[name] for name in ("endpoint", "adapter_field", "ignore_eos", "stream", "timeout")},
    )
    if target.model is not None:
        return target
    try:
        model = await first_model(target)
    except Refused as refused:
        if refused.status == 401:
            what = "the server refused this key" if target.key else "the server wants a key: give --key"
            fail(f"{url}: {what}: {refused} ({refused.code})", REFUSED)
        fail(f"{url}: {refused} ({refused.code}); is it an OpenAI-style server? --model names one", REFUSED)
    from msgspec.structs import replace

    return replace(target, model=model)


async def _plan(target: Target, options: dict[str, Any]) -> Plan:
    """Warm up, and lay out what is sent then."""
    from ..load_generator.plan import Plan
    from ..load_generator.run import warm_up
    from ..load_generator.texts import DatasetError, dataset, random_texts

    chat, length = target.endpoint == "chat", options["output_tokens"]
    adapters = options["adapters"]
    texts = None
    if options["dataset"] is not None:
        try:
            texts = dataset(options["dataset"], length, chat)
        except (DatasetError, OSError) as error:
            fail(f"--dataset: {error}", REFUSED)
    count, failed = await warm_up(target, options["warm_up"], length, adapters, chat, options["seed"])
    if failed is not None:
        fail(f"the warm-up failed: {failed.message} ({failed.error})", REFUSED)
    return Plan(
        texts=texts or random_texts(count.words(options["prompt_tokens"]), length, chat),
        adapters=adapters,
        **{
            name: options[name]
            for name in ("popularity", "zipf_exponent", "rate", "requests", "duration", "seed")
        },
    )


class _Progress:
    """A bar on stderr where that is a terminal."""

    def __init__(self, total: int | None) -> None:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress

        console = Console(stderr=True)
        columns = (*Progress.get_default_columns(), MofNCompleteColumn())
        self._bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._bar = self._bars.add_task("requests", total=total)

    def __enter__(self) -> _Progress:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> Literal[False]:
        self._bars.stop()
        return False

    def advance(self, sample: object) -> None:
        self._bars.advance(self._bar)


def _print(made: Report, run: Run, options: dict[str, Any]) -> None:
    from .bench_table import latency_table, summary_table
    from .render import show

    show(summary_table(made))
    show(latency_table(made))
    for code, count in made.errors.items():
        message = next(sample.message for sample in run.samples if sample.error == code)
        click.echo(f"failed: {count} x {code}: {message}", err=True)
    if made.generator.cpu_share > BUSY_SHARE:
        note(
            f"the generator itself kept {made.generator.cpu_share:.0%} of a core busy: it may be what was measured"
        )
    asked = options["prompt_tokens"]
    mean = made.prompt_tokens / max(1, made.succeeded)
    if options["dataset"] is None and made.prompt_tokens and abs(mean - asked) > 0.1 * asked:
        note(f"prompts had {mean:.0f} tokens on average where {asked} were asked for")


def _write(made: Report, run: Run, settings: dict[str, Any], options: dict[str, Any]) -> None:
    from ..load_generator.plot import plot
    from ..load_generator.report import as_data

    try:
        if options["json_file"] is not None:
            options["json_file"].write_text(json.dumps(as_data(made, run, settings)) + "\n")
        if options["plot_file"] is not None:
            plot(run, f"{settings['url']}: {made.requests} requests", options["plot_file"])
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}", REFUSED)
