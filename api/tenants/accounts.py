"""The account of one completion or chat: let in under its tenant's limits, watched, and written down at its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

from ..generation.choices import Choice
from ..generation.run import Run
from ..generation.selection import Selection
from ..http import calls
from ..metrics import Metrics
from .auth import Caller
from .directory import Directory
from .limits import Admission, Limiter
from .records import Tenant
from .usage import UsageService


class Accounts:
    """Of one server. Belongs to the event loop."""

    def __init__(self, directory: Directory, limiter: Limiter, usage: UsageService, metrics: Metrics) -> None:
        self._directory = directory
        self._limiter = limiter
        self._usage = usage
        self._metrics = metrics

    def tenant(self, caller: Caller) -> Tenant:
        """Whose request it is from now to its end. Raises `tenant_not_found`."""
        return self._directory.of_caller(caller)

    def open(self, tenant: Tenant, sequences: int, tokens: int, field: str = "n") -> Account:
        """Let in a request of so many sequences that is going to take at least so many tokens. `field`: the
        request's, that says how many sequences.

        Raises `rate_limit_exceeded`; `invalid_request` where it could never be let in. The account is a context that
        the request lies in.
        """
        admission = self._limiter.admit(tenant, sequences, tokens, field)
        return Account(admission, tenant, self._usage, self._metrics)

    def one_call(self, caller: Caller) -> AbstractContextManager[None]:
        """A call that generates nothing lies in this context: it is one of the requests of a minute. Raises
        `rate_limit_exceeded`, `tenant_not_found`."""
        return self._limiter.one_call(self.tenant(caller))


class Account:
    """What one request reserves and uses. However its context ends, what was not used is given back."""

    def __init__(self, admission: Admission, tenant: Tenant, usage: UsageService, metrics: Metrics) -> None:
        self._admission = admission
        self._tenant = tenant
        self._usage = usage
        self._metrics = metrics
        self._call = calls.current()
        self._arrived = time.monotonic() if self._call is None else self._call.began
        self._run: Run | None = None
        self._selection: Selection | None = None
        self._seen: dict[int, tuple[float, int]] = {}
        """By a choice's index: when its last output came, and how many tokens it had then."""
        self._first_token_after: float | None = None

    def __enter__(self) -> Account:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.close(error)

    def begin(self, run: Run, selection: Selection) -> None:
        """Reserve the tokens of all its sequences. Raises `rate_limit_exceeded`, and then none may be submitted."""
        self._admission.reserve(sum(_reserved(choice) for choice in run.choices))
        self._run, self._selection = run, selection

    def output(self, choice: Choice) -> None:
        """A step brought something for `choice`."""
        now, tokens = time.monotonic(), choice.completion_tokens
        before = self._seen.get(choice.index)
        self._seen[choice.index] = now, tokens
        if before is not None:
            at, had = before
            if tokens > had:
                self._metrics.observe_token((now - at) / (tokens - had))
        if self._first_token_after is None and tokens:
            self._first_token_after = now - self._arrived
            self._metrics.observe_first_token(self._first_token_after)

    def close(self, error: BaseException | None) -> None:
        """It is over: `error` says how, None: it came to its end."""
        began = bool(self._seen)
        left = isinstance(error, (asyncio.CancelledError, GeneratorExit))
        choices: Sequence[Choice] = self._run.choices if self._run is not None and (began or left) else ()
        used = sum(len(choice.prompt.token_ids) + choice.completion_tokens for choice in choices)
        self._admission.close(used, counts=began or left)
        if self._call is not None:
            self._call.left = left
        if left:
            self._metrics.count_cut()
        if began:
            self._write_down()

    def _write_down(self) -> None:
        assert self._run is not None
        assert self._selection is not None
        usage, records, choices = self._run.usage(), self._selection.records, self._run.choices
        cached = usage.prompt_tokens_details.cached_tokens
        self._usage.count(self._tenant, records, usage)
        adapters = dict.fromkeys((record.tenant, record.name) for record in records)
        self._metrics.count_use(
            self._tenant.name, list(adapters), usage.prompt_tokens, usage.completion_tokens
        )
        self._metrics.count_prefixes(len(self._seen), sum(choice.cached_tokens > 0 for choice in choices))
        self._metrics.count_end(time.monotonic() - self._arrived)
        if self._call is not None and (generated := self._call.generated) is not None:
            generated.prompt_tokens = usage.prompt_tokens
            generated.completion_tokens = usage.completion_tokens
            generated.cached_tokens = cached
            generated.first_token_after = self._first_token_after
            generated.finish_reasons = [choice.finish_reason for choice in choices if choice.finish_reason]


def _reserved(choice: Choice) -> int:
    """Its prompt, and the tokens that were asked for; where none were, what it uses is taken at the end."""
    command = choice.command
    asked = 0 if command.shorten else command.params.max_tokens or 0
    return len(choice.prompt.token_ids) + asked
