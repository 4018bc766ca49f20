"""A multipart registration: text parts are collected, file parts go straight to disk as they arrive."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import multipart  # type: ignore[import-untyped]

from ...lora.inspect import CONFIG_FILE, OTHER_FILES, WEIGHTS_FILE, missing_weights
from ...lora.quota import Quota, reached
from ..errors import ApiError, invalid
from ..workers import Pool

FILES = (CONFIG_FILE, WEIGHTS_FILE, *OTHER_FILES)
"""File names that are taken. The first two make an adapter; of others the receipt says what becomes."""

PICKLES = (".bin", ".pt", ".pth")
MAX_PARTS = 16
MAX_TEXT_BYTES = 64 * 1024
OVERHEAD_BYTES = 2 << 20
"""What a body may be longer than its files: other parts and headers."""
WRITE_BYTES = 1 << 20
"""So much is gathered in memory before a thread writes it."""


def boundary_of(content_type: str) -> str | None:
    """The boundary of a multipart body; None for any other body. A 400 where the header lacks it."""
    kind, options = multipart.parse_options_header(content_type)
    if kind != "multipart/form-data":
        return None
    if not options.get("boundary"):
        raise invalid("multipart/form-data without a boundary in Content-Type")
    return str(options["boundary"])


@contextmanager
def upload_limit(most: int, quota: Quota) -> Iterator[int]:
    """The most bytes a file may have: `most`, or what the tenant's adapters may hold together and some more for the
    file's header. Beyond that an upload is not read to its end. Raises StoreError `rate_limit_exceeded`.
    """
    room = most if quota.adapter_bytes is None else quota.adapter_bytes + OVERHEAD_BYTES
    try:
        yield min(room, most)
    except ApiError as error:
        if error.code != "body_too_large" or room >= most:
            raise
        raise reached("adapter_bytes", quota.adapter_bytes or 0, "this upload is larger") from error


async def receive(
    chunks: AsyncIterator[bytes], boundary: str, folder: Path, max_bytes: int, threads: Pool
) -> dict[str, str]:
    """Write the file parts into `folder` and return the text parts by name.

    Memory stays below a few MiB whatever is sent. Raises `invalid_request` for a body that is not as it
    should be and `body_too_large` for a file above `max_bytes`.
    """
    try:
        parser = multipart.PushMultipartParser(
            boundary, max_segment_count=MAX_PARTS, max_segment_size=max(max_bytes, MAX_TEXT_BYTES)
        )
        upload = _Upload(folder, threads)
        try:
            async for chunk in chunks:
                for event in parser.parse(chunk):
                    await upload.take(event)
            parser.close()
        finally:
            await upload.close()
    except multipart.ParserLimitReached as error:
        if "segment size" in str(error) or "maximum segment size" in str(error):
            raise ApiError(
                "body_too_large", f"a file is larger than the {max_bytes} bytes allowed"
            ) from error
        raise invalid(f"the multipart body is refused: {error}") from error
    except multipart.MultipartError as error:
        raise invalid(f"the multipart body is malformed: {error}") from error
    return upload.texts


class _Upload:
    """The part that is coming in, and those that are through."""

    def __init__(self, folder: Path, threads: Pool) -> None:
        self.texts: dict[str, str] = {}
        self.files: set[str] = set()
        self._folder = folder
        self._threads = threads
        self._name = ""
        self._file: BinaryIO | None = None
        self._pending: list[bytes] = []
        self._size = 0

    async def take(self, event: multipart.MultipartSegment | bytes | None) -> None:
        """An event of the parser: a part begins, some of its bytes, or (None) its end."""
        if event is None:
            await self._end()
        elif isinstance(event, multipart.MultipartSegment):
            await self._begin(event)
        else:
            self._pending.append(event)
            self._size += len(event)
            if self._file is None and self._size > MAX_TEXT_BYTES:
                raise invalid(f"part {self._name} is longer than {MAX_TEXT_BYTES} bytes", self._name)
            if self._file is not None and self._size >= WRITE_BYTES:
                await self._write()

    async def _begin(self, part: multipart.MultipartSegment) -> None:
        self._name, self._size, self._pending = str(part.name), 0, []
        if self._name != "files":
            if self._name in self.texts:
                raise invalid(f"part {self._name} is there twice", self._name)
            return
        if part.filename not in FILES:
            if str(part.filename).endswith(PICKLES):
                raise missing_weights([str(part.filename)])
            message = f"file name {part.filename!r} is not one of {', '.join(FILES)}"
            raise ApiError("adapter_invalid", message, "files")
        if part.filename in self.files:
            raise invalid(f"file {part.filename} is there twice", "files")
        self.files.add(part.filename)
        self._file = await self._threads(open, self._folder / part.filename, "xb")

    async def _end(self) -> None:
        if self._file is not None:
            await self._write()
            await self.close()
            return
        try:
            self.texts[self._name] = b"".join(self._pending).decode()
        except UnicodeDecodeError as error:
            raise invalid(f"part {self._name} is not valid UTF-8", self._name) from error

    async def _write(self) -> None:
        data, self._pending, self._size = b"".join(self._pending), [], 0
        assert self._file is not None
        await self._threads(self._file.write, data)

    async def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            await self._threads(file.close)
