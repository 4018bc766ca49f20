"""What an engine answers is what transformers and PEFT compute, whoever else is in the batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from heddle import LLM, SamplingParams
from heddle.core.errors import EngineFailure
from heddle.core.outputs import CompletionOutput

Reference = Callable[[str | None], Any]
Start = Callable[..., LLM]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SCORED = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=3)
NAMES = [None, "r1", "r4", "r5", "r8", "r16", "r64"]


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """transformers' own greedy tokens, an end token not stopping it."""
    answer = model.generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return answer[0, len(prompt) :].tolist()


def logits(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0]


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert got.shape == want.shape
    assert ((got - want).abs().max() / want.abs().max()).item() <= tolerance


def answer(llm: LLM, prompt: list[int], params: SamplingParams, adapter: Any = None) -> CompletionOutput:
    return llm.generate([prompt], params, adapter=adapter)[0].outputs[0]


def test_greedy_text_is_transformers(llm: LLM, base: Path, reference: Reference) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    texts = ["hello", "A longer one, with 2 numbers: 1 and 3.", "Grüße, 世界"]
    for text, output in zip(texts, llm.generate(texts, GREEDY)):
        prompt = tokenizer(text).input_ids
        assert output.prompt == text
        assert output.prompt_token_ids == prompt
        want = greedy(reference(None), prompt, 8)
        assert output.outputs[0].token_ids == want
        whole = tokenizer.decode(prompt + want, skip_special_tokens=True)
        assert output.outputs[0].text == whole.removeprefix(text)
        assert output.outputs[0].finish_reason == "length"


def test_a_mixed_batch_gives_every_row_its_own_adapter(
    llm: LLM, reference: Reference, prompts: list[list[int]]
) -> None:
    names = [NAMES[index % len(NAMES)] for index in range(len(prompts))]
    together = llm.generate(prompts, SCORED, adapter=names)
    for prompt, name, output in zip(prompts, names, together):
        assert output.outputs[0].token_ids == greedy(reference(name), prompt, 8), name
        assert answer(llm, prompt, SCORED, name) == output.outputs[0], "alone it is the same, to the bit"
    for prompt, name, got in zip(prompts, names, llm.logits(prompts, names)):
        assert_close(got, logits(reference(name), prompt))
    assert not llm._engine.has_work


def test_adapters_change_the_answer(llm: LLM, prompts: list[list[int]]) -> None:
    """Guards the other tests: with deltas of no effect they would show nothing."""
    for name in NAMES[1:]:
        base, adapted = (llm.logits([prompts[4]], adapter)[0] for adapter in (None, name))
        assert (base - adapted).abs().max() > 0.1


def test_several_weighted_adapters_on_one_row_are_summed(
    llm: LLM, reference: Reference, prompts: list[list[int]]
) -> None:
    weights = {"r4": 0.7, "r64": -0.3, "r5": 1.5}
    merged = transformers.LlamaForCausalLM(reference(None).config).eval()
    merged.load_state_dict(reference(None).state_dict())
    for name, weight in weights.items():
        for path, module in reference(name).base_model.model.named_modules():
            if hasattr(module, "get_delta_weight"):
                with torch.no_grad():
                    merged.get_submodule(path).weight += weight * module.get_delta_weight("default")
    choice = [{"name": name, "weight": weight} for name, weight in weights.items()]
    assert_close(llm.logits([prompts[5]], choice)[0], logits(merged, prompts[5]))
    mixed = llm.generate(prompts[:4], GREEDY, adapter=[choice, None, "r4", choice])
    for prompt, model, output in zip(prompts, (merged, reference(None), reference("r4"), merged), mixed):
        assert output.outputs[0].token_ids == greedy(model, prompt, 8)


def test_one_forward_a_step_whatever_the_mix(start: Start, prompts: list[list[int]], tmp_path: Path) -> None:
    llm = start(step_log=str(tmp_path / "steps.jsonl"), max_num_batched_tokens=100)
    names = [NAMES[index % len(NAMES)] for index in range(len(prompts))]
    llm.generate(prompts, GREEDY, adapter=names)
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert all(step["forwards"] == 1 and step["rows"] <= 100 and step["ms"] > 0 for step in steps)
    assert max(step["sequences"] for step in steps) == len(prompts)
    assert max(step["adapters"] for step in steps) == len(NAMES) - 1
    # Every prompt token and every new token but the last of each answer is computed once.
    assert sum(step["rows"] for step in steps) == sum(map(len, prompts)) + 7 * len(prompts)


