"""Pattern matching against PEFT's own functions."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from heddle.lora.base import MODULES
from heddle.lora.errors import AdapterInvalid
from heddle.lora.patterns import Matcher
from heddle.lora.peft_config import parse
from heddle.lora.tensor_names import module_path
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists
from peft.utils.other import get_pattern_key

PATHS = [
    module_path(layer, module, bare=bare)
    for bare in (False, True)
    for layer in (0, 1, 11)
    for module in range(len(MODULES))
]
WORDS = [
    "q_proj", "v_proj", "self_attn.q_proj", "mlp", "layers.1.self_attn.q_proj", "model.layers.0.mlp.up_proj",
    "^q_proj", "^model.layers.0.self_attn.q_proj", "base_model.model.model.layers.0.self_attn.q_proj", "proj",
    r".*\.(q|v)_proj", r"layers\.1\..*", r".*layers\.11\..*", r"(q|k)_proj", r"[qk]_proj", "q_proj$", ".*",
    "o.proj",
    r"layers\.(0|1)\.self_attn\.[qv]_proj", r".*_proj", r"(?i)Q_PROJ", r"model\.layers\.\d+\.mlp\.\w+", "",
]  # fmt: skip


def ours(config: dict[str, Any]) -> Any:
    return parse(json.dumps({"peft_type": "LORA", **config}).encode())


def peft_targets(config: dict[str, Any], path: str) -> bool:
    found = check_target_module_exists(LoraConfig(**config), path)
    return bool(found) and not isinstance(found, _ExcludedModule)


@settings(deadline=None, max_examples=100)
@given(st.one_of(st.sampled_from(WORDS), st.lists(st.sampled_from(WORDS), max_size=3)), st.data())
def test_target_and_exclude_modules_match_as_in_peft(targets: str | list[str], data: st.DataObject) -> None:
    config: dict[str, Any] = {"target_modules": targets}
    exclude = data.draw(
        st.one_of(st.none(), st.sampled_from(WORDS), st.lists(st.sampled_from(WORDS), max_size=2))
    )
    if exclude:
        config["exclude_modules"] = exclude
    if isinstance(targets, list) and data.draw(st.booleans()):
        config["layers_to_transform"] = data.draw(
            st.one_of(st.sampled_from([0, 1]), st.lists(st.sampled_from([0, 1, 11]), min_size=1))
        )
        if data.draw(st.booleans()):
            config["layers_pattern"] = data.draw(
                st.one_of(st.sampled_from(["layers", "h", "l.*"]), st.just(["h", "layers"]))
            )
    parsed, matcher = ours(config), Matcher()
    for path in PATHS:
        assert parsed.targets(path, matcher) == peft_targets(config, path), (config, path)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.sampled_from([word for word in WORDS if "?i" not in word]), unique=True, max_size=4))
def test_rank_and_alpha_patterns_match_as_in_peft(keys: list[str]) -> None:
    pattern = {key: number + 1 for number, key in enumerate(keys)}
    parsed, matcher = (
        ours({"r": 99, "rank_pattern": pattern, "lora_alpha": 77, "alpha_pattern": pattern}),
        Matcher(),
    )
    for path in PATHS:
        expected = get_pattern_key(list(pattern), path)
        assert parsed.rank_at(path, matcher)[0] == pattern.get(expected, 99)
        rank = pattern.get(expected, 99)
        assert parsed.scale_at(path, matcher)[0] == pattern.get(expected, 77) / rank


@pytest.mark.parametrize(
    "pattern", ["(?:x{9999}){9999}", "x{9999999}", "((x{50}){50}){50}", "x{,99999}", "x{9,99999}"]
)
@pytest.mark.parametrize("key", ["target_modules", "rank_pattern"])
def test_a_pattern_that_would_be_written_out_without_end_is_refused_at_once(pattern: str, key: str) -> None:
    start = time.monotonic()
    match = Matcher().fullmatch if key == "target_modules" else Matcher().ends_path
    with pytest.raises(AdapterInvalid, match=rf"{key}: .* repeats its parts too often"):
        match(pattern, PATHS[0], key)
    assert time.monotonic() - start < 1


@pytest.mark.parametrize("pattern", [r"(.|.)+[^a-z]", r"((.|.)+)[0-9]"])
def test_a_pattern_that_backtracks_for_ever_is_cut_off(pattern: str) -> None:
    start = time.monotonic()
    with pytest.raises(AdapterInvalid, match=r"target_modules: matching .* takes too long"):
        ours({"target_modules": pattern}).targets("model.layers.11.self_attn.q_proj", Matcher(seconds=0.2))
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "pattern", ["(", "*", r"\q", "(?P<n", "[[:alpha:]]", "(foo){e<=1}", "a" * 3000, "(" * 1500]
)
def test_a_pattern_that_is_not_understood_alike_is_refused_by_key(pattern: str) -> None:
    with pytest.raises(AdapterInvalid, match="rank_pattern"):
        ours({"rank_pattern": {pattern: 4}}).rank_at(PATHS[0], Matcher())
