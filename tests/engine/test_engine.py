"""The engine's commands and steps: memory that is really paged, adapters that move, faults kept where they
are."""

from __future__ import annotations

import gc
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from heddle import LLM, SamplingParams
from heddle.core.engine.engine import Engine
from heddle.core.messages import (
    Abort,
    AdapterState,
    AdapterUse,
    Command,
    Event,
    EvictAdapter,
    Generate,
    GetMemory,
    LoadAdapter,
    Outputs,
    PinAdapter,
    Reply,
    SequenceOutput,
)

Reference = Callable[[str | None], Any]
Start = Callable[..., LLM]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, seed=0, ignore_eos=True)


def generate(key: int, prompt: list[int], *digests: str, params: SamplingParams = GREEDY) -> Generate:
    uses = [AdapterUse(digest) for digest in digests]
    return Generate(key=key, group=key, prompt_token_ids=prompt, params=params, adapters=uses)


def run(engine: Engine, *commands: Command) -> dict[int, list[SequenceOutput]]:
    """Handle the commands, step until nothing is left to do; every sequence's outputs by key."""
    outputs: dict[int, list[SequenceOutput]] = defaultdict(list)
    for event in settle(engine, *commands):
        if isinstance(event, Outputs):
            for output in event.outputs:
                outputs[output.key].append(output)
    return outputs


def settle(engine: Engine, *commands: Command) -> list[Event]:
    events = [event for command in commands for event in engine.handle(command)]
    for _ in range(100_000):
        events += engine.step()
        if engine.idle and not engine.has_work and not engine._residency.loading:
            return events
    raise AssertionError("the engine does not come to rest")


def call(engine: Engine, command: Any) -> Reply:
    replies = [event for event in settle(engine, command) if isinstance(event, Reply)]
    assert [reply.call for reply in replies] == [command.call]
    return replies[0]


