"""From a request to its answer: prompts and adapters in, sequences on the engine, chunks or one body out."""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from os import urandom

import msgspec

from ...core.client import EngineClient
from ...core.errors import EngineFailure
from ...core.messages import Generate
from ...core.sampling_params import SamplingParams, sequence_seed
from ...core.text.tokenizer import Tokenizer
from .. import turns
from ..adapters.engine_adapters import named
from ..adapters.service import AdapterService
from ..errors import ApiError, invalid
from ..http import calls
from ..http.error_answers import as_api_error
from ..protocol.chat import ChatRequest
from ..protocol.completions import CompletionRequest
from ..protocol.generation import GenerationBody, StreamOptions, Usage
from ..tenants.accounts import Accounts
from ..tenants.auth import Caller
from ..workers import Workers
from .choices import Choice
from .guidance import Guidance, GuidanceService
from .prompts import Prompt, Prompts
from .run import Run
from .selection import AdapterField, Selecting, Selection
from .writers import ChatWriter, CompletionWriter, Heading, Writer

CHOICES_AT_ONCE = 64
LOGPROBS_AT_ONCE = 200
"""Tokens whose log-probabilities are put into words on the event loop: each may have 20 alternatives."""

MAX_MESSAGES = 1024
"""Of a chat, where the context is not longer: hardly a message takes less than a token."""
MAX_ENTRIES = 1 << 20
"""Of `logit_bias`, and of `stop_token_ids`, in all sequences of a request: each carries its own."""

Send = Callable[[msgspec.Struct], Awaitable[None]]
"""Takes the chunks of a stream one by one."""


class Generation:
    """Completions and chat over one base. Both return the whole answer; where there is someone to `send` chunks to, as
    `body.stream` asks for, they do that instead and return None.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        prompts: Prompts,
        engine: EngineClient,
        adapters: AdapterService,
        accounts: Accounts,
        guidance: GuidanceService,
        base_name: str,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        workers: Workers,
    ) -> None:
        self.max_model_len = max_model_len
        self._text = workers.text
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._engine = engine
        self._adapters = adapters
        self._accounts = accounts
        self._guidance = guidance
        self._base_name = base_name
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._unseeded = itertools.count(1)

    async def complete(
        self, body: CompletionRequest, caller: Caller, send: Send | None = None
    ) -> msgspec.Struct | None:
        async def prompts(guidance: Guidance) -> list[Prompt]:
            special = body.add_special_tokens is not False
            return await self._prompts.of_completion(body.prompts(), special, with_text=bool(body.echo))

        return await self._generate(body, caller, "cmpl", prompts, CompletionWriter, send)

    async def chat(
        self, body: ChatRequest, caller: Caller, send: Send | None = None
    ) -> msgspec.Struct | None:
        async def prompts(guidance: Guidance) -> list[Prompt]:
            return [
                await self._prompts.of_chat(
                    body.messages,
                    body.add_generation_prompt,
                    body.chat_template_kwargs,
                    guidance.definitions,
                )
            ]

        return await self._generate(body, caller, "chatcmpl", prompts, ChatWriter, send)

    async def check_selection(self, model: str | None, adapter: AdapterField, caller: Caller) -> None:
        """Raises what a completion with these fields would: `model_not_found` for an unknown name, and so on."""
        with Selecting(self._adapters, self._base_name, caller) as selecting:
            await selecting.selected(model, adapter)

    async def _generate(
        self,
        body: GenerationBody,
        caller: Caller,
        prefix: str,
        encode: Callable[[Guidance], Awaitable[list[Prompt]]],
        writer_type: Callable[[Heading, Tokenizer], Writer],
        send: Send | None,
    ) -> msgspec.Struct | None:
        self._check_lists(body)
        options = body.stream_options or StreamOptions()
        tenant = self._accounts.tenant(caller)
        params = body.sampling_params(self._vocab_size, self.max_model_len)
        params = _limited(params, body, tenant.limits.max_tokens)
        sequences = body.num_prompts() * _width(params)
        self._check_count(sequences, params)
        least = sequences * (body.requested_max_tokens or 0) + sequences
        with (
            self._accounts.open(tenant, sequences, least, _width_field(params, sequences)) as account,
            Selecting(self._adapters, self._base_name, caller) as selecting,
        ):
            selection = await selecting.selected(body.model, body.adapter)
            heading = Heading(
                id=f"{prefix}-{urandom(16).hex()}",
                created=int(time.time()),
                selection=selection,
                with_logprobs=params.logprobs is not None,
                usage_in_stream=bool(options.include_usage),
                usage_in_chunks=bool(options.include_usage and options.continuous_usage_stats),
                echo=bool(body.echo),
            )
            _note(heading, body, params, sequences)
            writer = writer_type(heading, self._tokenizer)
            guidance = await self._guidance.of(body, tenant.key)
            prompts = await encode(guidance)
            choices = await self._choices(body, params, prompts, selection, tenant.key, guidance)
            try:
                with Run(self._engine, choices) as run:
                    account.begin(run, selection)
                    await run.submit()
                    while run.running:
                        for choice, delta in await run.step():
                            account.output(choice)
                            if send is None:
                                continue
                            so_far = run.usage() if heading.usage_in_chunks else None
                            if (chunk := writer.chunk(choice, delta, so_far)) is not None:
                                await send(chunk)
            except EngineFailure as failure:
                raise _refused(failure, body, selection, guidance) from failure
        usage = run.usage()
        if send is not None:
            if heading.usage_in_stream:
                await send(writer.last_chunk(usage))
            return None
        best = _best(run.choices, params)
        tokens = sum(len(choice.entries) + len(choice.prompt_logprobs) for choice in best)
        if tokens > LOGPROBS_AT_ONCE or len(best) > CHOICES_AT_ONCE:
            return await self._text(_whole, writer, best, usage)
        return writer.whole(best, usage)

    def _check_lists(self, body: GenerationBody) -> None:
        """Before anything goes through them."""
        for field in ("stop_token_ids", "logit_bias"):
            count = len(getattr(body, field) or ())
            if count > self._vocab_size:
                message = f"{field}: at most {self._vocab_size} entries, one a token, got {count}"
                raise invalid(message, field)
        if isinstance(body, ChatRequest):
            count, most = len(body.messages), max(MAX_MESSAGES, self.max_model_len)
            if count > most:
                raise invalid(f"messages: at most {most} messages, got {count}", "messages")
        elif isinstance(body, CompletionRequest) and isinstance(body.prompt, list):
            count, limit = len(body.prompt), self.max_model_len
            if count > limit and isinstance(body.prompt[0], int):
                message = f"the prompt has {count} tokens, and the model's context is {limit}"
                raise ApiError("context_length_exceeded", message, "prompt")

    def _check_count(self, sequences: int, params: SamplingParams) -> None:
        most = self._engine.config.max_queued_requests
        if sequences > most:
            field = _width_field(params, sequences)
            raise invalid(
                f"{field}: the request makes {sequences} sequences, and at most {most} can be queued", field
            )
        for field, entries in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            if sequences * len(entries) > MAX_ENTRIES:
                raise invalid(
                    f"{field}: {len(entries)} entries for each of {sequences} sequences are more than the "
                    f"{MAX_ENTRIES} a request may have",
                    field,
                )

    async def _choices(
        self,
        body: GenerationBody,
        params: SamplingParams,
        prompts: Sequence[Prompt],
        selection: Selection,
        tenant: str,
        guidance: Guidance,
    ) -> list[Choice]:
        """One choice a sequence, with what the engine is to be told about it; many are made in turns with other
        requests' work."""
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
                    grammar=guidance.grammar,
                )
                command = Generate(
                    key=self._engine.new_key(),
                    group=group,
                    prompt_token_ids=prompt.token_ids,
                    params=own,
                    adapters=uses,
                    tenant=tenant,
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
                        guidance=guidance,
                    )
                )
                if len(choices) % CHOICES_AT_ONCE == 0:
                    await turns.enter()
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


