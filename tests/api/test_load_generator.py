"""The load generator against this server itself: what both count is the same."""

from __future__ import annotations

import asyncio

import pytest
from heddle.api.load_generator.client import Target, first_model
from heddle.api.load_generator.plan import Plan
from heddle.api.load_generator.report import report
from heddle.api.load_generator.run import measure
from heddle.api.load_generator.texts import random_texts


@pytest.mark.parametrize("chat", [False, True])
def test_every_token_of_every_request_is_counted(server, chat):
    server.engine.delay = 0.002
    target = Target(
        url=server.url,
        endpoint="chat" if chat else "completions",
        model=asyncio.run(first_model(Target(url=server.url))),
        adapter_field="adapter",
        ignore_eos=True,
    )
    plan = Plan(
        texts=random_texts(8, 12, chat), adapters=["a", "b"], popularity="distinct", rate=400.0, requests=40
    )
    made = report(asyncio.run(measure(plan, target)))
    assert made.errors == {}
    assert (made.succeeded, made.completion_tokens) == (40, 40 * 12)
    told = [len(command.prompt_token_ids) for command in server.engine.commands]
    assert made.prompt_tokens == sum(told)
    inter_token = made.latency_ms["inter_token"]
    assert inter_token is not None
    assert inter_token.p99 > 1, "milliseconds; on a busy machine many tokens come at once"
    assert {command.adapters[0].digest for command in server.engine.commands} == {
        server.client.get(f"/adapters/{name}").json()["digest"] for name in "ab"
    }


def test_what_the_server_refuses_or_breaks_off_is_counted_by_its_code(server):
    target = Target(url=server.url, ignore_eos=True)
    plan = Plan(
        texts=random_texts(8, 12, chat=False), adapters=["a", "nobody"], popularity="distinct", requests=10
    )
    made = report(asyncio.run(measure(plan, target, 2)))
    assert (made.succeeded, made.errors) == (5, {"model_not_found": 5})
    server.engine.fail_after = 3
    made = report(asyncio.run(measure(Plan(texts=plan.texts, requests=4), target, 2)))
    assert (made.succeeded, made.errors) == (0, {"internal_error": 4})
    assert set(made.latency_ms.values()) == {None}
