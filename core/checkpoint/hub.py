"""Fetch a model from a hub through huggingface_hub: its cache, tokens, offline mode, resumed downloads."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import msgspec

from .cache import Progress
from .errors import CheckpointError

WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
UNWANTED = ["*/*", "consolidated*"]
"""Subfolders (other forms of the same weights) and Mistral's second copy. Nothing pickled is ever fetched."""


def fetch(repo: str, revision: str | None, *, cache_dir: Path | None, progress: Progress) -> Path:
    """The local folder of `repo`, complete. What is in the cache already is not fetched again.

    `cache_dir` None: the user's own Hugging Face cache. Raises `CheckpointError` for everything that can go
    wrong.
    """
    import huggingface_hub
    from huggingface_hub import errors

    name = repo if revision is None else f"{repo}@{revision}"
    try:
        folder = huggingface_hub.snapshot_download(
            repo,
            revision=revision,
            cache_dir=cache_dir,
            allow_patterns=WANTED,
            ignore_patterns=UNWANTED,
            tqdm_class=_bar_class(f"downloading {name}", progress),
            endpoint=os.environ.get("HF_ENDPOINT") or None,
        )
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{name} is gated: accept its terms on its page, then log in (`hf auth login`) or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{repo} has no revision {revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"there is no folder {repo!r} here, and no model {name} on the hub (a private one needs HF_TOKEN)"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{name} is not (completely) in the cache, and the hub cannot be reached: {error}"
        ) from error
    except errors.HFValidationError as error:
        raise CheckpointError(
            f"{name!r} is neither a folder here nor a model's name on a hub: {error}"
        ) from error
    except (errors.HTTPError, OSError) as error:
        raise CheckpointError(f"downloading {name} failed: {error}") from error
    _check_complete(Path(folder), name)
    return Path(folder)


def _check_complete(folder: Path, name: str) -> None:
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{name} has no config.json, so it is no model that can be served")
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{name} has no safetensors weights (pickled .bin and .pt files are not read)")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
        except msgspec.DecodeError as error:
            raise CheckpointError(f"{name}: {index.name} is not readable: {error}") from error
        missing = sorted(shard for shard in shards if not (folder / shard).is_file())
        if missing:
            raise CheckpointError(
                f"{name}: {len(missing)} weight files are missing, for instance {missing[0]}"
            )


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _bar_class(what: str, progress: Progress) -> type:
    """A tqdm class that draws nothing and reports the bytes written of all files together."""
    from huggingface_hub.utils import tqdm

    lock = threading.Lock()

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # Of the two byte bars the first counts what the network brought, the second what reached the
            # disk.
            self._counts = kwargs.get("unit") == "B" and str(kwargs.get("desc", "")).startswith(
                "Reconstructing"
            )
            self._written = 0
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            if self._counts:
                with lock:
                    self._written += int(n or 0)
                    progress(what, self._written, int(self.total or 0))

    return Bar