@pytest.mark.parametrize("budget", [5, 16])
def test_a_prompt_in_chunks_equals_the_whole(
    start: Start, llm: LLM, prompts: list[list[int]], budget: int
) -> None:
    chunked = start(max_num_batched_tokens=budget)
    for name in (None, "r5"):
        whole = [output.outputs[0] for output in llm.generate(prompts, SCORED, adapter=name)]
        parts = [output.outputs[0] for output in chunked.generate(prompts, SCORED, adapter=name)]
        assert parts == whole


def test_preemption_changes_nothing(start: Start, llm: LLM, prompts: list[list[int]]) -> None:
    """A pool for about two sequences, six of them; greedy and seeded, logprobs on, n 1 and 3, a stop
    string."""
    small = start(pool_memory=12 * 4096, adapters={})
    long = [prompts[index] for index in (9, 10, 14, 15, 7, 6)]
    for params in (
        SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, logprobs=2),
        SamplingParams(max_tokens=60, temperature=1.0, seed=7, logprobs=2, n=3, ignore_eos=True),
        SamplingParams(max_tokens=60, temperature=1.0, seed=7, stop=("q",)),
    ):
        want, got = llm.generate(long, params), small.generate(long, params)
        assert [output.outputs for output in got] == [output.outputs for output in want]
    assert small._engine._scheduler.stats()["preemptions"] > 0
    assert llm._engine._scheduler.stats()["preemptions"] == 0


def test_a_cached_prefix_answers_as_a_cold_one(llm: LLM, prompts: list[list[int]]) -> None:
    prompt = [9, 8, 7, 6] * 8
    for name in (None, "r16"):
        cold, warm = (llm.generate([prompt], SCORED, adapter=name)[0] for _ in range(2))
        assert (cold.cached_tokens, warm.cached_tokens) == (0, 31), "at least one token is always computed"
        assert warm.outputs == cold.outputs


def test_seeds_give_the_same_answer_whatever_the_neighbours(llm: LLM, prompts: list[list[int]]) -> None:
    def params(seed: int) -> SamplingParams:
        return SamplingParams(max_tokens=10, temperature=1.0, top_p=0.9, seed=seed, ignore_eos=True)

    alone = [answer(llm, prompt, params(seed)) for seed, prompt in enumerate(prompts, -1)]
    together = llm.generate(prompts, [params(seed) for seed in range(-1, len(prompts) - 1)])
    assert [output.outputs[0] for output in together] == alone
    assert answer(llm, prompts[3], params(1)) != answer(llm, prompts[3], params(2))


def test_several_answers_have_seeds_of_their_own_and_best_of_keeps_the_likeliest(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=3, n=4, logprobs=0, ignore_eos=True)
    four = llm.generate(["abc"], params)[0].outputs
    assert [output.index for output in four] == [0, 1, 2, 3]
    assert len({tuple(output.token_ids) for output in four}) == 4
    best = SamplingParams(max_tokens=6, temperature=1.0, seed=3, n=2, best_of=4, ignore_eos=True)
    kept = llm.generate(["abc"], best)[0].outputs

    def mean(output: CompletionOutput) -> float:
        assert output.logprobs is not None
        return sum(entry.logprob for entry in output.logprobs) / len(output.logprobs)

    ranked = sorted(four, key=mean, reverse=True)
    assert [output.token_ids for output in kept] == [output.token_ids for output in ranked[:2]]
    assert kept[0].logprobs is None


def test_prompt_logprobs_are_transformers_also_on_a_cached_prefix(
    llm: LLM, reference: Reference, prompts: list[list[int]]
) -> None:
    prompt = prompts[14]
    scores = logits(reference("r8"), prompt).log_softmax(-1)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2)
    for _ in range(2):
        output = llm.generate([prompt], params, adapter="r8")[0]
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for position, entry in enumerate(output.prompt_logprobs[1:]):
            assert entry is not None
            assert entry.logprob == pytest.approx(scores[position, prompt[position + 1]].item(), abs=1e-4)
            want = scores[position].topk(2)
            assert [token for token, _ in entry.top] == want.indices.tolist()


def test_max_tokens_0_scores_the_prompt_alone(llm: LLM, prompts: list[list[int]]) -> None:
    output = llm.generate([prompts[2]], SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(prompts[2])
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [])
    assert output.outputs[0].finish_reason == "length"
    bare = llm.generate([prompts[2]], SamplingParams(max_tokens=0))[0].outputs[0]
    assert (bare.token_ids, bare.finish_reason) == ([], "length")


