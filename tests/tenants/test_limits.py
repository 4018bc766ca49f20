"""Token buckets and counts by themselves, under a clock of the test's own."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from fractions import Fraction

import pytest
from heddle.api.errors import ApiError
from heddle.api.tenants.limits import MINUTE, Admission, Bucket, Limiter
from heddle.api.tenants.records import Limits, Tenant
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

SECOND = 10**9


class World:
    """A limiter whose limits and clock the test sets."""

    def __init__(self, **limits: int) -> None:
        self.now = 5 * MINUTE
        self.limits = Limits(**limits)
        self.made = datetime(2026, 1, 1, tzinfo=UTC)
        """When the tenant was made: later, it is another one."""
        self.limiter = Limiter(lambda: self.now)

    def admit(self, sequences: int = 1, tokens: int = 0) -> Admission:
        tenant = Tenant(name="t", limits=self.limits, created_at=self.made)
        return self.limiter.admit(tenant, sequences, tokens)

    def refused(self, sequences: int = 1, tokens: int = 0) -> ApiError:
        with pytest.raises(ApiError) as refusal:
            self.admit(sequences, tokens)
        return refusal.value


# ------------------------------------------------------------------ each limit


def test_a_minute_fills_the_bucket_of_requests_and_no_more():
    world = World(requests_per_minute=6)
    for _ in range(6):
        world.admit().close(counts=True)
    error = world.refused()
    assert (error.code, error.status, error.retry_after) == ("rate_limit_exceeded", 429, 10)
    assert "requests_per_minute = 6" in error.message
    world.now += 10 * SECOND - 1
    assert world.refused().retry_after == 1
    world.now += 1
    world.admit()
    world.refused()
    world.now += 100 * MINUTE
    for _ in range(6):
        world.admit()
    world.refused()


def test_who_waits_as_long_as_he_was_told_is_let_in():
    world = World(requests_per_minute=7, tokens_per_minute=13)
    for sequences, tokens in [(7, 0), (3, 0), (1, 13), (2, 9), (1, 4)]:
        try:
            admission = world.admit(sequences, tokens)
        except ApiError as error:
            world.now += (error.retry_after or 0) * SECOND
            try:
                admission = world.admit(sequences, tokens)
            except ApiError as again:  # the other limit
                world.now += (again.retry_after or 0) * SECOND
                admission = world.admit(sequences, tokens)
        admission.reserve(tokens)
        admission.close(tokens, counts=True)


def test_what_is_more_than_a_whole_bucket_is_let_in_when_it_is_full():
    world = World(requests_per_minute=4, tokens_per_minute=100)
    admission = world.admit(sequences=10, tokens=250)
    admission.reserve(250)
    admission.close(250, counts=True)
    error = world.refused(tokens=1)
    assert error.retry_after == 105, "6 below zero and one more, at 4 a minute"
    world.now += 105 * SECOND
    assert "tokens_per_minute = 100" in world.refused(tokens=26).message, "100 - 250 + 175"
    world.admit(tokens=25)


def test_sequences_under_way_are_counted_not_requests():
    world = World(concurrent_requests=8)
    first = world.admit(sequences=6)
    error = world.refused(sequences=3)
    assert error.retry_after == 1
    assert "concurrent_requests = 8" in error.message
    second = world.admit(sequences=2)
    first.close(counts=True)
    world.admit(sequences=6)
    second.close(counts=True)
    world.admit(sequences=2)
    world.refused()


@pytest.mark.parametrize("limit", ["concurrent_requests", "queued_requests"])
@pytest.mark.parametrize("bound", [0, 2])
def test_who_could_wait_for_ever_is_told_so(limit: str, bound: int):
    """Not to come again, but that the request itself is too large."""
    world = World(**{limit: bound})
    error = world.refused(sequences=bound + 1)
    assert (error.status, error.code, error.param, error.retry_after) == (400, "invalid_request", "n", None)
    assert error.message == (
        f"this request makes {bound + 1} sequences at once, and the limit {limit} = {bound} of this tenant "
        "can never let it in"
    )
    if bound:
        world.admit(sequences=2)
    if limit == "concurrent_requests" and bound:
        error = world.refused()
        assert (error.status, error.retry_after) == (429, 1)
        assert "2 are under way, and this request makes 1" in error.message


def test_whoever_is_told_to_come_again_is_let_in_then():
    """Whatever one request asks for: more than a minute's requests or tokens too."""
    world = World(requests_per_minute=2, tokens_per_minute=10, concurrent_requests=50)
    for sequences in (1, 2, 3, 50):
        for tokens in (0, 10, 11, 10**6):
            for _ in range(3):  # each limit tells of itself
                try:
                    world.admit(sequences, tokens).close(tokens, counts=True)
                    break
                except ApiError as error:
                    world.now += (error.retry_after or 0) * SECOND
            else:
                raise AssertionError((sequences, tokens))


