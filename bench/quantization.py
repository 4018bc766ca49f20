"""What each quantised form costs: perplexity, every linear's output error, and INT8 beside bitsandbytes' forward.

    python bench/quantization.py [--gptq DIR] [--awq DIR] [--also NAME=DIR ...] [--json FILE]

A DIR that does not exist is made: the demo base quantised with groups of 64, as `heddle quantize` does it.
Perplexity is that of `bench/held_text.txt`, which no calibration sees, in windows of 512 tokens, each begun anew, with
the logits of `heddle.LLM`; float is checked against transformers. Output errors are |(W - W') X| (Frobenius) of every
linear, X being its inputs in the float model on calibration text, the same for all forms. A folder given by
`--also` (what AutoGPTQ or AutoAWQ made of the same base and calibration) is set beside Heddle's of the same form.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from heddle import LLM
from heddle.bench import float_model, quantised_weights
from heddle.bench.int8_forward import distances
from heddle.bench.layer_errors import Grams, LayerErrors, input_grams, layer_errors
from heddle.core.checkpoint.demo import demo_base
from heddle.core.quantize.calibration import pieces, read_text
from heddle.core.quantize.driver import quantize
from heddle.core.quantize.settings import Method, QuantizeSettings
from heddle.core.text.tokenizer import Tokenizer

HELD_TEXT = Path(__file__).with_name("held_text.txt")
WINDOW = 512
GROUP_SIZE = 64
SAMPLES, SAMPLE_TOKENS = 32, 256
"""The pieces of the calibration text over which output errors are measured: those that AWQ is made with."""
BOUND = 1.03
"""What a linear's output error may be of the tool's."""
INT8_WINDOWS = 4
"""Of WINDOW tokens, for the comparison with bitsandbytes."""

PARTS = ("perplexity", "layers", "int8")
FLOAT, NEAREST = "float", "rounding to nearest"


class Report:
    """Markdown tables on the way, and the same rows as JSON lines at the end."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        print(f"\n### {title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
        for row in rows:
            print(f"| {' | '.join(row)} |", flush=True)

    def json_lines(self) -> str:
        return "".join(json.dumps(row) + "\n" for row in self.rows)


def windows_of(tokens: Sequence[int]) -> list[list[int]]:
    """Consecutive windows, the last perhaps shorter but of at least two tokens."""
    return [list(tokens[first : first + WINDOW]) for first in range(0, len(tokens) - 1, WINDOW)]


def surprise(logits: torch.Tensor, window: Sequence[int]) -> float:
    """The sum over a window of -log p(token | those before it)."""
    return float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(window[1:]), reduction="sum"))


def perplexity(sums: Sequence[float], windows: Sequence[Sequence[int]]) -> float:
    return math.exp(math.fsum(sums) / sum(len(window) - 1 for window in windows))


def heddle_perplexity(
    folder: Path,
    quantization: str,
    windows: Sequence[list[int]],
    *,
    quantize_head: bool = False,
    int8_activations: bool = False,
) -> float:
    threads = torch.get_num_threads()
    with LLM(
        folder,
        quantization=quantization,
        quantize_head=quantize_head,
        int8_activations=int8_activations,
        pool_memory=1 << 28,
        num_threads=threads,
    ) as llm:
        return perplexity([surprise(llm.logits([window])[0], window) for window in windows], windows)


def transformers_perplexity(folder: Path, windows: Sequence[list[int]]) -> float:
    model = float_model.load(folder)
    return perplexity([surprise(float_model.logits(model, [w]), w) for w in windows], windows)


@contextmanager
def nearest_folder(base: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="heddle-rounded-") as scratch:
        quantised_weights.write_rounded_to_nearest(base, Path(scratch), GROUP_SIZE)
        yield Path(scratch)


def report_perplexity(
    report: Report, base: Path, forms: Mapping[str, Path], windows: list[list[int]]
) -> None:
    plain = heddle_perplexity(base, "none", windows)
    found = {FLOAT: plain, f"{FLOAT}, in transformers": transformers_perplexity(base, windows)}
    found["INT8"] = heddle_perplexity(base, "int8", windows)
    found["INT8, head too"] = heddle_perplexity(base, "int8", windows, quantize_head=True)
    found["INT8, int8 activations"] = heddle_perplexity(base, "int8", windows, int8_activations=True)
    for name, folder in forms.items():
        found[name] = heddle_perplexity(folder, "auto", windows)
    with nearest_folder(base) as folder:
        found[f"{NEAREST}, 4 bit, group {GROUP_SIZE}"] = heddle_perplexity(folder, "none", windows)
    report.rows += [
        {"table": "perplexity", "form": name, "perplexity": value, "relative_to_float": value / plain}
        for name, value in found.items()
    ]
    rows = [(name, f"{value:.3f}", f"{value / plain:.4f}") for name, value in found.items()]
    tokens = sum(len(window) for window in windows)
    report.table(f"Perplexity of {tokens} held-out tokens", ("form", "perplexity", "/ float"), rows)


