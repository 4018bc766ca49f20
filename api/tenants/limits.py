"""Holds each tenant to its limits: token buckets of a minute, and counts of what is under way.

Everything is checked before any work is done, and a refusal changes nothing. All counts are of sequences: a
request with n answers to each of several prompts counts n x prompts. Limits hold for one server process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import ApiError, invalid
from .records import Limits, Tenant

MINUTE = 60 * 10**9
"""Nanoseconds. Levels are kept as tokens times this, which a whole number of nanoseconds fills exactly."""

Clock = Callable[[], int]
"""Nanoseconds that never go back."""


class Bucket:
    """A token bucket (J. Turner, "New directions in communications", 1986) that a minute fills: `size` tokens.

    It may go below zero: where more was used than was reserved, and where more than a whole bucket was asked for,
    which is let in when the bucket is full.
    """

    def __init__(self, size: int, now: int) -> None:
        self.size = size
        self._level = size * MINUTE
        self._at = now

    def level(self, now: int) -> float:
        """Tokens in it."""
        self._fill(now)
        return self._level / MINUTE

    def wait(self, count: int, now: int) -> int:
        """Nanoseconds until `count` tokens (a whole bucket, where that is less) are there; 0: they are."""
        self._fill(now)
        missing = min(count, self.size) * MINUTE - self._level
        return max(0, -(-missing // self.size))

    def take(self, count: int, now: int) -> None:
        """Negative: put back. It never holds more than its size."""
        self._fill(now)
        self._level = min(self._level - count * MINUTE, self.size * MINUTE)

    def resize(self, size: int, now: int) -> None:
        """From now on it fills to `size` in a minute; what is in it stays, as far as there is room."""
        self._fill(now)
        self.size = size
        self._level = min(self._level, size * MINUTE)

    def _fill(self, now: int) -> None:
        passed, self._at = now - self._at, now
        self._level = min(self._level + passed * self.size, self.size * MINUTE)


class _Book:
    """What one tenant has under way, and its buckets; None where there is no such limit."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.limits = Limits()
        self.running = 0
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None

    def follow(self, limits: Limits, now: int) -> None:
        """Take over limits that were changed since."""
        if limits == self.limits:
            return
        self.limits = limits
        self.requests = _resized(self.requests, limits.requests_per_minute, now)
        self.tokens = _resized(self.tokens, limits.tokens_per_minute, now)


class Limiter:
    """Lets requests in, or refuses them. Belongs to the event loop."""

    def __init__(self, clock: Clock = time.monotonic_ns) -> None:
        self._clock = clock
        self._books: dict[str, _Book] = {}
        """By name. A tenant that is made again gets a new one; requests of the one before close in the old."""

    def admit(self, tenant: Tenant, sequences: int, tokens: int, field: str = "n") -> Admission:
        """Let a request of so many sequences in, which is going to `reserve` at least so many tokens. `field`: the
        request's, that says how many sequences.

        Raises `rate_limit_exceeded`; `invalid_request` where it could never be let in. Whoever gets the admission
        must close it.
        """
        now = self._clock()
        book = self._book(tenant, now)
        # Both: the engine gets a request's sequences together.
        for name in ("concurrent_requests", "queued_requests"):
            if (bound := getattr(tenant.limits, name)) is not None and sequences > bound:
                message = f"this request makes {sequences} sequences at once, and the limit {name} = {bound}"
                raise invalid(f"{message} of this tenant can never let it in", field)
        most = tenant.limits.concurrent_requests
        if most is not None and book.running + sequences > most:
            what = f"{book.running} are under way, and this request makes {sequences}"
            raise _refused("concurrent_requests", most, what, 0)
        _check("requests_per_minute", book.requests, sequences, now)
        _check("tokens_per_minute", book.tokens, tokens, now)
        book.running += sequences
        if book.requests is not None:
            book.requests.take(sequences, now)
        return Admission(book, sequences, self._clock)

    @contextmanager
    def one_call(self, tenant: Tenant) -> Iterator[None]:
        """A call that generates nothing is one of the requests of a minute, unless it ends in an error.

        Raises `rate_limit_exceeded`.
        """
        now = self._clock()
        bucket = self._book(tenant, now).requests
        _check("requests_per_minute", bucket, 1, now)
        if bucket is not None:
            bucket.take(1, now)
        try:
            yield
        except Exception:
            if bucket is not None:
                bucket.take(-1, self._clock())
            raise

    def _book(self, tenant: Tenant, now: int) -> _Book:
        """As its limits are now."""
        book = self._books.get(tenant.name)
        if book is None or book.key != tenant.key:
            book = self._books[tenant.name] = _Book(tenant.key)
        book.follow(tenant.limits, now)
        return book

    def running(self, tenant: str) -> int:
        """Sequences of the tenant that are under way."""
        book = self._books.get(tenant)
        return 0 if book is None else book.running


class Admission:
    """One request that was let in. `close` gives back what it did not use; it may be called twice."""

    def __init__(self, book: _Book, sequences: int, clock: Clock) -> None:
        self._book = book
        self._sequences = sequences
        self._clock = clock
        self._requests, self._tokens = book.requests, book.tokens
        self._reserved = 0
        self._closed = False

    def reserve(self, tokens: int) -> None:
        """Take so many tokens from the bucket. Raises `rate_limit_exceeded`, and then none was taken."""
        assert not self._closed
        if self._tokens is None:
            return
        now = self._clock()
        _check("tokens_per_minute", self._tokens, tokens, now)
        self._tokens.take(tokens, now)
        self._reserved += tokens

    def close(self, used_tokens: int = 0, *, counts: bool) -> None:
        """The request is over and used so many tokens, be it more or less than it reserved.

        `counts`: False where it was refused or failed before it brought anything: then its sequences do not count
        towards the requests of a minute either.
        """
        if self._closed:
            return
        self._closed = True
        self._book.running -= self._sequences
        now = self._clock()
        if self._tokens is not None:
            self._tokens.take(used_tokens - self._reserved, now)
        if self._requests is not None and not counts:
            self._requests.take(-self._sequences, now)


def _resized(bucket: Bucket | None, size: int | None, now: int) -> Bucket | None:
    if size is None:
        return None
    if bucket is None:
        return Bucket(size, now)
    bucket.resize(size, now)
    return bucket


def _check(limit: str, bucket: Bucket | None, count: int, now: int) -> None:
    if bucket is not None and (wait := bucket.wait(count, now)):
        left = max(0, int(bucket.level(now)))
        raise _refused(limit, bucket.size, f"{left} are left, and this request takes {count}", wait)


def _refused(limit: str, value: int, what: str, wait: int) -> ApiError:
    message = f"the limit {limit} = {value} of this tenant is reached: {what}"
    return ApiError("rate_limit_exceeded", message, retry_after=max(1, -(-wait // 10**9)))
