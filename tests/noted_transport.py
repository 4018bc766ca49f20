"""A transport that keeps what is written to it."""

from __future__ import annotations

import asyncio
from typing import Any


class NotedTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return False