def test_a_call_that_generates_nothing_is_one_of_the_minutes_requests():
    world = World(requests_per_minute=3, concurrent_requests=0, tokens_per_minute=1)
    tenant = Tenant(name="t", limits=world.limits, created_at=world.made)
    for _ in range(3):
        with world.limiter.one_call(tenant):
            pass
        for _ in range(5):  # what fails costs nothing
            with pytest.raises((ZeroDivisionError, ApiError)), world.limiter.one_call(tenant):
                raise ZeroDivisionError
    with pytest.raises(ApiError, match="requests_per_minute = 3") as refusal, world.limiter.one_call(tenant):
        raise AssertionError("it was let in")
    assert refusal.value.retry_after == 20
    world.now += 20 * SECOND
    with world.limiter.one_call(tenant):
        assert world.limiter.running("t") == 0


def test_tokens_that_were_not_used_are_given_back_and_more_than_reserved_is_taken():
    world = World(tokens_per_minute=100)
    admission = world.admit(tokens=80)
    admission.reserve(80)
    world.refused(tokens=21)
    admission.close(30, counts=True)
    world.refused(tokens=71)
    admission = world.admit(tokens=10)
    admission.reserve(10)
    admission.close(90, counts=True)
    assert world.refused(tokens=1).retry_after == 13, "20 below zero and one more, at 100 a minute"


def test_a_tenant_made_again_begins_with_nothing_under_way_and_full_buckets():
    """What the one before it still runs neither counts nor, when it ends, gives anything back."""
    world = World(concurrent_requests=2, requests_per_minute=2, tokens_per_minute=100)
    old = world.admit(sequences=2)
    old.reserve(100)
    world.refused()
    world.made += timedelta(microseconds=1)
    new = world.admit(sequences=2)
    new.reserve(100)
    world.now += MINUTE
    old.close(100, counts=True)
    assert world.limiter.running("t") == 2
    assert "concurrent_requests = 2" in world.refused().message
    new.close(100, counts=True)
    assert world.limiter.running("t") == 0


def test_a_refusal_takes_nothing_of_the_other_limits():
    world = World(requests_per_minute=3, tokens_per_minute=10, concurrent_requests=1)
    running = world.admit(tokens=10)
    running.reserve(10)
    for _ in range(50):
        assert "concurrent_requests = 1" in world.refused().message
    world.limits = Limits(requests_per_minute=3, tokens_per_minute=10)
    for _ in range(50):
        assert "tokens_per_minute = 10" in world.refused(tokens=1).message
    running.close(0, counts=True)
    assert "requests_per_minute = 3" in world.refused(sequences=3).message
    world.admit(sequences=2, tokens=10)


def test_a_prompt_that_turns_out_too_long_for_the_bucket_leaves_no_trace():
    world = World(requests_per_minute=2, tokens_per_minute=10)
    other = world.admit(tokens=9)
    other.reserve(9)
    late = world.admit(tokens=1)
    with pytest.raises(ApiError, match="tokens_per_minute = 10"):
        late.reserve(2)
    late.close(counts=False)
    assert world.limiter.running("t") == 1
    world.admit(tokens=1).reserve(1)


def test_a_request_that_failed_before_it_brought_anything_does_not_count():
    world = World(requests_per_minute=1)
    for _ in range(5):
        world.admit().close(counts=False)
    world.admit().close(counts=True)
    world.refused()


def test_limits_that_change_hold_from_the_next_request_on():
    world = World()
    free = world.admit(sequences=9)
    world.limits = Limits(concurrent_requests=9, tokens_per_minute=60)
    world.refused()
    free.close(1000, counts=True)
    world.admit(tokens=60).reserve(60)
    world.limits = Limits(tokens_per_minute=600)
    assert world.refused(tokens=1).retry_after == 1, "it is empty, and fills faster from now on"
    world.now += 6 * SECOND
    world.admit(tokens=60).reserve(57)
    world.limits = Limits(tokens_per_minute=6)
    assert world.refused(tokens=6).retry_after == 30
    world.limits = Limits()
    world.admit(sequences=10**6, tokens=10**9)


def test_tenants_do_not_share():
    world = World(requests_per_minute=1)
    for name in "abc":
        tenant = Tenant(name=name, limits=world.limits, created_at=world.made)
        world.limiter.admit(tenant, 1, 0)
        with pytest.raises(ApiError):
            world.limiter.admit(tenant, 1, 0)


