"""The load generator against servers that behave in every way: what it measures, and what it calls a failure."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest
from heddle.api.load_generator.client import Refused, Sample, Target, first_model
from heddle.api.load_generator.plan import Plan, Text
from heddle.api.load_generator.report import Latency, as_data, report
from heddle.api.load_generator.run import Run, measure, warm_up

Respond = Callable[[dict, asyncio.StreamWriter], Awaitable[None]]
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def event(**fields) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def piece(text: str) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": None}])


def chat_piece(**delta) -> bytes:
    return event(choices=[{"index": 0, "delta": delta, "finish_reason": None}])


def whole(status: int, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


@asynccontextmanager
async def serving(respond: Respond) -> AsyncIterator[str]:
    """A server that reads one request a connection and leaves its answer, in bytes, to the test."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        body = await reader.readexactly(int(lengths[0].split(b":")[1])) if lengths else b"{}"
        try:
            await respond(json.loads(body), writer)
            await writer.drain()
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def plan(requests: int = 1, **settings) -> Plan:
    return Plan(texts=lambda draw: itertools.repeat(Text("hi", 5)), requests=requests, **settings)


async def one(respond: Respond, **target) -> Sample:
    async with serving(respond) as url:
        (sample,) = (await measure(plan(), Target(url=url, **target))).samples
    return sample


async def test_a_streams_pieces_are_timed_and_its_tokens_counted_as_the_server_does():
    async def respond(body: dict, writer: asyncio.StreamWriter) -> None:
        assert body == {
            "prompt": "hi",
            "max_tokens": 5,
            "model": "m",
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        writer.write(STREAM)
        for text in ("a", "b", "c"):
            await writer.drain()
            await asyncio.sleep(0.1)
            writer.write(piece(text))
        writer.write(
            b": a comment\n\n" + event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 6})
        )
        writer.write(b"data: [DONE]\n\n")

    sample = await one(respond, model="m")
    assert sample.error is None
    assert (sample.prompt_tokens, sample.completion_tokens) == (9, 6)
    assert 0.09 < (sample.time_to_first_token or 0) < 0.9
    assert len(sample.gaps) == 2
    assert 0.18 < sum(sample.gaps) < 1.8
    assert sample.time_per_output_token == pytest.approx(sum(sample.gaps) / 5, rel=0.01)
    assert sample.end_to_end >= (sample.time_to_first_token or 0) + sum(sample.gaps)


async def test_events_cut_anywhere_and_with_other_line_ends_are_read_alike():
    async def respond(body: dict, writer: asyncio.StreamWriter) -> None:
        data = (
            STREAM
            + chat_piece(role="assistant", content="")
            + chat_piece(content="é")
            + chat_piece(content="b")
        )
        data += b"data: [DONE]\n\n"
        data = data.replace(b"\n\n", b"\r\n\r\n") if body["messages"] else data
        for byte in data:
            writer.write(bytes([byte]))
            if byte in b"d\n":
                await writer.drain()
                await asyncio.sleep(0)

    async with serving(respond) as url:
        texts = Text([{"role": "user", "content": "hi"}], 5)
        target = Target(url=url, endpoint="chat")
        (sample,) = (
            await measure(Plan(texts=lambda draw: itertools.repeat(texts), requests=1), target)
        ).samples
    assert (sample.error, sample.completion_tokens, len(sample.gaps)) == (None, 2, 1)


async def test_a_whole_answer_has_no_first_token():
    async def respond(body: dict, writer: asyncio.StreamWriter) -> None:
        assert "stream" not in body
        answer = {"choices": [{"text": "x"}], "usage": {"prompt_tokens": 1, "completion_tokens": 4}}
        writer.write(whole(200, json.dumps(answer).encode()))

    sample = await one(respond, stream=False)
    assert (sample.error, sample.first, sample.completion_tokens) == (None, None, 4)


