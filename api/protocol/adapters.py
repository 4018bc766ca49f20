"""`/adapters`: what is sent and what an adapter looks like from outside."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec

from ..errors import invalid, wrong_value

Description = Annotated[str, msgspec.Meta(max_length=4096, pattern=r"^[^\x00]*$")]
"""PostgreSQL keeps no NUL in a text."""
Version = Annotated[int, msgspec.Meta(ge=1, le=999_999_999)]
"""As many digits as `name@version` takes."""
File = Annotated[Any, msgspec.Meta(extra_json_schema={"type": "string", "format": "binary"})]
Residency = Literal["device", "host", "disk"]
Status = Literal["ready", "loading", "failed", "incompatible"]


class AdapterFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a registration says besides the files themselves."""

    name: str
    pinned: bool | None = None
    replace: bool | None = None
    preload: bool | None = None
    """True: answered when it is on the device. False: loaded at its first request. Left out: brought there in
    the background."""
    description: Description | None = None


class AdapterCreate(AdapterFields, kw_only=True, forbid_unknown_fields=True):
    """A registration; the files come from `source` or with the call."""

    source: str | None = None
    """A folder below an adapter root, or `hf:org/name[@revision]`."""


class AdapterUpload(AdapterFields, kw_only=True, forbid_unknown_fields=True):
    """A registration in parts, with its files."""

    files: Annotated[list[File], msgspec.Meta(min_length=2)]
    """`adapter_config.json` and `adapter_model.safetensors`, by these file names."""


def from_parts(parts: dict[str, str]) -> AdapterCreate:
    """The text parts of an upload as the same fields; booleans are `true` or `false`."""
    fields: dict[str, str | bool] = dict(parts)
    for name in ("pinned", "replace", "preload"):
        if name in parts:
            if parts[name] not in ("true", "false"):
                raise invalid(f"{name} must be true or false", name)
            fields[name] = parts[name] == "true"
    try:
        return msgspec.convert(fields, AdapterCreate)
    except msgspec.ValidationError as error:
        raise wrong_value(error) from error


class AdapterPatch(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    pinned: bool | None = None
    description: Description | None = None
    version: Version | None = None


class AdapterLoad(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Nothing may be said."""


class AdapterEvict(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    to: Literal["host", "disk"] = "host"


class LoadLora(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `/v1/load_lora_adapter`."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None
    is_3d_lora_weight: bool | None = None
    """Of a mixture of experts, whose weights are stacked: true is refused."""

    def create(self) -> AdapterCreate:
        """The same registration in our fields. Raises `invalid_request`."""
        if self.is_3d_lora_weight:
            raise invalid("is_3d_lora_weight is not served here", "is_3d_lora_weight")
        return AdapterCreate(name=self.lora_name, source=self.lora_path, replace=self.load_inplace)


class UnloadLora(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `/v1/unload_lora_adapter`."""

    lora_name: str
    lora_int_id: int | None = None
    """vLLM's own number of it, which says nothing that the name does not; nor does it heed it."""


class Matched(msgspec.Struct):
    tensors: int
    """Understood."""
    total: int
    """In the file."""


class Adapter(msgspec.Struct, kw_only=True):
    """One version of an adapter; also the receipt of its registration."""

    id: str
    name: str
    tenant: str
    version: int | None
    digest: str
    status: Status
    error: str | None
    residency: Residency
    pinned: bool
    rank: int
    target_modules: list[str]
    size_bytes: int
    blocks: int
    """Held in the device pool now; in a dry run: what it would take."""
    matched: Matched
    warnings: list[str]
    base_model: str
    in_use: int
    """Requests."""
    requests: int
    tokens: int
    """Of prompts and answers together."""
    created_at: datetime
    last_used_at: datetime | None
    description: str | None


class AdapterList(msgspec.Struct):
    data: list[Adapter]
