"""Whatever is sent, the answer is OpenAI's shape and never a 500."""

from __future__ import annotations

import json
import time

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .malformed import malformed
from .peft_reference import reference, text_of
from .server_process import PROMPT, Process, served

FIELDS = [
    *(
        "model",
        "adapter",
        "prompt",
        "messages",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "temperature",
    ),
    *(
        "top_p",
        "top_k",
        "min_p",
        "n",
        "best_of",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "logit_bias",
    ),
    *(
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logprobs",
        "top_logprobs",
        "echo",
        "stream",
    ),
    *(
        "stream_options",
        "response_format",
        "tools",
        "on_cold",
        "suffix",
        "add_special_tokens",
        "name",
        "source",
    ),
    *("chat_template_kwargs", "tokens", "pinned", "to", "version", "description", "lora_name", "lora_path"),
]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(["a", "a@1", "b", "tiny", "user", "hi", "wait"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.one_of(
                st.sampled_from(["name", "weight", "role", "content", "type", "text", "1"]),
                st.text(max_size=3),
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=8,
)
LIKELY = {
    "prompt": st.one_of(st.just("hi"), VALUES),
    "messages": st.one_of(st.just([{"role": "user", "content": "hi"}]), VALUES),
}
BODIES = st.one_of(
    st.fixed_dictionaries(LIKELY, optional={name: VALUES for name in FIELDS if name not in LIKELY}),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6),
    VALUES,
)
PATHS = st.sampled_from(
    [
        *("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/adapters?dry_run=true"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters/nope/evict"),
    ]
)
QUIET = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def check(answer) -> None:
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n")


@QUIET
@given(path=PATHS, body=BODIES)
def test_random_bodies(server, path, body):
    server.engine.longest = 8
    check(server.client.post(path, content=json.dumps(body)))


@QUIET
@given(path=PATHS, body=st.binary(max_size=64))
def test_random_bytes(server, path, body):
    check(server.client.post(path, content=body))


@QUIET
@given(
    method=st.sampled_from(["GET", "POST", "PATCH", "DELETE", "HEAD", "OPTIONS"]),
    name=st.text(min_size=1, max_size=12),
    rest=st.sampled_from(["", "/load", "/evict", "/versions", "/x"]),
)
def test_random_names(server, method, name, rest):
    from urllib.parse import quote

    answer = server.client.request(method, f"/adapters/zz{quote(name, safe='')}{rest}")
    assert answer.status_code in (204, 400, 404, 405), answer.text


BODIES_SENT = 1500
"""Of the 10,000 that `--long` sends."""
MIB = 2**20


def resident(process: Process) -> tuple[int, int]:
    """Bytes of the API process and of the engine."""
    pids = process.popen.pid, process.engine_pid()
    return tuple(psutil.Process(pid).memory_info().rss for pid in pids)  # type: ignore[return-value]


@pytest.mark.timeout(1800)
def test_malformed_bodies_get_a_refusal_each_and_cost_no_memory(world, tmp_path, long):
    """And the engine still says what transformers and PEFT say."""
    count = 10_000 if long else BODIES_SENT
    answers = {name: text_of(reference(world, name, [*PROMPT.encode()], 12)[0]) for name in (None, "sixteen")}
    settings = {
        "engine": {"model": str(world["base"]), "max_model_len": 64},
        "adapter_roots": [world["adapters"]],
        "data_dir": tmp_path,
    }
    with served(served_model_name="tiny", **settings) as process:
        for name in ("one", "sixteen"):
            process.client.post("/adapters", json={"name": name, "source": name}).raise_for_status()
        kinds: dict[str, int] = {}
        statuses: dict[int, int] = {}
        slowest = (0.0, "")
        for number in range(count):
            if number == count // 5:
                before = resident(process)
            sent = malformed(number, world["adapters"] / "one")
            began = time.monotonic()
            headers = {name: value.encode("latin-1") for name, value in sent.headers.items()}
            answer = process.client.post(sent.path, content=sent.content, headers=headers)  # type: ignore[arg-type]
            slowest = max(slowest, (time.monotonic() - began, f"number {number}, {sent.kind}"))
            try:
                check(answer)
            except Exception as error:
                raise AssertionError(f"number {number}, {sent.kind}: {answer.status_code}") from error
            kinds[sent.kind] = kinds.get(sent.kind, 0) + 1
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        after = resident(process)
        print(f"{count} bodies of {len(kinds)} kinds: {statuses}, slowest {slowest}")
        print(f"resident before and after: {[n / MIB for n in before]}, {[n / MIB for n in after]} MiB")
        assert statuses[400] > count / 2
        assert slowest < (10, "")
        assert after[0] - before[0] < 16 * MIB
        assert after[1] - before[1] < 16 * MIB
        for name, text in answers.items():
            assert process.complete(adapter=name).json()["choices"][0]["text"] == text
        for adapter in process.client.get("/adapters").json()["data"]:
            assert process.client.delete(f"/adapters/{adapter['name']}").status_code == 204
        assert process.complete().json()["choices"][0]["text"] == answers[None]
        assert not list((tmp_path / "uploads").iterdir())