def tokens(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def counts(engine: Engine) -> dict[str, int]:
    return engine._blocks.counts()


def logits(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0]


# ------------------------------------------------------------------ paging is real


def test_an_adapter_is_read_from_its_blocks_alone(
    start: Start, reference: Reference, prompts: list[list[int]]
) -> None:
    """Overwriting the host copy changes nothing; zeroed blocks leave the base's answer; a reload brings it
    back."""
    llm = start(enable_prefix_caching=False)
    digest, prompt = llm.adapters["r64"], prompts[4]
    residency = llm._engine._residency

    def error(adapter: str | None) -> float:
        return (llm.logits([prompt], "r64")[0] - logits(reference(adapter), prompt)).abs().max().item()

    assert error("r64") < 1e-4
    host = residency._copies.get(digest)
    assert host is not None
    host.pages.fill_(0x55)  # type: ignore[attr-defined]
    assert error("r64") < 1e-4
    place = residency._adapters[digest].place
    assert place is not None
    assert len(place.blocks) == -(-host.nbytes // 4096)
    llm._engine._pool.pages()[list(place.blocks)] = 0
    assert error("r64") > 0.1
    assert error(None) < 1e-4
    assert call(llm._engine, EvictAdapter(1, digest, "disk")).error is None
    assert error("r64") < 1e-4


def test_a_sequence_is_read_from_its_blocks_alone(start: Start, prompts: list[list[int]]) -> None:
    engine = start(adapters={}, enable_prefix_caching=False)._engine
    params = SamplingParams(max_tokens=40, temperature=0.0, seed=0, ignore_eos=True, logprobs=0)
    want = run(engine, generate(1, prompts[10], params=params))[1]
    engine.handle(generate(2, prompts[10], params=params))
    for _ in range(5):
        engine.step()
    (sequence,) = engine._scheduler._running
    engine._pool.pages()[sequence.block_table[0]] = 0
    got = run(engine)[2]
    assert [output.logprobs for output in got] != [output.logprobs for output in want[5:]]


def test_no_kv_and_no_adapter_is_copied_out_of_the_pool(start: Start) -> None:
    """New tensors of a decode step, all together, are smaller than one layer of the context or of the
    adapter."""
    llm = start(enforce_eager=True)
    engine, digest = llm._engine, llm.adapters["r64"]
    assert call(engine, LoadAdapter(1, digest)).error is None
    layer_of_context = 200 * 2 * 2 * 8 * 4
    largest = 0

    def storages() -> dict[int, int]:
        tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}

    class Spy:
        """Looks around in the middle of every layer."""

        def __init__(self, ops: Any) -> None:
            self.ops = ops

        def __getattr__(self, name: str) -> Any:
            function = getattr(self.ops, name)

            def spied(*arguments: Any) -> Any:
                result = function(*arguments)
                nonlocal largest
                largest = max(largest, sum(n for where, n in storages().items() if where not in known))
                return result

            return spied if name in ("paged_attention", "silu_mul") else function

    engine.handle(generate(2, [7] * 200, digest))
    for _ in range(2):
        engine.step()
    known = storages()
    engine._model.ops = Spy(engine._model.ops)
    gc.freeze()  # leaves what exists by now out of get_objects
    engine.step()
    gc.unfreeze()
    assert 0 < largest < layer_of_context
    assert len(tokens(run(engine)[2])) == 8 - 3


# ------------------------------------------------------------------ nothing is lost


def test_300_requests_with_random_aborts_leave_nothing_behind(start: Start) -> None:
    llm = start(pool_memory=96 * 4096)  # not all adapters fit at once, nor all sequences
    engine, chance = llm._engine, random.Random(11)
    digests = [llm.adapters[name] for name in ("r1", "r4", "r5", "r8", "r16")]
    live: set[int] = set()
    ends: dict[int, int] = defaultdict(int)
    aborted: set[int] = set()

    def take(events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Outputs):
                for output in event.outputs:
                    assert output.key not in aborted, "an aborted sequence has no further output"
                    if output.finish_reason is not None:
                        assert output.finish_reason == "length", output
                        ends[output.key] += 1
                        live.discard(output.key)

    for key in range(300):
        prompt = [chance.randrange(2, 258) for _ in range(chance.randrange(1, 90))]
        params = SamplingParams(max_tokens=chance.randrange(1, 30), seed=key, ignore_eos=True)
        chosen = chance.sample(digests, chance.choice([0, 1, 1, 1, 2]))
        live.add(key)
        take(engine.handle(generate(key, prompt, *chosen, params=params)))
        for _ in range(chance.randrange(3)):
            take(engine.step())
        if live and chance.random() < 0.5:
            victim = chance.choice(sorted(live))
            live.discard(victim)
            aborted.add(victim)
            take(engine.handle(Abort([victim, 10_000])))
    take(settle(engine))
    assert not live
    assert len(aborted) > 100
    assert sorted([*aborted, *ends]) == list(range(300))
    assert set(ends.values()) == {1}
    assert counts(engine)["used"] == 0
    assert sum(counts(engine).values()) == engine._pool.num_blocks
    assert all(engine._residency.state(digest).in_use == 0 for digest in digests)
    engine._scheduler.check_integrity()


def test_a_failing_step_ends_its_own_sequences_alone(
    start: Start, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(adapters={})._engine
    forward = engine._model.forward

    def fails_once(*arguments: Any) -> torch.Tensor:
        monkeypatch.setattr(engine._model, "forward", forward)
        raise RuntimeError("planted")

    engine.handle(generate(1, prompts[3]))
    engine.step()
    monkeypatch.setattr(engine._model, "forward", fails_once)
    (output,) = run(engine)[1]
    assert output.finish_reason == "error"
    assert output.error is not None
    assert output.error.code == "internal_error"
    assert "planted" not in output.error.message, "the reason is for the log"
    assert counts(engine)["used"] == 0
    assert len(tokens(run(engine, generate(2, prompts[3]))[2])) == 8


def test_a_row_without_finite_logits_ends_alone(
    start: Start, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(adapters={}, enable_prefix_caching=False)._engine
    commands = [generate(key, prompts[key]) for key in (1, 2, 3)]
    want = run(engine, *commands)
    compute = engine._model.logits
    calls = 0

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        found = compute(hidden)
        if calls == 3:
            found[1] = torch.nan
        return found

    monkeypatch.setattr(engine._model, "logits", broken)
    got = run(engine, *commands)
    assert got[1] == want[1]
    assert got[3] == want[3]
    assert tokens(got[2]) == tokens(want[2])[:2]
    assert got[2][-1].finish_reason == "error"
    assert got[2][-1].error is not None


# ------------------------------------------------------------------ adapters move


def state(events: list[Event], digest: str) -> AdapterState:
    states = [
        s for event in events if isinstance(event, Outputs) for s in event.adapters if s.digest == digest
    ]
    return states[-1]


def test_load_evict_and_answer_again(start: Start, prompts: list[list[int]]) -> None:
    llm = start()
    engine, digest = llm._engine, llm.adapters["r5"]
    events = settle(engine, LoadAdapter(1, digest))
    assert state(events, digest).residency == "device"
    assert state(events, digest).blocks == counts(engine)["adapters"] > 0
    assert isinstance(events[-1], Reply), "who waits for the load finds the state already told"
    first = tokens(run(engine, generate(2, prompts[0], digest))[2])
    for call_id, (to, residency) in enumerate([("host", "host"), ("disk", "disk")], 3):
        events = settle(engine, EvictAdapter(call_id, digest, to))  # type: ignore[arg-type]
        assert state(events, digest).residency == residency
        assert counts(engine)["adapters"] == 0
        assert tokens(run(engine, generate(10 + call_id, prompts[0], digest))[10 + call_id]) == first


def test_an_adapter_in_use_is_not_evicted(start: Start, prompts: list[list[int]]) -> None:
    llm = start()
    engine, digest = llm._engine, llm.adapters["r4"]
    engine.handle(generate(1, prompts[0], digest))
    reply = next(event for event in engine.handle(EvictAdapter(2, digest)) if isinstance(event, Reply))
    assert reply.error is not None
    assert reply.error.code == "adapter_in_use"
    run(engine)
    assert call(engine, EvictAdapter(3, digest)).error is None


def test_pins_may_hold_half_of_the_pool(start: Start, adapters: dict[str, Path]) -> None:
    llm = start(pool_memory=60 * 4096, adapters={name: adapters[name] for name in ("r4", "r64")})
    assert call(llm._engine, PinAdapter(1, llm.adapters["r4"], True)).error is None
    refused = call(llm._engine, PinAdapter(2, llm.adapters["r64"], True)).error
    assert refused is not None
    assert refused.code == "pin_limit"


@pytest.mark.parametrize("command", [LoadAdapter(1, "sha256:no"), EvictAdapter(1, "sha256:no")])
def test_an_unknown_adapter_is_answered(llm: LLM, command: Command) -> None:
    reply = call(llm._engine, command)
    assert reply.error is not None
    assert reply.error.code == "adapter_not_found"
    (output,) = run(llm._engine, generate(10**6, [5], "sha256:no"))[10**6]
    assert output.error is not None
    assert output.error.code == "model_not_found"


def test_a_damaged_file_fails_its_own_requests_alone(start: Start, prompts: list[list[int]]) -> None:
    llm = start()
    engine, digest = llm._engine, llm.adapters["r16"]
    path = Path(engine._residency._adapters[digest].path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    outputs = run(engine, generate(1, prompts[0], digest), generate(2, prompts[0]))
    assert outputs[1][-1].error is not None
    assert outputs[1][-1].error.code == "adapter_failed"
    assert len(tokens(outputs[2])) == 8


def test_a_name_gets_other_weights_and_goes(
    start: Start, adapters: dict[str, Path], prompts: list[list[int]], tmp_path: Path
) -> None:
    llm = start(adapters={"a": adapters["r4"]})
    other = start()
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)

    def answer(llm: LLM, name: str) -> list[int]:
        return llm.generate([prompts[4]], params, adapter=name)[0].outputs[0].token_ids

    assert answer(llm, "a") == answer(other, "r4")
    spec = llm.load_adapter("a", adapters["r5"])
    assert spec.matched == spec.total == 2 * 7 * 2
    assert answer(llm, "a") == answer(other, "r5")
    llm.load_adapter("b", adapters["r5"])
    assert llm.adapters["a"] == llm.adapters["b"], "equal weights are one adapter"
    llm.remove_adapter("a")
    assert answer(llm, "b") == answer(other, "r5")
    llm.remove_adapter("b")
    assert counts(llm._engine)["adapters"] == 0
    with pytest.raises(ValueError, match="no adapter 'b'"):
        answer(llm, "b")
    with pytest.raises(KeyError):
        llm.remove_adapter("b")


def test_memory_says_where_the_bytes_are(llm: LLM, adapters: dict[str, Path], reference: Reference) -> None:
    llm.load_adapter("m", adapters["r4"])
    llm.generate([[1, 2, 3] * 8], GREEDY, adapter="m")
    before = call(llm._engine, GetMemory(5)).memory
    assert before is not None
    assert before.pool_bytes == 512 * 4096
    assert {part.part: part.bytes for part in before.pool}["adapters"] > 0
    assert {part.part: part.bytes for part in before.pool}["KV cached"] > 0
    assert {part.part: part.bytes for part in before.host}["adapter copies"] > 0
    call(llm._engine, PinAdapter(6, llm.adapters["m"], True))
    report = call(llm._engine, GetMemory(7)).memory
    assert report is not None
    pool = {part.part: part.bytes for part in report.pool}
    assert pool["pinned adapters"] > 0
    adapters_before = {part.part: part.bytes for part in before.pool}["adapters"]
    assert pool["adapters"] + pool["pinned adapters"] == adapters_before, (
        "the pin moves one from here to there"
    )
    for parts, everything in (
        (report.pool, report.pool_bytes), (report.weights, report.weight_bytes), (report.process, report.process_bytes)
    ):  # fmt: skip
        assert sum(part.bytes for part in parts) == everything
    parameters = {
        name: parameter[0].nbytes * (-(-len(parameter) // 8) * 8 if parameter.dim() == 2 else len(parameter))
        for name, parameter in reference(None).named_parameters()
    }  # out-features are filled up to a multiple of 8
    weights = {part.part: part.bytes for part in report.weights}
    assert weights["projections"] == sum(size for name, size in parameters.items() if "_proj" in name)
    assert weights["norms"] == sum(size for name, size in parameters.items() if "norm" in name)
    assert sum(weights.values()) - weights["rotary tables"] == sum(parameters.values())
    llm.remove_adapter("m")
