"""Answers in OpenAI's two shapes, whole or in chunks, made from choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from ...core.text.tokenizer import Tokenizer
from ..protocol import chat, completions
from ..protocol.chat import ChatChunk, ChatChunkChoice, ChatResponse
from ..protocol.completions import CompletionChoice, CompletionResponse
from ..protocol.generation import Usage
from ..protocol.tools import FunctionCall, FunctionCallDelta, ToolCall, ToolCallDelta
from ..tools.parser import CallPiece
from .choices import Choice, Delta
from .logprobs import Entry, for_chat, for_completion, prompt_offsets
from .selection import Selection


class Heading(msgspec.Struct, frozen=True):
    """What every body of one answer repeats."""

    id: str
    created: int
    selection: Selection
    with_logprobs: bool
    usage_in_stream: bool
    """Chunks carry a `usage`: null, but in the last one."""
    usage_in_chunks: bool = False
    """And what it is so far in each."""
    echo: bool = False

    def chunk_usage(self, usage: Usage | None = None) -> Usage | UnsetType | None:
        return usage if self.usage_in_stream else UNSET


class Writer(Protocol):
    """One answer's shape."""

    def chunk(self, choice: Choice, delta: Delta, usage: Usage | None) -> msgspec.Struct | None:
        """A piece of a stream, with the `usage` so far; None where there is nothing to say yet."""

    def last_chunk(self, usage: Usage) -> msgspec.Struct:
        """The one without choices, for who asked for `usage`."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> msgspec.Struct:
        """The answer at once; `choices` get their indexes in this order."""


@dataclass
class CompletionWriter:
    heading: Heading
    tokenizer: Tokenizer
    _begun: set[int] = field(default_factory=set)

    def chunk(self, choice: Choice, delta: Delta, usage: Usage | None) -> CompletionResponse | None:
        text, entries = delta.text, delta.entries
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            text, entries = self._echo(choice) + text, self._echo_entries(choice) + entries
        if not text and not entries and not choice.finished:
            return None
        piece = self._choice(choice.index, choice, text, entries)
        return self._body([piece], self.heading.chunk_usage(usage))

    def last_chunk(self, usage: Usage) -> CompletionResponse:
        return self._body([], self.heading.chunk_usage(usage))

    def whole(self, choices: Sequence[Choice], usage: Usage) -> CompletionResponse:
        return self._body(
            [
                self._choice(
                    index,
                    choice,
                    self._echo(choice) + choice.text,
                    self._echo_entries(choice) + choice.entries,
                )
                for index, choice in enumerate(choices)
            ],
            usage,
        )

    def _choice(self, index: int, choice: Choice, text: str, entries: list[Entry]) -> CompletionChoice:
        logprobs = for_completion(entries, self.tokenizer) if self.heading.with_logprobs else None
        return CompletionChoice(index, text, logprobs, choice.finish_reason, choice.stop_reason)

    def _body(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> CompletionResponse:
        head = self.heading
        return completions.CompletionResponse(
            id=head.id,
            object="text_completion",
            created=head.created,
            model=head.selection.model,
            adapter=head.selection.label,
            choices=choices,
            usage=usage,
        )

    def _echo(self, choice: Choice) -> str:
        return choice.prompt.text or "" if self.heading.echo else ""

    def _echo_entries(self, choice: Choice) -> list[Entry]:
        if not (self.heading.echo and self.heading.with_logprobs):
            return []
        ids = choice.prompt.token_ids
        offsets = prompt_offsets(choice.prompt.text or "", ids, self.tokenizer)
        return [Entry(*triple) for triple in zip(ids, offsets, choice.prompt_logprobs)]


@dataclass
class ChatWriter:
    heading: Heading
    tokenizer: Tokenizer
    _begun: set[int] = field(default_factory=set)

    def chunk(self, choice: Choice, delta: Delta, usage: Usage | None) -> ChatChunk | None:
        content = chat.ChatDelta(content=delta.text or None)
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            content = chat.ChatDelta(role="assistant", content=delta.text)
        elif not delta.text and not delta.entries and not delta.calls and not choice.finished:
            return None
        if delta.calls:
            content.tool_calls = _call_deltas(delta.calls)
        logprobs = for_chat(delta.entries, self.tokenizer) if self.heading.with_logprobs else None
        piece = ChatChunkChoice(choice.index, content, logprobs, choice.finish_reason, choice.stop_reason)
        return self._chunk([piece], self.heading.chunk_usage(usage))

    def last_chunk(self, usage: Usage) -> ChatChunk:
        return self._chunk([], self.heading.chunk_usage(usage))

    def whole(self, choices: Sequence[Choice], usage: Usage) -> ChatResponse:
        head = self.heading
        return ChatResponse(
            id=head.id,
            object="chat.completion",
            created=head.created,
            model=head.selection.model,
            adapter=head.selection.label,
            choices=[self._choice(index, choice) for index, choice in enumerate(choices)],
            usage=usage,
        )

    def _choice(self, index: int, choice: Choice) -> chat.ChatChoice:
        assert choice.finish_reason is not None
        logprobs = for_chat(choice.entries, self.tokenizer) if self.heading.with_logprobs else None
        message = chat.ChatMessage("assistant", choice.text)
        if choice.calls:
            message.content = choice.text or None
            message.tool_calls = [
                ToolCall(call.id, "function", FunctionCall(call.name, call.arguments))
                for call in choice.calls
            ]
        return chat.ChatChoice(index, message, logprobs, choice.finish_reason, choice.stop_reason)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        head = self.heading
        return ChatChunk(
            id=head.id,
            object="chat.completion.chunk",
            created=head.created,
            model=head.selection.model,
            adapter=head.selection.label,
            choices=choices,
            usage=usage,
        )


def _call_deltas(pieces: Sequence[CallPiece]) -> list[ToolCallDelta]:
    """One entry a call: clients take a chunk's list for calls, not for pieces."""
    deltas: dict[int, ToolCallDelta] = {}
    for piece in pieces:
        if piece.begins is not None:
            function = FunctionCallDelta(piece.begins.name, "")
            deltas[piece.index] = ToolCallDelta(piece.index, function, piece.begins.id, "function")
        delta = deltas.setdefault(piece.index, ToolCallDelta(piece.index, FunctionCallDelta(arguments="")))
        delta.function.arguments = (delta.function.arguments or "") + piece.arguments
    return list(deltas.values())
