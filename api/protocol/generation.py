"""What completions and chat have in common: sampling fields, adapter choice, usage."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ...core.sampling_params import ParamError, SamplingParams
from ..errors import ApiError, invalid
from .guided import (
    Form,
    Kind,
    ResponseFormat,
    StructuredOutputs,
    of_response_format,
    of_structured_outputs,
    the_one,
)
from .unserved import UnservedFields

_SAME_NAMES = (
    "n", "best_of", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "ignore_eos",
)  # fmt: skip
"""Fields that `SamplingParams` has under the same names, each with a default where the request says nothing."""

FinishReason = Literal["stop", "length", "tool_calls"]


class WeightedAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of several adapters whose deltas are summed."""

    name: str
    weight: float = 1.0


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    """A last chunk without choices holds the usage."""
    continuous_usage_stats: bool | None = None
    """Every chunk holds the usage so far (vLLM's field); only together with `include_usage`."""
    include_obfuscation: bool | None = None
    """Chunks of random length are not served: true is refused."""

    def check(self) -> None:
        """Raises `invalid_request` for what would not be heeded."""
        if self.include_obfuscation:
            raise invalid("stream_options.include_obfuscation is not served here", "stream_options")
        if self.continuous_usage_stats and not self.include_usage:
            raise invalid(
                "stream_options.continuous_usage_stats is only allowed with include_usage: true",
                "stream_options",
            )


class GenerationBody(UnservedFields, kw_only=True):
    """The fields that both endpoints know. A field the client leaves out and one that is null mean the same.

    Fields of OpenAI and vLLM are served or refused by name, whichever endpoint they belong to there. Fields nobody
    knows are ignored, as clients send all kinds.
    """

    MAX_TOKENS: ClassVar[int | None] = None
    """How many tokens are generated where no field says so; None: the room there is."""
    PROMPT_FIELD: ClassVar[str]
    """The field that makes the prompt."""

    model: str | None = None
    adapter: str | list[WeightedAdapter] | UnsetType | None = UNSET
    on_cold: Literal["wait", "reject"] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    best_of: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None

    user: str | None = None
    """This and the next ones are the caller's own labels: no answer depends on them."""
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    request_id: str | None = None
    safety_identifier: str | None = None
    session_id: str | None = None

    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def max_tokens_field(self) -> str:
        """The name the caller used for the limit; the newer one if both are there."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def requested_max_tokens(self) -> int | None:
        """None where neither field says anything."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def num_prompts(self) -> int:
        """How many prompts the request has. Raises `invalid_request` where it has none, or too many.

        Completions and chat each have their own; a msgspec struct cannot say so as an abstract class."""
        raise NotImplementedError

    def token_logprobs(self) -> tuple[int | None, int | None]:
        """Alternatives to report with each new token, and with each prompt token; None: no such thing.

        Completions and chat each have their own; a msgspec struct cannot say so as an abstract class."""
        raise NotImplementedError

    def form(self) -> Form | None:
        """What the answer must be, where a field says so. Raises `invalid_request` where several do."""
        fields: tuple[tuple[Kind, Any], ...] = (
            ("json", self.guided_json),
            ("regex", self.guided_regex),
            ("choice", self.guided_choice),
        )
        return the_one(
            [
                *of_response_format(self.response_format),
                *(Form(f"guided_{kind}", kind, value) for kind, value in fields if value is not None),
                *of_structured_outputs(self.structured_outputs),
            ]
        )

    def sampling_params(self, vocab_size: int, max_model_len: int) -> SamplingParams:
        """All fields checked and put together. A 400 names the field that is out of bounds as the caller
        calls it.
        """
        self.refuse_unserved()
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise invalid("max_tokens and max_completion_tokens disagree; give one of them", "max_tokens")
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options is only allowed together with stream", "stream_options")
        if self.stream_options is not None:
            self.stream_options.check()
        logprobs, prompt_logprobs = self.token_logprobs()
        given = {name: value for name in _SAME_NAMES if (value := getattr(self, name)) is not None}
        requested = self.requested_max_tokens
        if requested is not None and requested > max_model_len:
            message = (
                f"{self.max_tokens_field} = {requested} is more than the model's context of {max_model_len}"
            )
            raise ApiError("context_length_exceeded", message, self.max_tokens_field)
        bias = _token_keys(self.logit_bias or {})
        try:
            params = SamplingParams(
                max_tokens=self.MAX_TOKENS if requested is None else requested,
                logit_bias=bias,
                stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
                stop_token_ids=tuple(self.stop_token_ids or ()),
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                **given,
            )
            params.validate(vocab_size)
        except ParamError as error:
            name = self._field_of(error.param)
            raise invalid(str(error).replace(error.param, name, 1), name) from error
        if self.stream and params.best_of is not None and params.best_of > params.n:
            raise invalid("best_of above n cannot be streamed", "best_of")
        return params

    def _field_of(self, param: str) -> str:
        """The request's name for a field of `SamplingParams`."""
        if param == "prompt_logprobs":
            return "logprobs"
        return self.max_tokens_field if param == "max_tokens" else param


def _token_keys(bias: dict[str, float]) -> dict[int, float]:
    """JSON's keys are text; these must be token ids."""
    result = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 20):
            raise invalid(f"logit_bias: {key[:40]!r} is not a token id", "logit_bias")
        result[int(key)] = value
    return result


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    """What one request cost. A prompt counts once, however many answers it gets."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
        details = PromptTokensDetails(cached_tokens)
        return cls(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)
