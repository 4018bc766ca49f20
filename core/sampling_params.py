"""How one request wants its tokens chosen. Control code: no torch."""

from __future__ import annotations

from typing import Any

import msgspec

MAX_LOGPROBS = 20
MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_GRAMMAR_BYTES = 256 << 10
"""Of a grammar's text: twice what the largest schema needs in it, escaped and with its settings."""
FINITE = (
    ("temperature", 0.0, 2.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.01, 100.0),
)
"""Fields that are numbers, with the least and the largest there may be."""
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling settings of one request, OpenAI's and vLLM's names and meanings.

    A number out of bounds is refused when it is made: `ParamError` names its field. `validate` goes through the rest,
    which may be long and may need the vocabulary.
    """

    n: int = 1
    best_of: int | None = None
    max_tokens: int | None = 16
    """None: whatever room the context and the pool leave."""
    min_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy; a tiny positive value equals greedy text."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    """None: a fresh random seed. Any signed 64-bit value, 0 and -1 included, is a real seed."""
    stop: tuple[str, ...] = ()
    """Also one text, a list or None, as vLLM takes them."""
    stop_token_ids: tuple[int, ...] = ()
    """Also a list or None."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """How many alternatives are reported with each new token (0: the chosen one alone); None: no
    log-probabilities."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    grammar: str | None = None
    """What the answer must obey, as `Grammar` writes it. The answer ends where it is complete and nothing can
    follow; where something can, end tokens are allowed. `max_tokens` and stop strings may cut it short."""

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            given: Any = getattr(self, name)
            if not isinstance(given, tuple):
                whole = (given,) if isinstance(given, str) else tuple(given or ())
                msgspec.structs.force_setattr(self, name, whole)
        for name, low, high in FINITE:
            value = getattr(self, name)
            if not low <= value <= high:  # NaN fails both comparisons
                raise ParamError(name, f"{name} must lie between {low:g} and {high:g}, got {value}")
        if self.top_p == 0.0:
            raise ParamError("top_p", "top_p must be above 0")
        if not -1 <= self.top_k < 2**31:
            raise ParamError(
                "top_k", f"top_k must be -1, 0 (both: off) or positive and below 2^31, got {self.top_k}"
            )
        _bounded("n", self.n, 1, MAX_N)
        if self.best_of is not None:
            _bounded("best_of", self.best_of, 1, MAX_N)
            if self.best_of < self.n:
                raise ParamError("best_of", f"best_of ({self.best_of}) must not be below n ({self.n})")
        if self.max_tokens is not None:
            _bounded("max_tokens", self.max_tokens, 0, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise ParamError(
                    "min_tokens", f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})"
                )
        _bounded("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.seed is not None:
            _bounded("seed", self.seed, SEED_MIN, SEED_MAX)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _bounded(name, count, 0, MAX_LOGPROBS)

    def validate(self, vocab_size: int | None = None) -> None:
        """Raise `ParamError` naming the first field with an entry that is out of bounds."""
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ParamError("stop", f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}")
        if any(not text for text in self.stop):
            raise ParamError("stop", "a stop string must not be empty")
        if self.grammar is not None and len(self.grammar.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
            raise ParamError("grammar", f"grammar: at most {MAX_GRAMMAR_BYTES} bytes")
        for token, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise ParamError(
                    "logit_bias", f"logit_bias of token {token} must lie between -100 and 100, got {bias}"
                )
        if vocab_size is not None:
            _known("logit_bias", self.logit_bias, vocab_size)
            _known("stop_token_ids", self.stop_token_ids, vocab_size)


def sequence_seed(seed: int, index: int) -> int:
    """The seed of the index-th sequence of one request (n, best_of, or prompts of a list): its own for index
    0.

    Steps by 2^64 over the golden ratio, so that neighbouring request seeds do not share sequences.
    """
    return (seed + index * 0x9E3779B97F4A7C15 - SEED_MIN) % 2**64 + SEED_MIN


class ParamError(ValueError):
    """A request field is out of bounds; `param` names it, the message says the limit."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def _bounded(name: str, value: int, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:  # nor a bool
        raise ParamError(name, f"{name} must be an integer from {low} to {high}, got {value!r}")


def _known(name: str, tokens: tuple[int, ...] | dict[int, float], vocab_size: int) -> None:
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ParamError(name, f"{name}: token {token} is outside the vocabulary (0 to {vocab_size - 1})")