def _limited(params: SamplingParams, body: GenerationBody, most: int | None) -> SamplingParams:
    """Under the tenant's `max_tokens`: more is refused where it was asked for, and what nobody asked for cut."""
    if most is None:
        return params
    asked, field = body.requested_max_tokens, body.max_tokens_field
    if asked is not None and asked > most:
        raise invalid(f"{field} = {asked} is above the limit max_tokens = {most} of this tenant", field)
    if params.min_tokens > most:
        message = f"min_tokens = {params.min_tokens} is above the limit max_tokens = {most} of this tenant"
        raise invalid(message, "min_tokens")
    default = most if params.max_tokens is None else min(params.max_tokens, most)
    return msgspec.structs.replace(params, max_tokens=default)


def _refused(
    failure: EngineFailure, body: GenerationBody, selection: Selection, guidance: Guidance
) -> ApiError:
    """The engine's refusal with its fields and adapters called as the caller calls them."""
    error = as_api_error(failure)
    fields = {
        "prompt": body.PROMPT_FIELD,
        "max_tokens": body.max_tokens_field,
        "grammar": guidance.field,
    }
    message = named(error.message, selection.records)
    return ApiError(error.code, message, fields.get(error.param or "", error.param))


def _note(heading: Heading, body: GenerationBody, params: SamplingParams, sequences: int) -> None:
    """For the log and the trace of this call."""
    if (call := calls.current()) is not None:
        call.generated = calls.Generated(
            operation="chat" if body.PROMPT_FIELD == "messages" else "text_completion",
            model=heading.selection.model,
            adapter=heading.selection.label,
            answer_id=heading.id,
            streams=bool(body.stream),
            sequences=sequences,
            max_tokens=body.requested_max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
        )


def _whole(writer: Writer, choices: Sequence[Choice], usage: Usage) -> msgspec.Struct:
    """In a thread: also letting go of all that a long answer is made of takes its time."""
    answer = writer.whole(choices, usage)
    for choice in choices:
        choice.forget()
    return answer


def _width(params: SamplingParams) -> int:
    return params.best_of or params.n


def _width_field(params: SamplingParams, sequences: int) -> str:
    """The request's field that makes so many sequences."""
    if _width(params) == 1 < sequences:
        return "prompt"
    return "n" if params.best_of is None else "best_of"


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
