"""What a refused `name@…` is told of how references are written."""

from __future__ import annotations

from typing import get_args

import pytest
from heddle.api.adapters.references import not_found
from heddle.lora.errors import StoreCode, StoreError


@pytest.mark.parametrize("code", get_args(StoreCode))
@pytest.mark.parametrize("ref", ["a", "a@1", "a@abcdefabcdef", "a@x", "a@", "a@0"])
def test_how_a_reference_is_written_is_told_only_where_it_is_why_there_is_none(
    code: StoreCode, ref: str
) -> None:
    told = not_found(StoreError(code, "no", "model"), ref)
    unwritten = ref in ("a@x", "a@", "a@0")
    assert (told.code, told.param) == (code, "model")
    assert ("behind the @" in told.message) == (unwritten and code == "adapter_not_found")
    assert told.message.startswith("no")
