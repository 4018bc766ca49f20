"""Who is calling: the key of a request, or none, becomes a `Caller`."""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

import msgspec

from .errors import ApiError

PUBLIC = "public"
"""The tenant everyone shares."""


class Caller(msgspec.Struct, frozen=True):
    """On whose behalf a call is made. Every handler and service gets one."""

    tenant: str
    is_admin: bool


class Authenticator:
    """Checks the `Authorization` header against the configured admin key; without one everyone is the admin.

    A server without a key listens on loopback alone, or was told that everyone may use it. What it must still
    refuse is a web page elsewhere that sends a user's browser to it: such a call carries a foreign `Origin`.
    """

    def __init__(self, admin_key: str | None) -> None:
        self._admin_key = None if admin_key is None else admin_key.encode()

    @property
    def keyless(self) -> bool:
        return self._admin_key is None

    def authenticate(self, authorization: str | None, origin: str | None, host: str | None) -> Caller:
        """Raises `invalid_api_key` or `permission_denied`."""
        if self._admin_key is None:
            if origin is not None and not _is_own(origin, host):
                raise ApiError("permission_denied", f"calls from web pages of {origin} are not allowed")
            return Caller(PUBLIC, is_admin=True)
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiError("invalid_api_key", "an API key is needed: Authorization: Bearer KEY")
        if not hmac.compare_digest(key.strip().encode(), self._admin_key):
            raise ApiError("invalid_api_key", "the API key is not valid")
        return Caller(PUBLIC, is_admin=True)


def _is_own(origin: str, host: str | None) -> bool:
    """Whether a page of `origin` comes from this machine, or from the host name the call itself went to."""
    try:
        name = urlsplit(origin).hostname or ""
        return is_loopback(name) or name == urlsplit(f"//{host}").hostname
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, is this machine's own."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