REFUSALS = {
    "its own code": (
        whole(429, b'{"error": {"message": "slow down", "code": "rate_limit_exceeded"}}'),
        "rate_limit_exceeded",
    ),
    "a number for a code": (
        whole(404, b'{"error": {"message": "none", "code": 404, "type": "NotFound"}}'),
        "http_404",
    ),
    "no object at all": (whole(502, b"<html>"), "http_502"),
    "an error in mid-stream": (
        STREAM + piece("a") + event(error={"message": "died", "code": "internal_error"}),
        "internal_error",
    ),
    "an end before [DONE]": (STREAM + piece("a"), "disconnected"),
    "a length that is not kept": (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\ndata: ", "disconnected"),
    "nothing": (b"", "disconnected"),
    "no HTTP": (b"220 mail.example ESMTP\r\n\r\n", "disconnected"),
    "events of no JSON": (STREAM + b"data: {\n\n", "no_answer"),
    "events of no UTF-8": (STREAM + b'data: {"choices": [{"text": "\xff"}]}\n\n', "no_answer"),
}


@pytest.mark.parametrize("case", REFUSALS)
async def test_whatever_is_no_whole_answer_is_a_failure_with_a_code(case):
    answer, code = REFUSALS[case]

    async def respond(body: dict, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    sample = await one(respond)
    assert sample.error == code
    assert sample.message


async def test_a_whole_answer_without_choices_is_a_failure():
    async def respond(body: dict, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(200, b"{}"))

    assert (await one(respond, stream=False)).error == "no_answer"


async def test_a_request_that_takes_too_long_is_a_failure():
    async def respond(body: dict, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + piece("a"))
        await writer.drain()
        await asyncio.sleep(5)

    began = time.monotonic()
    sample = await one(respond, timeout=0.3)
    assert sample.error == "timeout"
    assert "0.3 s" in (sample.message or "")
    assert time.monotonic() - began < 4


async def test_a_server_that_dies_midway_fails_the_rest_and_nothing_of_it_counts_as_fast():
    served = 0
    async with serving(lambda body, writer: respond(body, writer)) as url:

        async def respond(body: dict, writer: asyncio.StreamWriter) -> None:
            nonlocal served
            served += 1
            await asyncio.sleep(0.05)
            writer.write(STREAM + piece("a") + b"data: [DONE]\n\n" if served <= 10 else STREAM + piece("a"))

        run = await measure(plan(30), Target(url=url), 2)
        dead = url
    made = report(run)
    assert (made.requests, made.succeeded, made.failed) == (30, 10, 20)
    assert made.errors == {"disconnected": 20}
    assert made.completion_tokens == 10
    end_to_end = made.latency_ms["end_to_end"]
    assert end_to_end is not None
    assert end_to_end.count == 10
    gone = report(await measure(plan(3), Target(url=dead), 1))
    assert (gone.failed, gone.errors, gone.requests_per_second) == (3, {"connection_failed": 3}, 0.0)
    assert set(gone.latency_ms.values()) == {None}


async def test_an_open_loop_sends_at_its_moments_however_slow_the_answers_are():
    """Coordinated omission: one slow answer must not keep the others from being sent, and measured, in time."""
    arrived: list[float] = []

    async def respond(body: dict, writer: asyncio.StreamWriter) -> None:
        arrived.append(time.monotonic())
        await asyncio.sleep(1.0)
        writer.write(STREAM + piece("a") + b"data: [DONE]\n\n")

    async with serving(respond) as url:
        run = await measure(plan(40, rate=100.0), Target(url=url))
    span = arrived[-1] - arrived[0]
    assert span < 0.9, "all were sent before the first answer"
    assert all(sample.sent >= sample.intended for sample in run.samples), "none early"
    assert [sample.index for sample in run.samples] == list(range(40))
    assert all(sample.end_to_end >= 1.0 for sample in run.samples)


async def test_latencies_count_from_the_intended_moment_also_where_the_generator_comes_late():
    async def respond(body: dict, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + piece("a") + b"data: [DONE]\n\n")

    late: list[Sample] = []

    def block(sample: Sample) -> None:
        if not late:
            time.sleep(0.5)  # the generator itself is kept from its work
        late.append(sample)

    async with serving(respond) as url:
        run = await measure(plan(20, rate=50.0), Target(url=url), on_sample=block)
    held_up = [sample for sample in run.samples if sample.sent - sample.intended > 0.1]
    assert held_up
    assert all(sample.end_to_end >= sample.sent - sample.intended for sample in held_up)
    assert report(run).generator.late_p99_ms > 100


async def test_a_closed_loop_has_so_many_under_way_and_ends_in_time():
    running = most = 0

    async def respond(body: dict, writer: asyncio.StreamWriter) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        writer.write(STREAM + piece("a") + b"data: [DONE]\n\n")

    async with serving(respond) as url:
        timed = Plan(texts=lambda draw: itertools.repeat(Text("hi", 5)), duration=0.5)
        run = await measure(timed, Target(url=url), 7)
    assert most == 7
    assert run.seconds < 3
    assert len(run.samples) > 14


def test_percentiles_are_numpys_and_failures_are_in_none_of_them():
    draw = np.random.default_rng(5)
    values = draw.lognormal(size=997)
    samples = [
        Sample(
            index=i,
            adapter=None,
            intended=1.0,
            sent=1.0,
            first=1 + v / 2,
            last=1 + v,
            finished=1 + v,
            completion_tokens=3,
        )
        for i, v in enumerate(values.tolist())
    ]
    broken = [
        Sample(index=i, adapter=None, intended=0.0, sent=0.0, finished=1e-6, error="x", completion_tokens=9)
        for i in range(500)
    ]
    made = report(Run([*samples, *broken], seconds=10.0, cpu_seconds=1.0), {"e2e": 1000.0})
    latency, first = made.latency_ms["end_to_end"], made.latency_ms["time_to_first_token"]
    assert latency is not None
    assert first is not None
    for percent in (50, 90, 99):
        assert getattr(latency, f"p{percent}") == pytest.approx(np.percentile(values, percent) * 1000)
        assert getattr(first, f"p{percent}") == pytest.approx(np.percentile(values / 2, percent) * 1000)
    assert latency.max == pytest.approx(values.max() * 1000)
    assert latency.mean == pytest.approx(values.mean() * 1000)
    met = int((values <= 1.0).sum())
    assert made.goodput == pytest.approx(met / 10)
    assert made.goodput_share == pytest.approx(met / 1497), "what failed met no goal"
    assert made.requests_per_second == pytest.approx(99.7)
    assert made.completion_tokens == 3 * 997
    data = as_data(made, Run(samples, 10.0, 1.0), {"url": "u"})
    assert json.loads(json.dumps(data))["latency_ms"]["end_to_end"]["p99"] == latency.p99


def test_percentiles_of_few_values_by_hand():
    latency = Latency.of([0.001, 0.002, 0.004])
    assert latency is not None
    assert (latency.p50, latency.max, latency.count) == (2.0, 4.0, 3)
    assert latency.p90 == pytest.approx(2 + 0.8 * 2)
    assert Latency.of([]) is None


async def test_the_warm_up_asks_every_adapter_and_learns_what_a_word_is():
    asked: list[dict] = []

    async def respond(body: dict, writer: asyncio.StreamWriter) -> None:
        asked.append(body)
        usage = {"prompt_tokens": 3 + 2 * len(body["prompt"].split()), "completion_tokens": 1}
        writer.write(STREAM + piece("a") + event(choices=[], usage=usage) + b"data: [DONE]\n\n")

    async with serving(respond) as url:
        target = Target(url=url, model="base", adapter_field="adapter")
        count, failed = await warm_up(target, 4, 8, ("x", "y"), chat=False, seed=0)
    assert failed is None
    assert [(body["model"], body["adapter"]) for body in asked] == [("base", "x"), ("base", "y")] * 2
    assert count.words(103) == 50


async def test_the_first_model_of_the_list_is_the_servers():
    async def models(body: dict, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(200, b'{"object": "list", "data": [{"id": "base"}, {"id": "adapter"}]}'))

    async with serving(models) as url:
        assert await first_model(Target(url=f"{url}/v1")) == "base"

    async def empty(body: dict, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(200, b'{"data": []}'))

    async with serving(empty) as url:
        with pytest.raises(Refused, match="no models"):
            await first_model(Target(url=url))
    with pytest.raises(Refused) as refused:
        await first_model(Target(url=url))
    assert refused.value.code == "connection_failed"
