"""Fixtures: bases and adapters of the LoRA tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from heddle.lora.base import BaseModel
from heddle.lora.store import AdapterStore

from .peft_adapters import AdapterFolder, base_of, lora_layers, make_peft, tiny_llama


@pytest.fixture(scope="session")
def base() -> BaseModel:
    return base_of(2)


@pytest.fixture(scope="session")
def base12() -> BaseModel:
    return base_of(12)


@pytest.fixture(scope="session")
def save_adapter(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, dict[str, float]]]:
    """`save_adapter(layers=2, seed=0, **lora_config)` -> (folder PEFT wrote, PEFT's scale of each module
    path)."""

    def make(layers: int = 2, seed: int = 0, **config: Any) -> tuple[Path, dict[str, float]]:
        folder = tmp_path_factory.mktemp("adapter")
        wrapped = make_peft(tiny_llama(layers), config, seed)
        wrapped.save_pretrained(folder)
        scales = {path: float(layer.scaling["default"]) for path, layer in lora_layers(wrapped).items()}
        return folder, scales

    return make


@pytest.fixture(scope="session")
def _qv(save_adapter: Callable[..., tuple[Path, dict[str, float]]]) -> Path:
    return save_adapter(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"])[0]


@pytest.fixture
def qv(_qv: Path, tmp_path: Path) -> AdapterFolder:
    """A rank-2 adapter on q and v of the two-layer model, scale 2, written by PEFT."""
    return AdapterFolder(Path(shutil.copytree(_qv, tmp_path / "qv")))


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> str | None:
    """An empty registry's URL; None: SQLite in the data folder."""
    return None if request.param == "sqlite" else request.getfixturevalue("postgres").new_database()


@pytest.fixture
def open_store(database: str | None, tmp_path: Path) -> Iterator[Callable[..., AdapterStore]]:
    """Opens the same registry again and again, as several server processes would."""
    opened: list[AdapterStore] = []

    def open_it(base: BaseModel | None = None, **options: Any) -> AdapterStore:
        store = AdapterStore.open(tmp_path / "data", base or base_of(2), database=database, **options)
        opened.append(store)
        return store

    yield open_it
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Callable[..., AdapterStore]) -> AdapterStore:
    return open_store(reserved_names=["tiny"], max_rank=64)


@pytest.fixture
def folders(qv: AdapterFolder, tmp_path: Path) -> list[Path]:
    """Three folders with different weights."""
    made = []
    for number in range(3):
        folder = AdapterFolder(Path(shutil.copytree(qv.path, tmp_path / f"adapter{number}")))
        folder.store({name: value + number for name, value in folder.tensors.items()})
        made.append(folder.path)
    return made
