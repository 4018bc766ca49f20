"""Adapters come, go and change their weights among requests; each answer is the one of its own weights, cold."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from heddle import LLM, SamplingParams
from heddle.core.messages import (
    AdapterUse,
    EvictAdapter,
    Generate,
    KnowAdapter,
    LoadAdapter,
    Outputs,
    Reply,
)
from heddle.core.outputs import CompletionOutput
from safetensors.numpy import load_file, save_file

Start = Callable[..., LLM]
BLOCK = 4096
SCORED = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2)
PROMPT = [(17 * at) % 250 + 2 for at in range(64)]


def answer(llm: LLM, name: str | None, prompt: list[int] = PROMPT) -> tuple[CompletionOutput, int]:
    """And how many tokens of the prompt were found in the cache."""
    (request,) = llm.generate([prompt], SCORED, adapter=name)
    return request.outputs[0], request.cached_tokens


@pytest.fixture(scope="module")
def cold(start: Start) -> Callable[[str | None], CompletionOutput]:
    """The answer to the prompt on these weights, with nothing cached."""
    plain = start(enable_prefix_caching=False)
    answers = {name: answer(plain, name)[0] for name in (None, *plain.adapters)}
    return answers.__getitem__


def test_a_name_s_new_weights_find_nothing_that_the_old_ones_left_in_the_prefix_cache(
    start: Start, adapters: dict[str, Path], cold: Callable[[str | None], CompletionOutput]
) -> None:
    llm = start(adapters={"x": adapters["r4"]})
    assert [answer(llm, "x") for _ in range(3)] == [(cold("r4"), found) for found in (0, 63, 63)]
    llm.load_adapter("x", adapters["r5"])
    assert [answer(llm, "x") for _ in range(2)] == [(cold("r5"), found) for found in (0, 63)]


def test_one_prompt_hits_only_within_its_own_weights(
    start: Start, cold: Callable[[str | None], CompletionOutput]
) -> None:
    llm = start()
    for found in (0, 63):
        for name in (None, "r4", "r5"):
            assert answer(llm, name) == (cold(name), found)
    assert answer(llm, None) == (cold(None), 63)


@pytest.mark.parametrize(("first", "second"), [("r64", "r1"), ("r5", "r4"), ("r1", "r5")])
def test_a_name_that_is_removed_and_given_to_others_shows_nothing_of_the_first(
    start: Start,
    adapters: dict[str, Path],
    cold: Callable[[str | None], CompletionOutput],
    first: str,
    second: str,
) -> None:
    """Also where the first had seven modules and the second has one: those it lacks are zero again."""
    llm = start(adapters={"x": adapters[first]})
    assert answer(llm, "x") == (cold(first), 0)
    slot = llm._engine._residency.slots([llm.adapters["x"]])
    llm.remove_adapter("x")
    assert llm._engine._blocks.counts()["adapters"] == 0
    llm.load_adapter("x", adapters[second])
    assert answer(llm, "x") == (cold(second), 0)
    assert llm._engine._residency.slots([llm.adapters["x"]]) == slot, "in the very place of the first"


def test_base_rows_are_the_base_s_to_the_bit_whoever_shares_the_step(
    start: Start, cold: Callable[[str | None], CompletionOutput]
) -> None:
    """Mixes of base and adapters in changing order, joining and leaving; then the base alone."""
    llm = start(enable_prefix_caching=False, max_num_seqs=3)
    names = [None, "r64", None, "r5", None, "r1", "r64", None, "r4", None, "r16", None]
    for turn in range(3):
        order = names[turn:] + names[:turn]
        mixed = llm.generate([PROMPT] * len(order), SCORED, adapter=order)
        assert [one.outputs[0] for one in mixed] == [cold(name) for name in order]
    assert answer(llm, None)[0] == cold(None)


def test_files_that_change_or_vanish_after_the_load_change_no_answer(
    start: Start,
    adapters: dict[str, Path],
    cold: Callable[[str | None], CompletionOutput],
    tmp_path: Path,
) -> None:
    """Over evictions to host and disk as well."""
    source = tmp_path / "r5"
    shutil.copytree(adapters["r5"], source)
    llm = start(adapters={"x": source}, enable_prefix_caching=False)
    assert answer(llm, "x")[0] == cold("r5")
    shutil.copy(adapters["r4"] / "adapter_model.safetensors", source)
    assert answer(llm, "x")[0] == cold("r5")
    shutil.rmtree(source)
    for to in ("host", "disk"):
        assert answer(llm, "x")[0] == cold("r5")
        llm._engine.handle(EvictAdapter(1, llm.adapters["x"], to))  # type: ignore[arg-type]
        assert answer(llm, "x")[0] == cold("r5")


def test_no_step_reads_an_adapter_s_file(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even for one that was registered in place of another."""
    llm = start()
    answer(llm, "r5")

    def refuse(*_: object) -> None:
        raise AssertionError("a file was read")

    for reader in ("measure", "load_host"):
        monkeypatch.setattr(llm._engine._memory, reader, refuse)
    for _ in range(3):
        answer(llm, "r5")


def many(folder: Path, source: Path, count: int) -> Iterator[Path]:
    """So many adapters, each with weights of its own: the source's, scaled."""
    tensors = load_file(source / "adapter_model.safetensors")
    for index in range(count):
        path = folder / str(index)
        path.mkdir()
        shutil.copy(source / "adapter_config.json", path)
        scaled = {name: (tensor * (1 + index / 64)).astype(np.float32) for name, tensor in tensors.items()}
        save_file(scaled, path / "adapter_model.safetensors")
        yield path


