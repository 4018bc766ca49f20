"""Outputs of sequences in one place: in order, until all have ended, and merged where many wait."""

from __future__ import annotations

import asyncio

from heddle.core.messages import EngineError, SequenceOutput, TokenLogprobs
from heddle.core.sequence_outputs import SequenceOutputs, merged


def output(key: int, *tokens: int, **fields) -> SequenceOutput:
    return SequenceOutput(key=key, token_ids=list(tokens), **fields)


async def test_all_that_has_come_is_taken_at_once_and_waited_for_where_nothing_has():
    outputs = SequenceOutputs([1, 2], lambda keys: None)
    outputs.put(output(1, 5))
    outputs.put(output(2, 6))
    assert [one.key for one in await outputs.take()] == [1, 2]
    waiting = asyncio.ensure_future(outputs.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    outputs.put(output(2, 7))
    assert (await waiting)[0].token_ids == [7]


async def test_only_what_still_runs_is_aborted():
    aborted: list[int] = []
    outputs = SequenceOutputs([1, 2, 3], aborted.extend)
    outputs.put(output(1, finish_reason="stop"))
    outputs.abort(2)
    outputs.abort(1)
    assert aborted == [2]
    outputs.close()
    outputs.close()
    assert aborted == [2, 3]


def test_those_that_were_added_later_are_aborted_with_the_first():
    aborted: list[int] = []
    outputs = SequenceOutputs([1, 2], aborted.extend)
    outputs.add([3])
    outputs.put(output(2, finish_reason="stop"))
    outputs.close()
    assert sorted(aborted) == [1, 3]


async def test_one_that_gives_up_waiting_can_wait_again():
    outputs = SequenceOutputs([1], lambda keys: None)
    waiting = asyncio.ensure_future(outputs.take())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    outputs.put(output(1, 4))
    assert [one.token_ids for one in await outputs.take()] == [[4]]


def test_what_is_merged_is_what_it_was_in_pieces():
    first, second = TokenLogprobs(-1.0, []), TokenLogprobs(-2.0, [])
    pieces = [
        output(1, 10, logprobs=[first], cached_tokens=3, prompt_logprobs=[None, first]),
        output(2, 20),
        output(1, 11, logprobs=[second]),
        output(2, 21, 22, finish_reason="stop", stop_token_id=22),
        output(1, finish_reason="error", error=EngineError("internal_error", "died")),
    ]
    one, two, error = merged(pieces)
    assert (one.key, one.token_ids, one.logprobs) == (1, [10, 11], [first, second])
    assert (one.cached_tokens, one.prompt_logprobs, one.finish_reason) == (3, [None, first], None)
    assert (two.key, two.token_ids, two.finish_reason, two.stop_token_id) == (2, [20, 21, 22], "stop", 22)
    assert error == pieces[-1]
    assert merged([]) == []
