"""From a request to its answer: prompts and adapters in, sequences on the engine, chunks or one body out."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

import msgspec
from msgspec import UNSET

from ..core.client import EngineClient
from ..core.errors import EngineFailure
from ..core.messages import Generate
from ..core.sampling_params import SamplingParams, sequence_seed
from ..core.text.tokenizer import Tokenizer
from .adapters import AdapterService
from .auth import Caller
from .choices import Choice
from .engine_adapters import named
from .error_answers import as_api_error
from .errors import ApiError, invalid
from .metrics import Metrics
from .prompts import Prompt, Prompts
from .protocol.chat import ChatRequest
from .protocol.completions import CompletionRequest
from .protocol.generation import GenerationBody
from .run import Run
from .selection import Selection, selected
from .writers import ChatWriter, CompletionWriter, Heading, Writer

Bodies = AsyncGenerator[msgspec.Struct, None]


class Generation:
    """Completions and chat over one base. Methods give a stream's chunks, or one body where none was asked
    for.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        prompts: Prompts,
        engine: EngineClient,
        adapters: AdapterService,
        metrics: Metrics,
        base_name: str,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        max_model_len: int,
    ) -> None:
        self.max_model_len = max_model_len
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._engine = engine
        self._adapters = adapters
        self._metrics = metrics
        self._base_name = base_name
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._unseeded = itertools.count(1)

    def complete(self, body: CompletionRequest, caller: Caller) -> Bodies:
        async def prompts() -> list[Prompt]:
            special = body.add_special_tokens is not False
            return await self._prompts.of_completion(body.prompts(), special, with_text=bool(body.echo))

        return self._generate(body, caller, "cmpl", prompts, CompletionWriter)

    def chat(self, body: ChatRequest, caller: Caller) -> Bodies:
        async def prompts() -> list[Prompt]:
            return [
                await self._prompts.of_chat(
                    body.messages, body.add_generation_prompt, body.chat_template_kwargs
                )
            ]

        return self._generate(body, caller, "chatcmpl", prompts, ChatWriter)

    async def check_model(self, model: str | None, caller: Caller) -> None:
        """Raises `model_not_found` unless the caller could use `model`."""
        async with selected(self._adapters, self._base_name, model, UNSET, caller):
            pass

    async def _generate(
        self,
        body: GenerationBody,
        caller: Caller,
        prefix: str,
        encode: Callable[[], Awaitable[list[Prompt]]],
        writer_type: Callable[[Heading, Tokenizer], Writer],
    ) -> Bodies:
        arrived = time.monotonic()
        params = body.sampling_params(self._vocab_size)
        self._check_count(body.num_prompts(), params)
        async with selected(self._adapters, self._base_name, body.model, body.adapter, caller) as selection:
            heading = Heading(
                id=f"{prefix}-{uuid.uuid4().hex}",
                created=int(time.time()),
                selection=selection,
                with_logprobs=params.logprobs is not None,
                usage_in_stream=bool(body.stream_options and body.stream_options.include_usage),
                echo=bool(body.echo),
            )
            writer = writer_type(heading, self._tokenizer)
            run = Run(self._engine, self._choices(body, params, await encode(), selection, caller))
            first = True
            try:
                async with aclosing(run.deltas()) as deltas:
                    async for choice, delta in deltas:
                        if first:
                            self._metrics.observe_first_token(time.monotonic() - arrived)
                            first = False
                        if body.stream and (chunk := writer.chunk(choice, delta)) is not None:
                            yield chunk
            except EngineFailure as failure:
                raise _refused(failure, body, selection) from failure
            finally:
                usage = run.usage()
                for record in () if first else selection.records:
                    self._adapters.count_usage(record, usage.prompt_tokens, usage.completion_tokens)
        if not body.stream:
            yield writer.whole(_best(run.choices, params), usage)
        elif heading.usage_in_stream:
            yield writer.last_chunk(usage)

    def _check_count(self, prompts: int, params: SamplingParams) -> None:
        count, most = prompts * _width(params), self._engine.config.max_queued_requests
        if count > most:
            field = "n" if params.best_of is None else "best_of"
            raise invalid(
                f"{field}: the request makes {count} sequences, and at most {most} can be queued", field
            )

    def _choices(
        self,
        body: GenerationBody,
        params: SamplingParams,
        prompts: Sequence[Prompt],
        selection: Selection,
        caller: Caller,
    ) -> list[Choice]:
        """One choice a sequence, with what the engine is to be told about it."""
        width, uses = _width(params), selection.uses
        ranked = width > params.n and params.logprobs is None
        choices: list[Choice] = []
        for prompt in prompts:
            room = self._room(prompt, body, params)
            group = self._engine.new_key()
            for index in range(width):
                own = msgspec.structs.replace(
                    params,
                    seed=self._seed(params, index),
                    max_tokens=room,
                    logprobs=0 if ranked else params.logprobs,
                )
                command = Generate(
                    key=self._engine.new_key(),
                    group=group,
                    prompt_token_ids=prompt.token_ids,
                    params=own,
                    adapters=uses,
                    tenant=caller.tenant,
                    on_cold=body.on_cold or "wait",
                    shorten=body.requested_max_tokens is None,
                )
                choices.append(
                    Choice(
                        index=len(choices),
                        prompt=prompt,
                        command=command,
                        tokenizer=self._tokenizer,
                        eos_token_ids=self._eos_token_ids,
                        base_offset=len(prompt.text or "") if body.echo else 0,
                    )
                )
        return choices

    def _room(self, prompt: Prompt, body: GenerationBody, params: SamplingParams) -> int | None:
        """The `max_tokens` of a prompt's sequences; what nobody asked for is cut to what there is."""
        length, limit, asked = len(prompt.token_ids), self.max_model_len, body.requested_max_tokens
        if length > limit or (length == limit and asked != 0):
            raise ApiError(
                "context_length_exceeded",
                f"the prompt has {length} tokens, which leaves no room in the model's context of {limit}",
                body.PROMPT_FIELD,
            )
        if asked is not None and length + asked > limit:
            raise ApiError(
                "context_length_exceeded",
                f"the prompt's {length} tokens and {body.max_tokens_field} = {asked} are more than the "
                f"model's context of {limit}",
                body.max_tokens_field,
            )
        return params.max_tokens if params.max_tokens is None else min(params.max_tokens, limit - length)

    def _seed(self, params: SamplingParams, index: int) -> int:
        """Of the index-th answer to a prompt. Without a seed in the request every sequence draws a number of
        its own.
        """
        if params.seed is None:
            return sequence_seed(self._engine.config.seed, next(self._unseeded))
        return sequence_seed(params.seed, index)


def _refused(failure: EngineFailure, body: GenerationBody, selection: Selection) -> ApiError:
    """The engine's refusal with its fields and adapters called as the caller calls them."""
    error = as_api_error(failure)
    fields = {"prompt": body.PROMPT_FIELD, "max_tokens": body.max_tokens_field}
    message = named(error.message, selection.records)
    return ApiError(error.code, message, fields.get(error.param or "", error.param))


def _width(params: SamplingParams) -> int:
    return params.best_of or params.n


def _best(choices: Sequence[Choice], params: SamplingParams) -> list[Choice]:
    """The n best of each prompt's answers, in prompt order; all as they are where none is left out."""
    width = _width(params)
    if width == params.n:
        return list(choices)
    result = []
    for begin in range(0, len(choices), width):
        ranked = sorted(choices[begin : begin + width], key=lambda choice: -choice.mean_logprob)
        result += ranked[: params.n]
    return result