def test_fifty_loads_while_eight_streams_run_cost_none_of_them_a_step(
    start: Start, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """Every step goes on with every stream; adapters come in beside them, and go when others need the room."""
    llm = start(pool_memory=160 * BLOCK)
    engine, names = llm._engine, ["r1", "r4", None, "r5"]
    prompts = [[(7 * at + index) % 250 + 2 for at in range(5)] for index in range(8)]
    params = SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True, seed=0)
    chosen = [names[index % 4] for index in range(8)]
    want = [one.outputs[0].token_ids for one in llm.generate(prompts, params, adapter=chosen)]
    digests = []
    for index, path in enumerate(many(tmp_path, adapters["r16"], 50)):
        llm.load_adapter(f"other {index}", path)
        digests.append(llm.adapters[f"other {index}"])
    tokens: dict[int, list[int]] = {}
    for key, (prompt, name) in enumerate(zip(prompts, chosen), 10**6):
        uses = [] if name is None else [AdapterUse(llm.adapters[name])]
        engine.handle(Generate(key=key, group=key, prompt_token_ids=prompt, params=params, adapters=uses))
        tokens[key] = []
    replies, asked, before = 0, list(digests), engine._scheduler.stats()["adapter_loads"]
    for step in range(10_000):
        events = engine.step()
        outputs = [output for event in events if isinstance(event, Outputs) for output in event.outputs]
        for output in outputs:
            assert output.error is None
            tokens[output.key] += output.token_ids
        replies += sum(isinstance(event, Reply) and event.error is None for event in events)
        if step > 3 and engine._scheduler._running:
            assert len(outputs) == 8, "a stream did not go on"
            if asked:
                engine.handle(LoadAdapter(1, asked.pop()))
        if not engine.has_work:
            break
    assert replies == 50
    assert engine._scheduler.stats()["adapter_loads"] - before >= 50
    assert list(tokens.values()) == want


def test_adapters_at_work_are_never_overwritten_by_loads_that_find_no_room(
    start: Start, adapters: dict[str, Path]
) -> None:
    """Room for two adapters and their sequences; two others are asked for all the while."""
    want = {}
    quiet = start()
    long = SamplingParams(max_tokens=250, temperature=0.0, ignore_eos=True, seed=0)
    prompts = {"r64": PROMPT[:4], "r16": PROMPT[10:15]}
    for name, prompt in prompts.items():
        want[name] = quiet.generate([prompt], long, adapter=name)[0].outputs[0].token_ids
    blocks = sum(quiet._engine._residency.state(quiet.adapters[name]).blocks for name in prompts)
    llm = start(pool_memory=(blocks + 2 * 16) * BLOCK)
    engine = llm._engine
    tokens: dict[str, list[int]] = {}
    keys = {}
    for key, (name, prompt) in enumerate(prompts.items()):
        tokens[name], keys[key] = [], name
        uses = [AdapterUse(llm.adapters[name])]
        engine.handle(Generate(key=key, group=key, prompt_token_ids=prompt, params=long, adapters=uses))
    step, deadline = 0, time.monotonic() + 120  # steps pass quickly while nothing but loads is under way
    while len(tokens["r64"]) < 250 or len(tokens["r16"]) < 250:
        for event in engine.step():
            for output in event.outputs if isinstance(event, Outputs) else []:
                assert output.error is None
                tokens[keys[output.key]] += output.token_ids
        if engine._scheduler._running:
            engine.handle(LoadAdapter(step, llm.adapters[("r5", "r8")[step % 2]]))
        step += 1
        assert time.monotonic() < deadline
    assert tokens == want
    assert engine._scheduler.stats()["adapter_loads"] > 2, "the others came where there was room"


def test_two_hundred_adapters_come_serve_and_go_without_a_trace(
    start: Start, adapters: dict[str, Path], tmp_path: Path
) -> None:
    llm = start(adapters={}, enable_prefix_caching=False, check_invariants=False)
    engine = llm._engine
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)

    def held() -> tuple[int, int, int, int]:
        stats = engine._residency.stats()
        return (
            engine._blocks.counts()["free"],
            stats["host_copy_bytes"],
            stats["adapter_slots_used"],
            stats["adapter_rows_used"],
        )

    before = held()
    for path in many(tmp_path, adapters["r1"], 200):
        llm.load_adapter("x", path)
        llm.generate([PROMPT[:3]], params, adapter="x")
        llm.remove_adapter("x")
        assert held() == before
    assert engine._residency._adapters == {}


def test_weights_that_are_known_again_are_not_loaded_twice(start: Start, adapters: dict[str, Path]) -> None:
    llm = start(adapters={"a": adapters["r4"]})
    answer(llm, "a")
    engine, digest = llm._engine, llm.adapters["a"]
    loads = engine._scheduler.stats()["adapter_loads"]
    path = engine._residency._adapters[digest].path
    engine.handle(KnowAdapter(digest=digest, path=path))
    llm.load_adapter("b", adapters["r4"])
    answer(llm, "b")
    assert engine._scheduler.stats()["adapter_loads"] == loads
    llm.remove_adapter("a")
    assert answer(llm, "b")[1] == 63
