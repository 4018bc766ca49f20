"""One sequence on its way through the engine. Control code: no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ..messages import AdapterUse, TokenLogprobs
from ..sampling_params import SamplingParams


class Status(Enum):
    WAITING = "waiting"
    """Queued: for its turn, for blocks, or for an adapter to come to the device."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Gave its blocks back and is queued again; its tokens so far are kept and it still holds its adapters.
    Where `host_slots` has any its KV lies in swap space, else it is computed again."""
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """What is known of one sequence; owned by the scheduler, read by the runner.

    `num_computed` tokens have their KV in `block_table`; everything from there to `len(self)` is still owed
    to the model: a prompt at first, one token while decoding, more after a preemption.
    """

    key: int
    group: int
    prompt_token_ids: list[int]
    params: SamplingParams
    adapters: tuple[AdapterUse, ...]
    tenant: str
    arrival: int
    """Order of submission."""
    max_tokens: int
    """`params.max_tokens`, or the room there is where that is None or may be shortened."""
    open_ended: bool = False
    """`max_tokens` is the room there is: it may end earlier where pins have taken some of it since."""
    status: Status = Status.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    host_slots: list[int] = field(default_factory=list)
    """Swapped out: where the blocks that hold its `num_computed` tokens lie in swap space, in order."""
    num_computed: int = 0
    cached_tokens: int | None = None
    """Prompt tokens served from the prefix cache at first admission; None until then."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Collected over the chunks of a prompt where they were asked for."""
    block_names: list[bytes] = field(default_factory=list)
    """The chain of prefix-cache names, as far as it was needed: its scope's, then its full blocks'."""
    num_published: int = 0
    """So many blocks of the table are published in the prefix cache."""
    started: bool = False
    """It has run before, or runs."""
    started_at: int = -1
    """The step in which it last came to run."""
    preemptions: int = 0
    """How often it gave its place up."""
    protected_until: int = 0
    """Output tokens it has before another tenant may take its place again."""
    reported: bool = False
    """A first output has gone out."""
    blocked_since: int | None = None
    """The step since which it has lacked nothing but room, for its adapters or beside other tenants."""
    digests: tuple[str, ...] = field(init=False)
    """Of its adapters, in their order."""

    def __post_init__(self) -> None:
        self.digests = tuple(use.digest for use in self.adapters)

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Log-probabilities of the prompt were asked for and are not complete: its rows must be computed, not
        found."""
        if self.params.prompt_logprobs is None:
            return False
        return self.prompt_logprobs is None or len(self.prompt_logprobs) < len(self.prompt_token_ids)

    @property
    def protected(self) -> bool:
        """Other tenants leave it its place: it gave way before, and has had too little since."""
        return len(self.output_token_ids) < self.protected_until

    @property
    def scope(self) -> tuple[str, tuple[AdapterUse, ...]]:
        """What the KV of its tokens depends on besides the tokens, and who may share it."""
        return self.tenant, self.adapters

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens at positions start to stop of prompt and output together."""
        prompt = len(self.prompt_token_ids)
        if start >= prompt:
            return self.output_token_ids[start - prompt : stop - prompt]
        return self.prompt_token_ids[start:stop] + self.output_token_ids[: max(0, stop - prompt)]
