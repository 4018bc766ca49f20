"""What the API process and the engine process say to each other: msgspec structs, msgpack on the wire.

The client sends commands, the engine answers with events, both in order. Each frame is a list of structs, so
one write carries everything a step produced; its length goes before it. Control code: no torch.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Literal

import msgspec

from ..lora.adapter_memory import AdapterState as AdapterState
from .config import EngineConfig
from .memory import MemoryReport
from .sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class EngineError(msgspec.Struct, frozen=True):
    """Why a request or call failed, with one of the stable codes of the HTTP interface."""

    code: str
    message: str
    param: str | None = None


class AdapterUse(msgspec.Struct, frozen=True):
    """One adapter version on a request, by its digest, and the weight its delta is summed with."""

    digest: str
    weight: float = 1.0


# ------------------------------------------------------------------ commands: client -> engine


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """One sequence to generate (a request with n = 3 is three of these with one `group`).

    `params.stop` is matched by whoever holds the text, not by the engine; everything else of `params` is the
    engine's. `seed` is never None here: the sender has drawn one.
    """

    key: int
    """Names the sequence between client and engine; the sender never uses one twice. Users never see it."""
    group: int
    prompt_token_ids: list[int]
    params: SamplingParams
    adapters: list[AdapterUse] = []
    tenant: str = "public"
    """Whose it is: what one tenant has cached no other finds. A name that is given to another tenant later must come
    with something that tells the two apart."""
    on_cold: Literal["wait", "reject"] = "wait"
    shorten: bool = False
    """`params.max_tokens` is a default that nobody asked for: where there is less room, the room is taken."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Forget these sequences at once and free what they hold; unknown keys are ignored. They get no further
    event."""

    keys: list[int]


class KnowAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="know"):
    """From now on `digest` may be used; its canonical file lies at `path`. Nothing is loaded yet.
    Idempotent."""

    digest: str
    path: str
    pinned: bool = False


class ForgetAdapter(msgspec.Struct, frozen=True, tag="forget"):
    """No new sequence will name `digest`; its memory is freed when the last one that does has ended."""

    digest: str


class LoadAdapter(msgspec.Struct, frozen=True, tag="load"):
    """Bring `digest` to the device; answered by `Reply` when it is there."""

    call: int
    digest: str


class EvictAdapter(msgspec.Struct, frozen=True, tag="evict"):
    """Take `digest` off the device (and out of host memory, to="disk"); `Reply` with `adapter_in_use` if
    used."""

    call: int
    digest: str
    to: Literal["host", "disk"] = "host"


class PinAdapter(msgspec.Struct, frozen=True, tag="pin"):
    """Pinned: never evicted by pressure. `Reply` with `pin_limit` beyond half of the pool."""

    call: int
    digest: str
    pinned: bool


class GetMemory(msgspec.Struct, frozen=True, tag="memory"):
    """Answered by `Reply` whose `memory` says where every byte is."""

    call: int


class TenantShare(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant may have of the engine, beside the others."""

    name: str
    """As in `Generate.tenant`."""
    weight: float = 1.0
    """Tenants that wait are served in proportion to their weights."""
    pool_share: float | None = None
    """Of the pool's blocks (0 < share <= 1): no more while others wait. None: its part by weight."""
    queued_requests: int | None = None
    """Sequences that may wait at a time; more are refused as `rate_limit_exceeded`. None: unlimited."""

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ValueError(f"weight: {self.weight} is no positive number")
        if self.pool_share is not None and not 0 < self.pool_share <= 1:
            raise ValueError(f"pool_share: {self.pool_share} does not lie above 0 and at most at 1")


class SetTenant(msgspec.Struct, frozen=True, tag="set_tenant"):
    """From now on this holds for the tenant of that name, also for what it has queued or running."""

    tenant: TenantShare


class ForgetTenant(msgspec.Struct, frozen=True, tag="forget_tenant"):
    """The tenant has weight 1 and no limits again, as one that was never heard of."""

    name: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Finish nothing, free everything, end the process with status 0."""


Command = (
    Generate
    | Abort
    | KnowAdapter
    | ForgetAdapter
    | LoadAdapter
    | EvictAdapter
    | PinAdapter
    | GetMemory
    | SetTenant
    | ForgetTenant
    | Shutdown
)

# ------------------------------------------------------------------ events: engine -> client


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position, of the model's own distribution (before temperature and filters).

    `top` holds the most likely ids first; the chosen token's value is in `logprob` also when it is not among
    them. Values are finite: -9999.0 stands for what is smaller.
    """

    logprob: float
    top: list[tuple[int, float]]
    rank: int = 0
    """1 for the most likely token."""


class SequenceOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step brought for one sequence. The event with a `finish_reason` is the last one.

    By the time it is sent, blocks and adapter holds of a finished sequence are free again.
    """

    key: int
    token_ids: list[int] = []
    """New tokens; an end or stop token that ended it is included (the text leaves it out)."""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Once, with the first output; the first entry is None."""
    cached_tokens: int | None = None
    """Once, with the first output."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """Which end or stop token ended it, with finish_reason "stop"."""
    error: EngineError | None = None


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's gauges and counters after a step."""

    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_adapters: int = 0
    blocks_pinned: int = 0
    """Of those of adapters."""
    host_copy_bytes: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    swap_outs: int = 0
    swap_ins: int = 0
    swap_out_bytes: int = 0
    swap_in_bytes: int = 0
    swap_used_bytes: int = 0
    adapter_loads: int = 0
    adapter_evictions: int = 0
    step_seconds: float = 0.0


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The weights are loaded and the pool stands; sent once."""

    device: str
    dtype: str
    quantization: str
    quantization_reason: str
    max_model_len: int
    num_blocks: int
    block_size: int
    block_bytes: int
    weight_bytes: int
    any_adapter_form: bool = False
    """Adapters in 16 bits lie so in the pool, whatever `dtype` is."""
    memory: MemoryReport | None = None
    """None: only from a stand-in of an engine."""
    notes: list[str] = []


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Before `Ready`: loading went on. `done` of `total` in bytes or tensors."""

    what: str
    done: int
    total: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine cannot start with these settings; `message` is for the user. The process then ends with
    status 2."""

    code: str
    message: str


class Outputs(msgspec.Struct, frozen=True, kw_only=True, tag="outputs", omit_defaults=True):
    """Everything one step produced."""

    outputs: list[SequenceOutput] = []
    adapters: list[AdapterState] = []
    not_finite: list[str] = []
    """Digests of adapters that made a sequence's logits overflow; it ended with `adapter_failed`."""
    stats: Stats | None = None


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag="reply"):
    """The answer to a command that carried `call`."""

    call: int
    error: EngineError | None = None
    memory: MemoryReport | None = None
    """The answer to `GetMemory`."""


Event = Ready | Progress | Failed | Outputs | Reply

# ------------------------------------------------------------------ frames

HEADER = struct.Struct("<I")
"""Before every frame: the bytes that follow."""

_encode = msgspec.msgpack.Encoder().encode
decode_config = msgspec.msgpack.Decoder(EngineConfig).decode
decode_commands = msgspec.msgpack.Decoder(list[Command]).decode
decode_events = msgspec.msgpack.Decoder(list[Event]).decode


def frame(content: EngineConfig | Sequence[Command] | Sequence[Event]) -> bytes:
    """One frame, header first: the settings (the first frame an engine process reads), commands, or events.

    Raises OverflowError for an integer beyond 64 bits.
    """
    body = _encode(content)
    return HEADER.pack(len(body)) + body
