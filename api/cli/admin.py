"""Calls to a running server, as the admin commands make them: one call, one decoded answer, or a refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
import rich_click as click

from .failure import REFUSED, USAGE, fail
from .values import ServerUrl

FILES = ("adapter_config.json", "adapter_model.safetensors")
"""What an adapter's folder is uploaded as."""

Command = TypeVar("Command", bound=Callable[..., object])


class _Error(msgspec.Struct):
    message: str
    code: str | None = None


class _Refusal(msgspec.Struct):
    error: _Error


class Server(msgspec.Struct, frozen=True):
    """Where the server is, and as whom it is asked."""

    url: str
    key: str | None
    tenant: str | None

    def path(self, *parts: str) -> str:
        """The path of /adapters/…, inside the tenant where one was given; each part is escaped."""
        scope = ("tenants", self.tenant) if self.tenant else ()
        return _path(*scope, "adapters", *parts)

    def tenant_path(self, *parts: str) -> str:
        """The path of /tenants/…; each part is escaped."""
        return _path("tenants", *parts)

    def keys_path(self, *parts: str) -> str:
        """The path of the tenant's keys. Ends the command with status 2 where no tenant was given."""
        if not self.tenant:
            fail("--tenant NAME is missing: whose keys?", USAGE)
        return _path("tenants", self.tenant, "keys", *parts)

    def call(self, method: str, path: str, **request: Any) -> Any:
        """The decoded JSON answer, None where it is empty. Ends the command with status 1 on a refusal."""
        import httpx

        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        timeout = httpx.Timeout(10.0, read=None, write=None)  # loading an adapter takes as long as it takes
        try:
            with httpx.Client(base_url=self.url, headers=headers, timeout=timeout) as client:
                response = client.request(method, path, **request)
        except httpx.InvalidURL as error:
            fail(f"--url {self.url}: {error}", USAGE)
        except httpx.TransportError as error:
            fail(f"no answer from {self.url}: {error}", REFUSED)
        if response.is_success:
            if not response.content:
                return None
            try:
                return response.json()
            except ValueError:
                fail(
                    f"{self.url}{path} answered with something else than JSON: is it a Heddle server?",
                    REFUSED,
                )
        fail(_reason(response.status_code, response.content), REFUSED)

    def upload(self, name: str, folder: Path, fields: dict[str, Any], dry_run: bool) -> Any:
        """Register the PEFT folder under `name`; its files are read and sent piece by piece.

        Ends the command with status 1 where they cannot be read.
        """
        parts = {"name": name} | {key: _as_part(value) for key, value in fields.items()}
        try:
            with ExitStack() as stack:
                files = [("files", (file, stack.enter_context((folder / file).open("rb")))) for file in FILES]
                return self.call("POST", self.path(), data=parts, files=files, params=_query(dry_run))
        except OSError as error:
            fail(f"{error.filename or folder}: {error.strerror or error}", REFUSED)

    def register(self, name: str, source: str, fields: dict[str, Any], dry_run: bool) -> Any:
        """Register under `name` what the server itself finds at `source`."""
        body = {"name": name, "source": source} | fields
        return self.call("POST", self.path(), json=body, params=_query(dry_run))


def _path(*parts: str) -> str:
    return "/" + "/".join(quote(part, safe="@") for part in parts)


def _query(dry_run: bool) -> dict[str, str]:
    return {"dry_run": "true"} if dry_run else {}


def _as_part(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _reason(status: int, body: bytes) -> str:
    """The server's own message and code; the status alone where the body is nobody's error object."""
    try:
        error = msgspec.json.decode(body, type=_Refusal).error
    except msgspec.MsgspecError:
        return f"the server answered with status {status}"
    return f"{error.message} ({error.code or status})"


def command_of(
    group: click.Group, *, in_tenant: bool = True
) -> Callable[[Callable[..., None]], click.Command]:
    """Makes a function a subcommand that is given `server` and `as_json` in place of the connection's options.

    `in_tenant`: --tenant is one of them.
    """

    def decorate(run: Callable[..., None]) -> click.Command:
        @wraps(run)
        def with_server(url: str, key: str | None, tenant: str | None = None, **arguments: Any) -> None:
            run(server=Server(url, key, tenant), **arguments)

        return group.command(run.__name__.rstrip("_"))(_connection_options(with_server, in_tenant))

    return decorate


def print_json(answer: Any) -> None:
    click.echo(json.dumps(answer, indent=2, ensure_ascii=False))


def print_details(answer: Any, as_json: bool) -> None:
    """Every field of one thing, a line each."""
    from .render import details, show

    if as_json:
        print_json(answer)
    else:
        show(details(answer))


def _connection_options(command: Command, in_tenant: bool) -> Command:
    options = [
        click.option(
            "--url",
            type=ServerUrl(),
            envvar="HEDDLE_URL",
            default="http://127.0.0.1:8000",
            show_default=True,
            show_envvar=True,
            help="The server's address.",
        ),
        click.option(
            "--key", envvar="HEDDLE_ADMIN_KEY", show_envvar=True, help="The admin key, or a tenant's key."
        ),
        click.option("--tenant", help="Act inside this tenant."),
        click.option("--json", "as_json", is_flag=True, help="Print the server's answer as JSON."),
    ]
    if not in_tenant:
        del options[2]
    for option in reversed(options):
        command = option(command)
    return command
