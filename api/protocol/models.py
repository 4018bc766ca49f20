"""`/v1/models`."""

from __future__ import annotations

from typing import Literal

import msgspec


class Model(msgspec.Struct):
    """The base, or an adapter on it."""

    id: str
    created: int
    owned_by: str
    root: str | None
    """The base's folder, for those who may know it."""
    parent: str | None
    """The base, of an adapter."""
    max_model_len: int
    tenant: str | None = None
    """Whose adapter it is; the base is nobody's."""
    object: Literal["model"] = "model"


class ModelList(msgspec.Struct):
    data: list[Model]
    object: Literal["list"] = "list"
