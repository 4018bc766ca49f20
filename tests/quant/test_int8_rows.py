"""INT8 as a whole model: what one sequence gets does not depend on the outliers of those beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from heddle.core.model.llama import LlamaModel

from ..model.conftest import Bench, load, save_tiny
from .packers import edit

LOUD = 63
"""A token whose hidden state has 60 in column 0."""
QUIET, NOISY = [5, 9, 2, 44, 17, 30, 11], [LOUD] * 9


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[False, True], ids=["float activations", "int8 activations"])
def model(request: pytest.FixtureRequest, backend: str, tmp_path: Path) -> LlamaModel:
    save_tiny(tmp_path)

    def shout(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][LOUD, 0] = 60.0
        tensors["model.embed_tokens.weight"][:LOUD, 0] = 0.25
        tensors["model.layers.0.input_layernorm.weight"][0] = 4.0

    edit(tmp_path, shout)
    return load(tmp_path, backend, quantization="int8", int8_activations=request.param)


@pytest.mark.parametrize("others", [1, 7])
@pytest.mark.parametrize("chunks", [1, 2])
def test_a_neighbours_outliers_change_nothing(model: LlamaModel, others: int, chunks: int) -> None:
    """Alone or as the last of 2 or 8, in one chunk or two: bit-equal with kernels that keep rows apart."""
    alone = Bench(model).step({"quiet": QUIET})["quiet"]
    bench, found, done = Bench(model, num_blocks=128), [], 0
    for chunk in (QUIET[: len(QUIET) // chunks], QUIET[len(QUIET) // chunks :]):
        if chunk:
            noisy = {f"noisy {i}": NOISY for i in range(others)} if not done else {}
            found.append(bench.step({**noisy, "quiet": chunk})["quiet"])
            done += len(chunk)
    difference = (torch.cat(found) - alone).abs().max()
    assert difference <= (0.0 if model.ops.ROWS_INVARIANT else 1e-5 * alone.abs().max())


def test_the_neighbour_really_has_outliers(model: LlamaModel) -> None:
    """Beyond 6.0, where LLM.int8() splits columns off for the whole batch."""
    table = model.embedding.dequantize()
    for token in (LOUD, QUIET[0]):
        x = model.ops.rms_norm(table[token : token + 1], model.layers[0].input_norm, 1e-6)
        assert (x.abs().max() > 6) == (token == LOUD)