def test_a_flood_of_refusals_is_cheap():
    """Generous, as machines that run tests are busy: the median of many, in microseconds of this process."""
    world = World(requests_per_minute=1, tokens_per_minute=1)
    world.admit()
    took = []
    for _ in range(200):
        began = time.process_time_ns()
        for _ in range(10):
            world.refused(tokens=5)
        took.append((time.process_time_ns() - began) / 10)
    assert sorted(took)[100] < 200_000
    assert world.limiter.running("t") == 1


# ------------------------------------------------------------------ random sequences


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.integers(0, 2 * MINUTE), st.integers(-50, 2000)), max_size=40),
)
def test_a_bucket_is_exact(size: int, steps: list[tuple[int, int]]):
    """Against the same in fractions; and `wait` is the shortest wait, to the nanosecond."""
    now = 0
    bucket, level = Bucket(size, now), Fraction(size)
    for passed, count in steps:
        now += passed
        level = min(level + Fraction(passed * size, MINUTE), Fraction(size))
        assert bucket.level(now) == pytest.approx(float(level), abs=1e-9)
        wait = bucket.wait(count, now)
        wanted = min(count, size)
        assert level + Fraction(wait * size, MINUTE) >= wanted
        assert wait == 0 or level + Fraction((wait - 1) * size, MINUTE) < wanted
        bucket.take(count, now)
        level = min(level - count, Fraction(size))


class Books(RuleBasedStateMachine):
    """Requests come, run, end, fail, are cut, in any order and at any time; the books always balance."""

    @initialize(requests=st.integers(1, 20), tokens=st.integers(1, 500), concurrent=st.integers(1, 20))
    def begin(self, requests: int, tokens: int, concurrent: int) -> None:
        self.world = World(
            requests_per_minute=requests, tokens_per_minute=tokens, concurrent_requests=concurrent
        )
        self.began = self.world.now
        self.open: list[tuple[Admission, int, int]] = []
        self.spent_requests = self.spent_tokens = 0
        """What is taken from the buckets and not given back."""

    @rule(sequences=st.integers(1, 6), least=st.integers(0, 80), more=st.integers(0, 80))
    def arrive(self, sequences: int, least: int, more: int) -> None:
        before = self.world.limiter.running("t")
        try:
            admission = self.world.admit(sequences, least)
        except ApiError:
            assert self.world.limiter.running("t") == before
            return
        try:
            admission.reserve(least + more)
        except ApiError:
            admission.close(counts=False)
            assert self.world.limiter.running("t") == before
            return
        self.open.append((admission, sequences, least + more))
        self.spent_requests += sequences
        self.spent_tokens += least + more

    @rule(at=st.integers(0, 99), used=st.integers(0, 200), twice=st.booleans())
    def finish(self, at: int, used: int, twice: bool) -> None:
        if self.open:
            admission, _, reserved = self.open.pop(at % len(self.open))
            admission.close(used, counts=True)
            self.spent_tokens += used - reserved
            if twice:
                admission.close(7 * used, counts=False)

    @rule(at=st.integers(0, 99))
    def fail(self, at: int) -> None:
        if self.open:
            admission, sequences, reserved = self.open.pop(at % len(self.open))
            admission.close(counts=False)
            self.spent_requests -= sequences
            self.spent_tokens -= reserved

    @rule(nanoseconds=st.integers(0, MINUTE))
    def wait(self, nanoseconds: int) -> None:
        self.world.now += nanoseconds

    @invariant()
    def balanced(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        running = sum(sequences for _, sequences, _ in self.open)
        assert world.limiter.running("t") == running <= (world.limits.concurrent_requests or 0)
        if (book := world.limiter._books.get("t")) is None:
            return
        passed = world.now - self.began
        for bucket, spent in ((book.requests, self.spent_requests), (book.tokens, self.spent_tokens)):
            assert bucket is not None
            level = Fraction(bucket.level(world.now))
            # A bucket never holds more than its size, nor less than what was put in less what was taken out.
            assert level <= bucket.size
            filled = bucket.size + Fraction(passed * bucket.size, MINUTE)
            assert level <= filled - spent + Fraction(1, 10**6)

    def teardown(self) -> None:
        """All that is open is given back; a while later the tenant has everything again."""
        if not hasattr(self, "world"):
            return
        for admission, _, _ in self.open:
            admission.close(counts=False)
        self.open.clear()
        assert self.world.limiter.running("t") == 0
        self.world.now += 1000 * MINUTE
        limits = self.world.limits
        if limits.requests_per_minute and limits.concurrent_requests:
            for _ in range(limits.requests_per_minute):
                self.world.admit().close(counts=True)
            assert "requests_per_minute" in self.world.refused().message


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
