"""The repository keeps its own promises: floors, packaging, a server process without torch."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ("api", "core", "quant", "lora", "kernels")


def test_every_package_folder_is_listed_for_installation():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {"heddle"}
    for floor in FLOORS:
        for init in (ROOT / floor).rglob("__init__.py"):
            found.add("heddle." + ".".join(init.parent.relative_to(ROOT).parts))
    assert set(settings["packages"]) == found
    assert set(settings["package-dir"]) == found


def test_no_folder_of_ours_answers_to_a_bare_top_level_name():
    """transformers imports a package called `kernels`; it must never get ours."""
    script = "import importlib.util as u; s = u.find_spec('kernels'); print(s.origin if s else None)"
    found = subprocess.run(
        [sys.executable, "-c", script], cwd="/", capture_output=True, text=True, check=True
    )
    assert str(ROOT) not in found.stdout
    spec = importlib.util.find_spec("kernels")
    assert spec is None or str(ROOT) not in str(spec.origin)


def _copy_of_the_package(target: Path) -> Path:
    package = target / "heddle"
    for floor in FLOORS:
        shutil.copytree(ROOT / floor, package / floor, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "__init__.py", package / "__init__.py")
    shutil.copy(ROOT / ".importlinter", target / ".importlinter")
    return package


def _lint(folder: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("lint-imports")
    env = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [program, "--no-cache"], cwd=folder, env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("file", "planted"),
    [
        (None, ""),
        ("lora/base.py", "from ..core import config"),
        ("quant/__init__.py", "from ..lora import base"),
        ("kernels/pool.py", "from ..api import cli"),
        ("core/messages.py", "import torch"),
        ("api/__init__.py", "from ..core import llm"),
        ("api/auth.py", "import torch"),
    ],
)
def test_an_import_across_the_floors_is_caught(tmp_path: Path, file: str | None, planted: str):
    package = _copy_of_the_package(tmp_path)
    if file is not None:
        with (package / file).open("a") as source:
            source.write(f"\n{planted}\n")
    assert (_lint(tmp_path).returncode == 0) == (file is None)


def test_importing_the_server_loads_no_torch():
    script = "import sys, heddle, heddle.api.server, heddle.api.cli; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
