"""An engine process that computes nothing: it speaks the engine's protocol and gives every sequence a token a step.

    python bench/stub_engine.py FD STEP_SECONDS

Started in place of `heddle.core.engine.process` by `bench/api_cost.py`, so that what is measured is the API process
with its real client of the engine, and none of the engine's own work. One frame a step carries the tokens of all
running sequences, as the real engine's does.
"""

from __future__ import annotations

import itertools
import select
import socket
import sys
import time

from heddle.core.messages import (
    HEADER,
    Abort,
    Command,
    EvictAdapter,
    FinishReason,
    Generate,
    LoadAdapter,
    Outputs,
    PinAdapter,
    Ready,
    Reply,
    SequenceOutput,
    Shutdown,
    Stats,
    TokenLogprobs,
    decode_commands,
    decode_config,
    frame,
)

FIRST_TOKEN, TOKENS = 1000, 4000
"""Every sequence says the ids from FIRST_TOKEN on, round and round: whole words in the demo base's vocabulary."""
DEFAULT_LENGTH = 128


class Sequence:
    """What is left of one, and what each of its tokens is said to be as likely as."""

    def __init__(self, command: Generate) -> None:
        length, count = command.params.max_tokens, command.params.logprobs
        self.left = DEFAULT_LENGTH if length is None else length
        self.logprobs = None
        if count is not None:
            self.logprobs = TokenLogprobs(-0.5, [(FIRST_TOKEN + n, -0.5 - n) for n in range(count)], 1)


class StubEngine:
    """The sequences that run."""

    def __init__(self) -> None:
        self._running: dict[int, Sequence] = {}
        self._words = itertools.cycle(range(FIRST_TOKEN, FIRST_TOKEN + TOKENS))
        self._steps = self._generated = 0

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def obey(self, command: Command) -> Reply | None:
        """What the command is answered with, if it is a call."""
        match command:
            case Generate():
                self._running[command.key] = Sequence(command)
            case Abort():
                for key in command.keys:
                    self._running.pop(key, None)
            case LoadAdapter() | EvictAdapter() | PinAdapter():
                return Reply(call=command.call)
        return None

    def step(self) -> Outputs:
        """One token for every sequence."""
        outputs = []
        for key, sequence in list(self._running.items()):
            left = sequence.left
            reason: FinishReason | None = "length" if left <= 1 else None
            tokens = [next(self._words)] if left else []
            logprobs = None if sequence.logprobs is None else [sequence.logprobs] * len(tokens)
            outputs.append(SequenceOutput(key=key, token_ids=tokens, logprobs=logprobs, finish_reason=reason))
            sequence.left -= 1
            if reason:
                del self._running[key]
        self._steps += 1
        self._generated += len(outputs)
        stats = Stats(running=len(self._running), steps=self._steps, generated_tokens=self._generated)
        return Outputs(outputs=outputs, stats=stats)


def main(descriptor: int, step_seconds: float) -> None:
    connection = socket.socket(fileno=descriptor)
    buffer = bytearray()
    length = _next_frame(connection, buffer)
    config = decode_config(length)
    ready = Ready(
        device="cpu",
        dtype="float32",
        quantization="none",
        quantization_reason="stub",
        max_model_len=config.max_model_len or 8192,
        num_blocks=1024,
        block_size=16,
        block_bytes=1 << 16,
        weight_bytes=0,
    )
    connection.sendall(frame([ready]))
    engine = StubEngine()
    due = time.monotonic()
    while True:
        wait = max(0.0, due - time.monotonic()) if engine.busy else None
        if select.select([connection], [], [], wait)[0]:
            for command in decode_commands(_next_frame(connection, buffer)):
                if isinstance(command, Shutdown):
                    return
                if (reply := engine.obey(command)) is not None:
                    connection.sendall(frame([reply]))
        if engine.busy and time.monotonic() >= due:
            connection.sendall(frame([engine.step()]))
            due = time.monotonic() + step_seconds


def _next_frame(connection: socket.socket, buffer: bytearray) -> bytes:
    """The next whole frame's body; nothing beyond it is read. Ends the process where the other side is gone."""
    buffer.clear()
    for size in (HEADER.size, None):
        wanted = HEADER.unpack(buffer)[0] + HEADER.size if size is None else size
        while len(buffer) < wanted:
            piece = connection.recv(wanted - len(buffer))
            if not piece:
                sys.exit(0)
            buffer += piece
    return bytes(buffer[HEADER.size :])


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
