"""A worker as this process holds it: started, asked, looked at from outside, and gone with all it started."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import psutil

from .rows import ROOT, Row

END_SECONDS = 30.0
LINES = 3
"""Of a worker's log, in a message."""


class WorkerFailed(Exception):
    """It died, or took too long; the message has the last that it said."""


class Worker:
    """One peer in a process group of its own, which ends with `close` whatever happened."""

    def __init__(self, row: Row, threads: int, log: Path, patience: float) -> None:
        """`patience`: seconds that it may take for any answer. Raises `WorkerFailed`, OSError."""
        self._log, self.patience = log, patience
        environment = os.environ | {
            "PYTHONPATH": str(ROOT / "bench"),
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
        }
        with log.open("ab") as errors:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [str(row.python), "-P", "-m", "throughput.worker", row.peer],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        try:
            self._receive()
            self.imported_bytes = self.peak_bytes()
            """What the interpreter and torch take by themselves."""
        except BaseException:
            self.close(grace=0.0)
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(END_SECONDS if error is None else 0.0)

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send one message and wait for its answer. Raises `WorkerFailed`."""
        try:
            pipe = self._pipe(self._process.stdin)
            pipe.write(json.dumps(message).encode() + b"\n")
            pipe.flush()
        except BrokenPipeError:
            raise self._failed("it ended") from None
        return self._receive()

    def peak_bytes(self) -> int:
        """The most that the process which serves has held since its start (VmHWM); of several the largest."""
        pids = [self._process.pid]
        with contextlib.suppress(psutil.NoSuchProcess):
            pids += [child.pid for child in psutil.Process(self._process.pid).children(recursive=True)]
        return max(map(_peak_bytes, pids))

    def close(self, grace: float = END_SECONDS) -> None:
        """Let it end by itself for so many seconds, then end what is left of its group. Idempotent."""
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                self._pipe(pipe).close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _receive(self) -> dict[str, Any]:
        pipe, ends = self._pipe(self._process.stdout), time.monotonic() + self.patience
        if not select.select([pipe], [], [], max(0.0, ends - time.monotonic()))[0]:
            raise self._failed(f"no answer in {self.patience:g} seconds")
        line = pipe.readline()
        if not line:
            raise self._failed("it ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failed(self, what: str) -> WorkerFailed:
        said = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return WorkerFailed(": ".join([what, " / ".join(said[-LINES:])]) + f" (all of it: {self._log})")

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None, "both are pipes"
        return pipe


def _peak_bytes(pid: int) -> int:
    """Linux's VmHWM of a process, 0 where it is gone."""
    try:
        lines: Sequence[str] = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = (line.split() for line in lines if line.startswith("VmHWM:"))
    return next((int(kilobytes) * 1024 for _, kilobytes, _ in fields), 0)
