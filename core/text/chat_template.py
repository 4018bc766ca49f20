"""Render chat messages with a model's own Jinja template, under transformers' conventions. Control code: no
torch.

A template comes with a model from anywhere, so it runs in Jinja's sandbox, with bounded output, repetitions
and ranges.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_OUTPUT_CHARS = 16 * 1024 * 1024
"""A rendered chat beyond this is refused; the longest prompt a model takes is far below."""
DEVELOPER = "developer"
"""OpenAI's later name for the role of system messages."""
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""What `template_kwargs` may not replace, besides the special tokens."""


class ChatTemplateError(ValueError):
    """The chat cannot be rendered; the message is for the caller and, where the template complains, its own.

    `param` names the request field at fault.
    """

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message)
        self.param = param


class ChatTemplate:
    """The chat templates of one model: `default`, and others by name (`tool_use` where tools are given).

    Compiled once; rendering keeps no state, so threads may share it.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: `bos_token` and the like, which templates may name.

        Raises `ChatTemplateError` for a template with a syntax error.
        """
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], autoescape=False
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.sources = dict(sources)
        self.tool_source = sources.get("tool_use", sources.get("default", ""))
        """The template that is used where tools are given."""
        self._knows_developers = any(DEVELOPER in source for source in sources.values())
        self._special_tokens = dict(special_tokens)
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise ChatTemplateError(
                    f"the chat template {name!r} has a syntax error in line {error.lineno}: {error.message}"
                ) from error
        self.takes_tools = "tool_use" in sources or "tools" in find_undeclared_variables(
            environment.parse(self.tool_source)
        )
        """It has a place for tools; one that has not leaves them out without a word."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of `messages`, which `chat_messages.normalise_messages` has checked.

        Raises `ChatTemplateError` with the template's own words where it refuses the messages.
        """
        template = self._choose(tools)
        extra = dict(template_kwargs or {})
        if taken := sorted(extra.keys() & (RESERVED | self._special_tokens.keys())):
            raise ChatTemplateError(
                f"the template argument {taken[0]!r} is set by the server", "chat_template_kwargs"
            )
        parts: list[str] = []
        size = 0
        try:
            for part in template.generate(
                messages=[self._in_known_role(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
                **extra,
            ):
                size += len(part)
                if size > MAX_OUTPUT_CHARS:
                    raise ChatTemplateError(f"the rendered chat is longer than {MAX_OUTPUT_CHARS} characters")
                parts.append(part)
        except _RaisedByTemplate as error:
            raise ChatTemplateError(str(error)) from error
        except (
            jinja2.TemplateError,
            TypeError,
            AttributeError,
            LookupError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise ChatTemplateError(f"the chat template failed on these messages: {error}") from error
        return "".join(parts)

    def _in_known_role(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A developer's message is a system's to templates that know no developers: most would leave it out."""
        if message["role"] == DEVELOPER and not self._knows_developers:
            return {**message, "role": "system"}
        return dict(message)

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> jinja2.Template:
        if tools is not None and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        names = ", ".join(sorted(self._templates))
        raise ChatTemplateError(f"the model has chat templates for {names}, and none to use by default")


class _RaisedByTemplate(jinja2.TemplateError):
    """`raise_exception` was called: the template refuses the messages."""


def _raise_exception(message: object) -> None:
    raise _RaisedByTemplate(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Like transformers' filter: unlike Jinja's own it keeps <, > and & as they are."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox (nothing of Python's inside, no mutation, short ranges); repetition is bounded too."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(right, int) and abs(right) > 64:
            raise jinja2.exceptions.SecurityError("exponent too large")
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                repeats = isinstance(sequence, str | list | tuple) and isinstance(count, int)
                if repeats and len(sequence) * count > MAX_OUTPUT_CHARS:
                    raise jinja2.exceptions.SecurityError("repetition too large")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks words for training; in a prompt it changes nothing."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body, lineno=line)
