"""A run as a picture: how latencies are spread, and how they went over time."""

from __future__ import annotations

from pathlib import Path

from .client import Sample
from .run import Run

LINES = {
    "time_to_first_token": "first token",
    "time_per_output_token": "per output token",
    "end_to_end": "end to end",
}


class PlotError(Exception):
    """There can be no picture; the message says why."""


def check_matplotlib() -> None:
    """Raises `PlotError` where the optional package is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PlotError(
            "a plot needs matplotlib; install it with: pip install 'heddle-serve[bench]'"
        ) from None


def plot(run: Run, title: str, path: Path) -> None:
    """Write a PNG: on the left the share of requests that a latency was enough for, on the right every request at
    the moment it was meant to be sent, failed ones marked at the bottom. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    spread, course = figure.subplots(1, 2)
    good = [sample for sample in run.samples if sample.error is None]
    for name, label in LINES.items():
        values = _milliseconds(good, name)
        if values:
            shares = [(index + 1) / len(values) for index in range(len(values))]
            spread.step(values, shares, where="post", label=label)
    for name in ("time_to_first_token", "end_to_end"):
        points = [(s.intended, value * 1000) for s in good if (value := getattr(s, name)) is not None]
        course.plot(*zip(*points), ".", label=LINES[name]) if points else None
    failed = [sample.intended for sample in run.samples if sample.error is not None]
    if failed:
        course.plot(
            failed, [0.02] * len(failed), "rx", transform=course.get_xaxis_transform(), label="failed"
        )
    for axes in (spread, course):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    if good:
        spread.set_xscale("log")
        course.set_yscale("log")
    spread.set(xlabel="milliseconds", ylabel="share of requests", ylim=(0, 1))
    course.set(xlabel="seconds from the start", ylabel="milliseconds")
    figure.suptitle(title)
    figure.savefig(path, format="png", dpi=120)


def _milliseconds(samples: list[Sample], name: str) -> list[float]:
    values = (getattr(sample, name) for sample in samples)
    return sorted(value * 1000 for value in values if value is not None)
