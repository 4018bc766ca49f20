"""A long list written in pieces is the JSON of the list."""

from __future__ import annotations

import json

import msgspec
import pytest
from heddle.api.http import json_pieces


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 9])
def test_a_list_written_in_pieces_reads_as_the_list(monkeypatch, count):
    monkeypatch.setattr(json_pieces, "AT_ONCE", 3)
    for items in (list(range(count)), [f'"{n}],[' for n in range(count)], [[n] for n in range(count)]):
        assert json.loads(msgspec.json.encode({"a": json_pieces.written(items)})) == {"a": items}