def report_layers(
    report: Report, base: Path, forms: Mapping[str, Path], also: Mapping[str, Path], grams: Grams
) -> None:
    reference = quantised_weights.load(base, "none")
    models = {"INT8": quantised_weights.load(base, "int8")}
    models |= {name: quantised_weights.load(folder) for name, folder in {**forms, **also}.items()}
    errors, nearest, whole = layer_errors(models, reference, grams, GROUP_SIZE)
    totals = {name: found.total for name, found in errors.items()} | {NEAREST: nearest.total}
    report.rows += [
        {"table": "output error", "form": name, "sum": total, "relative_to_nearest": total / nearest.total}
        for name, total in totals.items()
    ]
    report.table(
        f"Output error, summed over {len(nearest.by_linear)} linears",
        ("form", "of the sum of \\|WX\\|", "of rounding to nearest"),
        [(name, f"{total / whole:.4f}", f"{total / nearest.total:.3f}") for name, total in totals.items()],
    )
    pairs = [
        (own, tool) for tool in also for own in forms if models[own].quantization == models[tool].quantization
    ]
    report_beside_tools(report, [(own, tool, errors[own], errors[tool]) for own, tool in pairs])


def report_beside_tools(report: Report, pairs: Sequence[tuple[str, str, LayerErrors, LayerErrors]]) -> None:
    rows = []
    for own, tool, ours, theirs in pairs:
        ratios = ours.ratios(theirs)
        worst, total = max(ratios, key=lambda linear: ratios[linear]), ours.total / theirs.total
        above = sum(ratio > BOUND for ratio in ratios.values())
        middle = median(ratios.values())
        rows.append(
            (f"{own} / {tool}", f"{total:.4f}", f"{middle:.4f}", f"{ratios[worst]:.4f} ({worst})", str(above))
        )
        report.rows.append(
            {"table": "output error beside tool", "form": own, "tool": tool, "sum": total, "linears": ratios}
        )
    if rows:
        columns = ("", "sum", "median linear", "largest", f"linears above {BOUND}")
        report.table("Output error beside the tools'", columns, rows)


def report_int8(report: Report, base: Path, windows: Sequence[list[int]]) -> None:
    found = distances(base, windows)
    report.rows += [{"table": "int8", **asdict(row)} for row in found]
    rows = [
        (row.found, row.expected, f"{row.relative:.2e}", f"{row.largest:.2e}", f"{row.same_first:.4f}")
        for row in found
    ]
    tokens = sum(len(window) for window in windows)
    report.table(
        f"INT8: logits of {tokens} held-out tokens",
        ("", "against", "relative error", "largest", "same likeliest token"),
        rows,
    )


def named_folder(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    if not name or not Path(folder).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=DIR")
    return name, Path(folder)


def quantised(base: Path, method: Method, folder: Path, calibration: Path | None) -> Path:
    """`folder`, made from `base` where it is missing."""
    if not folder.exists():
        quantize(
            base, folder, QuantizeSettings(method=method, group_size=GROUP_SIZE, calibration=calibration)
        )
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gptq", type=Path, metavar="DIR")
    parser.add_argument("--awq", type=Path, metavar="DIR")
    parser.add_argument("--also", type=named_folder, action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--calibration", type=Path, help="a text in place of the package's own")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--windows", type=int, help="of the held text, for a quicker look (default: all)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--json", type=Path, help="write the JSON lines there and not to the end of the output"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    base = demo_base()
    tokenizer = Tokenizer.load(base)
    held = windows_of(tokenizer.encode(HELD_TEXT.read_text(encoding="utf-8")))[: options.windows]
    asked: list[tuple[str, Method, Path | None]] = [
        ("GPTQ", "gptq", options.gptq),
        ("AWQ", "awq", options.awq),
    ]
    forms = {
        name: quantised(base, method, folder, options.calibration)
        for name, method, folder in asked
        if folder is not None
    }
    also = dict(options.also)
    report = Report()
    if "perplexity" in options.only:
        report_perplexity(report, base, {**forms, **also}, held)
    if "layers" in options.only:
        samples = pieces(read_text(options.calibration), tokenizer, SAMPLES, SAMPLE_TOKENS)
        report_layers(report, base, forms, also, input_grams(base, samples))
    if "int8" in options.only:
        report_int8(report, base, held[:INT8_WINDOWS])
    if options.json is None:
        print("\n" + report.json_lines(), end="")
    else:
        options.json.write_text(report.json_lines())


if __name__ == "__main__":
    main()
