"""One request to an OpenAI-style server, timed as its client sees it."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal

import aiohttp
import msgspec

from .plan import Shot

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The server, and how it wants to be asked."""

    url: str
    endpoint: Endpoint = "completions"
    model: str | None = None
    """What requests without an adapter name, and those with one where it has a field of its own."""
    adapter_field: Literal["model", "adapter"] = "model"
    """Where an adapter's name goes."""
    key: str | None = None
    ignore_eos: bool = False
    stream: bool = True
    timeout: float = 600.0
    """Seconds a request may take."""

    def body(self, shot: Shot) -> bytes:
        prompt = "messages" if self.endpoint == "chat" else "prompt"
        body: dict[str, Any] = {prompt: shot.text.prompt, "max_tokens": shot.text.max_tokens}
        if self.model is not None:
            body["model"] = self.model
        if shot.adapter is not None:
            body[self.adapter_field] = shot.adapter
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode(body)


class Sample(msgspec.Struct, kw_only=True):
    """What came of one request. Moments are seconds from the start of the run."""

    index: int
    adapter: str | None
    intended: float
    """When it should have been sent: what latencies count from."""
    sent: float
    first: float | None = None
    """When the first piece of text came; None without streaming, or where none came."""
    last: float | None = None
    """When the last one came."""
    finished: float = 0.0
    gaps: list[float] = []
    """Seconds between one piece of text and the next."""
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    """As the server counts; pieces where it does not say."""
    error: str | None = None
    """A stable code: the server's own, `http_500`, `connection_failed`, `disconnected`, `timeout`, `no_answer`."""
    message: str | None = None

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first is None else self.first - self.intended

    @property
    def end_to_end(self) -> float:
        return self.finished - self.intended

    @property
    def time_per_output_token(self) -> float | None:
        """Of those after the first; None where there are none."""
        if self.first is None or self.last is None or self.completion_tokens < 2:
            return None
        return (self.last - self.first) / (self.completion_tokens - 1)


class Refused(Exception):
    """The server answered, and not with what was asked for."""

    def __init__(self, code: str, message: str, status: int | None = None) -> None:
        """`status`: HTTP's, where it was none of success."""
        super().__init__(message)
        self.code = code
        self.status = status


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def has_text(self) -> bool:
        return bool(self.text or (self.delta and (self.delta.content or self.delta.reasoning_content)))


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None
    type: str | None = None


class _Answer(msgspec.Struct):
    """A whole answer, or one event of a stream."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Answer).decode


class Client:
    """Sends requests over as many connections as they need. Belongs to one event loop; `close` it."""

    def __init__(self, target: Target) -> None:
        self.target = target
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if target.key:
            headers["Authorization"] = f"Bearer {target.key}"
        self._path = target.url.rstrip("/").removesuffix("/v1") + PATHS[target.endpoint]
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=target.timeout),
            headers=headers,
            auto_decompress=False,
        )

    async def close(self) -> None:
        await self._session.close()

    async def send(self, shot: Shot, start: float, intended: float | None = None) -> Sample:
        """Never raises for what the server or the network does: that stands in the sample.

        `start`: the run's, of `time.perf_counter`. `intended`: None: now.
        """
        now = time.perf_counter() - start
        sample = Sample(
            index=shot.index,
            adapter=shot.adapter,
            intended=now if intended is None else intended,
            sent=now,
            gaps=[],
        )
        try:
            async with self._session.post(self._path, data=self.target.body(shot)) as response:
                if response.status != 200:
                    raise _refusal(response.status, await response.read())
                if self.target.stream:
                    await _read_stream(response.content, sample, start)
                else:
                    _take_whole(await response.read(), sample)
        except Refused as refused:
            sample.error, sample.message = refused.code, str(refused)
        except TimeoutError:
            sample.error, sample.message = "timeout", f"no whole answer within {self.target.timeout:g} s"
        except aiohttp.ClientConnectorError as error:
            sample.error, sample.message = "connection_failed", str(error)
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
            sample.error, sample.message = "disconnected", str(error) or type(error).__name__
        sample.finished = time.perf_counter() - start
        return sample


async def _read_stream(content: aiohttp.StreamReader, sample: Sample, start: float) -> None:
    """Events up to `[DONE]`; a stream that ends before it was cut off."""
    rest, pieces, over = b"", 0, False
    async for data in content.iter_any():
        now = time.perf_counter() - start
        *events, rest = (rest + data.replace(b"\r", b"")).split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if not line.startswith(b"data:"):
                    continue
                payload = line[5:].strip()
                if payload == b"[DONE]":
                    over = True
                elif _take_event(payload, sample):
                    pieces += 1
                    if sample.last is None:
                        sample.first = now
                    else:
                        sample.gaps.append(now - sample.last)
                    sample.last = now
    if not over:
        raise Refused("disconnected", "the stream ended before [DONE]")
    sample.completion_tokens = sample.completion_tokens or pieces


def _take_event(payload: bytes, sample: Sample) -> bool:
    """True where it carries text."""
    answer = _decoded(payload)
    if answer.usage is not None:
        _take_usage(answer.usage, sample)
    return any(choice.has_text() for choice in answer.choices)


def _take_whole(body: bytes, sample: Sample) -> None:
    answer = _decoded(body)
    if not answer.choices:
        raise Refused("no_answer", "the answer has no choices")
    if answer.usage is not None:
        _take_usage(answer.usage, sample)


def _take_usage(usage: _Usage, sample: Sample) -> None:
    sample.prompt_tokens = usage.prompt_tokens
    sample.completion_tokens = usage.completion_tokens or 0


def _decoded(data: bytes) -> _Answer:
    try:
        answer = _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Refused("no_answer", f"not an answer as OpenAI's: {data[:80]!r}") from error
    if answer.error is not None:
        raise _of(answer.error, None)
    return answer


def _refusal(status: int, body: bytes) -> Refused:
    try:
        error = msgspec.json.decode(body, type=_Answer).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        error = None
    words = "status 401: the API key is missing, or refused" if status == 401 else f"status {status}"
    return _of(error or _Error(words), status)


def _of(error: _Error, status: int | None) -> Refused:
    """By the server's own code, where it has a word for it."""
    code = error.code if isinstance(error.code, str) else None if status is not None else error.type
    return Refused(code or f"http_{status or error.code}", error.message, status)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def first_model(target: Target) -> str:
    """What the server lists first. Raises `Refused`."""
    headers = {"Authorization": f"Bearer {target.key}"} if target.key else {}
    url = target.url.rstrip("/").removesuffix("/v1") + "/v1/models"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30), headers=headers) as session,
            session.get(url) as response,
        ):
            body = await response.read()
            if response.status != 200:
                raise _refusal(response.status, body)
            return msgspec.json.decode(body, type=_Models).data[0].id
    except (msgspec.MsgspecError, IndexError) as error:
        raise Refused("no_answer", "it lists no models") from error
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise Refused("connection_failed", str(error) or type(error).__name__) from error
