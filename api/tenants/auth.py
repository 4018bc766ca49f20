"""Who is calling: the key of a request, or none, becomes a `Caller`."""

from __future__ import annotations

import hmac
import ipaddress
from functools import lru_cache
from urllib.parse import urlsplit

import msgspec

from ..errors import ApiError
from .directory import Directory
from .keys import is_key
from .records import PUBLIC

__all__ = ["PUBLIC", "Authenticator", "Caller"]


class Caller(msgspec.Struct, frozen=True):
    """On whose behalf a call is made. Every handler and service gets one."""

    tenant: str
    is_admin: bool
    key: str | None = None
    """`Tenant.key` of the one that was let in; None: whichever has the name when the call comes to its work."""


class Authenticator:
    """Checks the `Authorization` header: the admin key, or a tenant's. Without an admin key everyone is the admin.

    A server without an admin key listens on loopback alone, or was told that everyone may use it. What it must still
    refuse is a web page elsewhere that sends a user's browser to it. Such a call carries a foreign `Origin`, or, where
    the page's own name was pointed at this machine (DNS rebinding), a foreign `Host`.
    There too a tenant's key acts as that tenant, and one that opens nothing any more is refused, so that nobody's
    rights grow when a key ends. Any other key, as clients send where they must send some, counts as none.
    """

    def __init__(self, admin_key: str | None, *, anyone: bool = False) -> None:
        """`anyone`: without a key, calls under any host name are answered."""
        self._admin_key = None if admin_key is None else admin_key.encode()
        self._anyone = anyone

    @property
    def keyless(self) -> bool:
        return self._admin_key is None

    def authenticate(
        self,
        authorization: str | None,
        origin: str | None,
        host: str | None,
        directory: Directory | None = None,
    ) -> Caller:
        """Who is calling. `directory`: None as long as the tenants' keys are not known.

        Raises `invalid_api_key`, `permission_denied`, or `overloaded` for a key that may turn out to be a tenant's.
        """
        scheme, _, key = (authorization or "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        if self._admin_key is None:
            if is_key(key):
                return _tenant_of(key, directory)
            if not self._anyone and host and not _is_called_locally(host):
                raise ApiError(
                    "permission_denied",
                    f"without a key this server answers under local names alone, and was called as {host}",
                )
            if origin is not None and not _is_own(origin, host):
                raise ApiError("permission_denied", f"calls from web pages of {origin} are not allowed")
            return Caller(PUBLIC, is_admin=True)
        if not key:
            raise ApiError("invalid_api_key", "an API key is needed: Authorization: Bearer KEY")
        if hmac.compare_digest(key.encode(), self._admin_key):
            return Caller(PUBLIC, is_admin=True)
        return _tenant_of(key, directory)


def _tenant_of(key: str, directory: Directory | None) -> Caller:
    if directory is None and is_key(key):
        raise ApiError("overloaded", "the base model is still being loaded", retry_after=5)
    tenant = None if directory is None else directory.opened_by(key)
    if tenant is None:
        raise ApiError("invalid_api_key", "the API key is not valid")
    return Caller(tenant.name, is_admin=False, key=tenant.key)


INSIDE_TENANT = frozenset({"adapters", "v1", "tokenize", "detokenize", "tokenizer_info"})
"""What follows `/tenants/{t}/` in the paths that are the root's, inside that tenant."""
_ADMINS = frozenset({"metrics", "admin"})
_RESERVED = (".local", ".internal", ".localhost")
"""RFC 6762; ICANN's for private use; RFC 6761."""


def tenant_in(path: str) -> str | None:
    """The tenant inside which a path lies; None for the root's."""
    match _parts(path):
        case ["tenants", tenant, inside, *_] if inside in INSIDE_TENANT:
            return tenant
    return None


def check_allowed(caller: Caller, path: str) -> None:
    """Raises `permission_denied` for what the caller's key is not for, whether it exists or not."""
    if caller.is_admin:
        return
    match _parts(path):
        case [first, *_] if first in _ADMINS:
            raise ApiError("permission_denied", "this needs the admin key")
        case ["tenants", caller.tenant, inside, *_] if inside in INSIDE_TENANT or inside == "usage":
            return
        case ["tenants", *_]:
            raise ApiError(
                "permission_denied", "a tenant's key is for its own adapters, models and usage alone"
            )


def _parts(path: str) -> list[str]:
    """As the router reads it, to which slashes more or less are one."""
    return [part for part in path.split("/") if part]


def _is_own(origin: str, host: str | None) -> bool:
    """Whether a page of `origin` comes from this machine, or from the host name the call itself went to."""
    name = _name(origin)
    return is_loopback(name) or (name != "" and name == _name(f"//{host}"))


@lru_cache(maxsize=256)  # it is nearly always the same one
def _is_called_locally(host: str) -> bool:
    """Of a `Host` header."""
    return _is_local(_name(f"//{host}"))


def _is_local(host: str) -> bool:
    """Whether nobody on the internet can own this name: loopback, one word, or a suffix reserved for local use."""
    return (
        is_loopback(host) or (host != "" and "." not in host and ":" not in host) or host.endswith(_RESERVED)
    )


def _name(url: str) -> str:
    """The host in it; empty where there is none, or it is no URL."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, is this machine's own."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
