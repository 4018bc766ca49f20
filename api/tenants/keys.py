"""What a tenant's key looks like: made at random, recognised by its beginning, compared by its hash."""

from __future__ import annotations

import hashlib
import re
import secrets

MARK = "heddle-"
"""Every key begins with it, so that people, and tools that look for leaked secrets, see what it is."""
PREFIX_LENGTH = len(MARK) + 8
"""Characters that may be shown: the mark and 32 random bits that are no part of the secret."""

_FORM = re.compile(rf"{MARK}[0-9a-f]{{8}}-[A-Za-z0-9_-]{{43}}")


def new_key() -> str:
    """A key with 256 random bits of secret."""
    return f"{MARK}{secrets.token_hex(4)}-{secrets.token_urlsafe(32)}"


def prefix_of(key: str) -> str:
    return key[:PREFIX_LENGTH]


def sha256_of(key: str) -> str:
    """As 64 hex digits. A secret of 256 random bits cannot be guessed from it, so no slow hash is needed."""
    return hashlib.sha256(key.encode()).hexdigest()


def without_keys(text: str) -> str:
    """For logs: every key in it cut down to what may be shown."""
    return _FORM.sub(lambda found: prefix_of(found[0]), text) if MARK in text else text


def is_key(text: str) -> bool:
    """Whether it has the form of a tenant's key."""
    return _FORM.fullmatch(text) is not None
