"""Kinds of values that flags take: sizes in bytes, finite numbers, servers' addresses, and adapters as NAME=PATH."""

from __future__ import annotations

import json
import math
from typing import Any
from urllib.parse import urlsplit

import rich_click as click

from ...core import byte_size


class ByteSize(click.ParamType):
    """A number of bytes: 1000000, 512MiB, 1.5GB."""

    name = "bytes"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return byte_size.parse(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class FiniteRange(click.FloatRange):
    """A number within bounds; nan and inf are none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class ServerUrl(click.ParamType):
    """A server's address: http://HOST[:PORT][/PATH], https too; HOST:PORT alone is http. No slash is left at its
    end."""

    name = "url"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value).rstrip("/")
        whole = "://" in text
        url = text if whole else f"http://{text}"
        try:
            parts = urlsplit(url)
            known = parts.scheme in ("http", "https") and (whole or parts.port is not None)
            host = parts.hostname if known and (parts.port is None or parts.port > 0) else None
        except ValueError:  # a port that is no number, a bracket that is not closed
            host = None
        if not host or any(character.isspace() for character in url):
            self.fail(f"{value!r} is not a server's address: give http://HOST:PORT", param, ctx)
        return url


class NamedPath(click.ParamType):
    """One adapter: NAME=PATH, or vLLM's JSON form {"name": …, "path": …}."""

    name = "name=path"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        text = str(value)
        if text.startswith("{"):
            try:
                fields = json.loads(text)
            except json.JSONDecodeError as error:
                self.fail(f"{text!r} is not JSON: {error}", param, ctx)
            name, path = fields.get("name"), fields.get("path")
        else:
            name, _, path = text.partition("=")
        if not (isinstance(name, str) and name and isinstance(path, str) and path):
            self.fail(f"{text!r} does not name an adapter: give NAME=PATH", param, ctx)
        return name, path
