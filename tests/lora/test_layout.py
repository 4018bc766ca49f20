"""Packing, read back by independent code through the tables as the kernels' contract documents them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heddle.lora.base import MODULES
from heddle.lora.canonical import CanonicalAdapter, open_adapter, write
from heddle.lora.errors import AdapterInvalid
from heddle.lora.inspect import inspect
from heddle.lora.layout import AdapterLayout, PoolDtype, pack
from heddle.lora.spec import Delta
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from safetensors.torch import load_file, save_file

from .peft_adapters import SHAPES, AdapterFolder, base_of, lora_layers, make_peft, tiny_llama

TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def read_back(
    layout: AdapterLayout, pages: np.ndarray, dtype: PoolDtype, layer: int, module: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A [rank, in] and B [out, rank] out of packed pages, row by row through the tables."""
    outputs, inputs = SHAPES[MODULES[module]]
    rank, first = int(layout.ranks[layer, module]), int(layout.first_row[layer, module])

    def row(index: int, values: int) -> torch.Tensor:
        start = int(layout.row_offsets[index])
        nbytes = values * TORCH[dtype].itemsize
        assert start % 16 == 0
        assert start + nbytes <= pages.shape[1]
        raw = bytearray(pages[layout.row_blocks[index]].tobytes()[start : start + nbytes])
        return torch.frombuffer(raw, dtype=TORCH[dtype])

    a = torch.stack([row(first + r, inputs) for r in range(rank)])
    b = torch.stack([row(first + rank + r, outputs) for r in range(rank)], dim=1)
    return a, b


def stored(folder: Path, layers: int, path: Path) -> CanonicalAdapter:
    write(inspect(folder, base_of(layers), max_rank=512, max_bytes=1 << 30), folder, path)
    return open_adapter(path)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("file_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("block_bytes", [256, 400, 2048, 1 << 20])
def test_packed_rows_are_pefts_weights_rounded_once(
    dtype: PoolDtype, file_dtype: PoolDtype, block_bytes: int, tmp_path: Path
) -> None:
    config: dict[str, Any] = {
        "r": 5,
        "lora_alpha": 7,
        "target_modules": list(MODULES),
        "rank_pattern": {"layers.0.self_attn.q_proj": 1, "down_proj": 13},
        "exclude_modules": ["layers.1.self_attn.k_proj"],
    }
    make_peft(tiny_llama(2), config).save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file({k: v.to(TORCH[file_dtype]) for k, v in load_file(file).items()}, file)
    expected = lora_layers(PeftModel.from_pretrained(tiny_llama(2), tmp_path))
    with stored(tmp_path, 2, tmp_path / "x") as adapter:
        layout = AdapterLayout.plan(
            adapter.deltas, SHAPES, 2, block_bytes=block_bytes, itemsize=TORCH[dtype].itemsize
        )
        pages = np.full((layout.num_blocks, block_bytes), 0xFF, np.uint8)
        pack(adapter, layout, dtype, pages)
    assert layout.num_rows == 2 * int(layout.ranks.sum())
    adapted = {(d.layer, d.module) for d in adapter.deltas}
    assert len(adapted) == len(expected) == 13
    assert (layout.ranks[1, 1], layout.scales[1, 1]) == (0, 0)
    for path, theirs in expected.items():
        layer, module = int(path.split(".")[2]), MODULES.index(path.split(".")[-1])
        a, b = read_back(layout, pages, dtype, layer, module)
        assert torch.equal(a, theirs.lora_A["default"].weight.detach().to(TORCH[dtype]))
        assert torch.equal(b, theirs.lora_B["default"].weight.detach().to(TORCH[dtype]))
        assert layout.scales[layer, module] == np.float32(theirs.scaling["default"])


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(st.tuples(st.integers(0, 3), st.integers(0, 6)), st.integers(1, 40), min_size=1),
    st.sampled_from([256, 272, 400, 1024, 4096]),
    st.sampled_from([2, 4]),
)
def test_rows_are_in_order_aligned_disjoint_and_never_straddle_a_page(
    ranks: dict[tuple[int, int], int], block_bytes: int, itemsize: int
) -> None:
    deltas = [Delta(layer, module, rank, 1.0) for (layer, module), rank in sorted(ranks.items())]
    layout = AdapterLayout.plan(deltas, SHAPES, 4, block_bytes=block_bytes, itemsize=itemsize)
    row, end = 0, (0, 0)
    for delta in deltas:
        assert layout.first_row[delta.layer, delta.module] == row
        outputs, inputs = SHAPES[MODULES[delta.module]]
        for values in [inputs] * delta.rank + [outputs] * delta.rank:
            place = (int(layout.row_blocks[row]), int(layout.row_offsets[row]))
            assert place >= end
            assert place[1] % 16 == 0
            end = (place[0], place[1] + values * itemsize)
            assert end[1] <= block_bytes
            row += 1
    assert row == layout.num_rows
    assert layout.num_blocks == end[0] + 1


def test_an_adapter_takes_its_own_size_and_no_padding_to_a_largest_rank() -> None:
    deltas = [Delta(layer, 0, 1 if layer else 256, 1.0) for layer in range(12)]
    layout = AdapterLayout.plan(deltas, SHAPES, 12, block_bytes=4096, itemsize=4)
    assert layout.num_blocks == -(-2 * (256 + 11) * 128 // 4096)


def test_a_row_longer_than_a_block_and_a_layer_beyond_the_base_are_refused() -> None:
    with pytest.raises(AdapterInvalid, match="down_proj takes 256 bytes, a block has 240"):
        AdapterLayout.plan([Delta(0, 6, 1, 1.0)], SHAPES, 2, block_bytes=240, itemsize=4)
    with pytest.raises(AdapterInvalid, match=r"layers\.2\.q_proj: the base has layers 0 to 1"):
        AdapterLayout.plan([Delta(2, 0, 1, 1.0)], SHAPES, 2, block_bytes=4096, itemsize=4)


def test_values_beyond_float16_are_refused_where_the_pool_holds_float16(
    qv: AdapterFolder, tmp_path: Path
) -> None:
    name = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
    tensors = qv.tensors
    tensors[name][3, 1] = 1e5
    qv.store(tensors)
    with stored(qv.path, 2, tmp_path / "x") as adapter:
        for dtype, itemsize in (("bfloat16", 2), ("float32", 4), ("float16", 2)):
            layout = AdapterLayout.plan(adapter.deltas, SHAPES, 2, block_bytes=4096, itemsize=itemsize)
            pages = np.zeros((layout.num_blocks, 4096), np.uint8)
            if dtype == "float16":
                with pytest.raises(
                    AdapterInvalid, match=r"layers\.1\.v_proj\.B: 100000 is beyond the range of F16"
                ):
                    pack(adapter, layout, "float16", pages)
            else:
                pack(adapter, layout, dtype, pages)  # type: ignore[arg-type]


def test_an_adapter_of_another_bases_shapes_is_refused_not_written_past_its_rows(
    qv: AdapterFolder, tmp_path: Path
) -> None:
    narrow = SHAPES | {"q_proj": (32, 16)}
    with stored(qv.path, 2, tmp_path / "x") as adapter:
        layout = AdapterLayout.plan(adapter.deltas, narrow, 2, block_bytes=4096, itemsize=4)
        with pytest.raises(
            AdapterInvalid, match=r"q_proj\.A has shape \[2, 32\], the base asks for \[2, 16\]"
        ):
            pack(adapter, layout, "float32", np.zeros((layout.num_blocks, 4096), np.uint8))