def test_a_stop_string_ends_the_answer_before_it(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=5, ignore_eos=True)
    whole = llm.generate(["abc"], params)[0].outputs[0]
    stop = whole.text[10:13]
    cut = llm.generate(
        ["abc"], SamplingParams(max_tokens=30, temperature=1.0, seed=5, stop=(stop,), logprobs=0)
    )
    output = cut[0].outputs[0]
    assert output.text == whole.text[: whole.text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.token_ids == whole.token_ids[: len(output.token_ids)]
    assert len(output.token_ids) < 30
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    assert not llm._engine.has_work, "the engine's sequence was aborted"


def test_stop_tokens_are_counted_but_are_no_text(llm: LLM, prompts: list[list[int]]) -> None:
    first = answer(llm, prompts[0], GREEDY)
    stop = first.token_ids[3]
    params = SamplingParams(max_tokens=8, temperature=0.0, stop_token_ids=(stop,), ignore_eos=True)
    output = answer(llm, prompts[0], params)
    assert output.token_ids == first.token_ids[: first.token_ids.index(stop) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert len(output.text) < len(first.text)


def test_chat_goes_through_the_template(llm: LLM, base: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    output = llm.chat(messages, GREEDY)[0]
    assert output.prompt == "<s>user:hi>"
    want = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert output.prompt_token_ids == want
    assert output.outputs == llm.generate([want], GREEDY)[0].outputs
    two = llm.chat([messages, [{"role": "user", "content": "you"}]], GREEDY)
    assert [item.prompt for item in two] == ["<s>user:hi>", "<s>user:you>"]
    assert two[0].outputs == output.outputs


@pytest.mark.parametrize(
    ("prompt", "params", "code", "param"),
    [
        ([1, 258], GREEDY, "invalid_request", "prompt"),
        ([-1], GREEDY, "invalid_request", "prompt"),
        ([5279552648203111001], GREEDY, "invalid_request", "prompt"),
        ([], GREEDY, "invalid_request", "prompt"),
        ([5] * 256, GREEDY, "context_length_exceeded", "prompt"),
        ([5] * 250, GREEDY, "context_length_exceeded", "max_tokens"),
        ("", GREEDY, "invalid_request", "prompt"),
    ],
)
def test_a_bad_prompt_is_refused_and_the_next_one_served(
    llm: LLM, prompt: list[int], params: SamplingParams, code: str, param: str
) -> None:
    with pytest.raises(EngineFailure) as failure:
        llm.generate([[5, 6], prompt, [7]], params)
    assert failure.value.error.code == code
    assert failure.value.error.param == param
    assert isinstance(failure.value, ValueError), "as Python calls what will never do"
    assert not llm._engine.has_work, "its companions are aborted"
    assert len(answer(llm, [5, 6], GREEDY).token_ids) == 8


def test_what_never_fits_the_pool_is_refused_at_once(start: Start, prompts: list[list[int]]) -> None:
    small = start(pool_memory=8 * 4096, adapters={})  # 128 tokens
    for prompt, max_tokens in (([5] * 200, 8), ([5] * 100, 100)):
        with pytest.raises(EngineFailure) as failure:
            answer(small, prompt, SamplingParams(max_tokens=max_tokens))
        assert failure.value.error.code == "capacity_exceeded"
    assert len(answer(small, [5] * 100, SamplingParams(max_tokens=None, ignore_eos=True)).token_ids) == 28


def test_wrong_arguments_are_named(llm: LLM, base: Path) -> None:
    with pytest.raises(ValueError, match="no adapter 'nobody'"):
        llm.generate(["a"], adapter="nobody")
    with pytest.raises(ValueError, match="3 adapters for 2 prompts"):
        llm.generate(["a", "b"], adapter=["r1", None, "r4"])
    with pytest.raises(ValueError, match="temperature"):
        llm.generate(["a"], SamplingParams(temperature=-1.0))
    with pytest.raises(TypeError, match="'tensors'"):
        LLM(base, tensors=4)
    with pytest.raises(ValueError, match="block_size"):
        LLM(base, block_size="16")


def test_vllms_lora_settings_are_noted_and_not_needed(start: Start) -> None:
    with pytest.warns(UserWarning, match="max_loras is not needed"):
        start(max_loras=8, adapters={})
