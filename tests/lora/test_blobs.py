"""The blob stores, local and remote, and what a torn or rotten file does to them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from heddle.lora.blobs import Blobs, LocalBlobs, open_blobs
from heddle.lora.canonical import open_adapter, write
from heddle.lora.errors import AdapterCorrupt
from heddle.lora.inspect import inspect

from .peft_adapters import AdapterFolder, base_of


@pytest.fixture
def adapter(qv: AdapterFolder) -> tuple[str, Callable[[Path], None]]:
    """A digest and what writes its file."""
    spec = inspect(qv.path, base_of(2), max_rank=8, max_bytes=1 << 20)
    return spec.digest, lambda path: write(spec, qv.path, path)


@pytest.fixture(params=["local", "file url", "memory"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Blobs]:
    """Opens the same store anew each time, with an empty local cache where it has one."""
    url = {
        "local": None,
        "file url": f"file://{tmp_path}/shared",
        "memory": f"memory://{tmp_path.name}/blobs",
    }[request.param]
    number = iter(range(100))

    def open_again() -> Blobs:
        data = tmp_path / ("data" if url is None else f"data{next(number)}")
        return open_blobs(url, data, "this-registry")

    return open_again


def test_a_blob_is_there_for_everyone_who_opens_the_store(
    opened: Callable[[], Blobs], adapter: tuple[str, Callable[[Path], None]]
) -> None:
    digest, write_it = adapter
    blobs = opened()
    assert not blobs.exists(digest)
    with pytest.raises(AdapterCorrupt, match="missing"):
        blobs.path(digest)
    blobs.put(digest, write_it)
    blobs.put(digest, write_it)
    for store in (blobs, opened()):
        assert store.exists(digest)
        assert store.digests() == [digest]
        with open_adapter(store.path(digest)) as found:
            assert found.digest == digest
    blobs.delete(digest)
    blobs.delete(digest)
    assert not opened().exists(digest)
    assert opened().digests() == []


def test_a_writer_that_fails_leaves_nothing(
    opened: Callable[[], Blobs], adapter: tuple[str, Callable[[Path], None]], tmp_path: Path
) -> None:
    blobs = opened()

    def half(path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        blobs.put(adapter[0], half)
    assert blobs.digests() == []
    assert not blobs.exists(adapter[0])
    assert list(tmp_path.rglob(".writing-*")) == []


def test_a_rotten_local_file_is_written_anew(
    adapter: tuple[str, Callable[[Path], None]], tmp_path: Path
) -> None:
    digest, write_it = adapter
    blobs = LocalBlobs(tmp_path / "blobs")
    blobs.put(digest, write_it)
    whole = blobs.path(digest).read_bytes()
    blobs.path(digest).write_bytes(whole[:-1] + b"?")
    blobs.put(digest, write_it)
    assert blobs.path(digest).read_bytes() == whole


def test_a_rotten_remote_file_is_never_handed_out(
    adapter: tuple[str, Callable[[Path], None]], tmp_path: Path
) -> None:
    digest, write_it = adapter
    url = f"memory://{tmp_path.name}/rotten"
    open_blobs(url, tmp_path / "one", "r").put(digest, write_it)
    memory = fsspec.filesystem("memory")
    (file,) = memory.ls(f"/{tmp_path.name}/rotten/r", detail=False)
    memory.pipe_file(file, memory.cat_file(file)[:-1] + b"?")
    blobs = open_blobs(url, tmp_path / "two", "r")
    with pytest.raises(AdapterCorrupt, match="other bytes"):
        blobs.path(digest)


def test_registries_that_share_a_store_do_not_see_each_others_files(
    adapter: tuple[str, Callable[[Path], None]], tmp_path: Path
) -> None:
    digest, write_it = adapter
    url = f"file://{tmp_path}/shared"
    open_blobs(url, tmp_path, "one").put(digest, write_it)
    assert open_blobs(url, tmp_path, "two").digests() == []


def test_what_a_killed_writer_left_goes_and_a_living_writers_file_stays(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from heddle.lora.blobs import LocalBlobs
def write(path):
    path.write_bytes(b"half")
    print(path.name, flush=True)
    if sys.argv[2] == "die":
        os._exit(9)
    sys.stdin.read()
LocalBlobs(Path(sys.argv[1])).put("sha256:" + "0" * 64, write)
"""
    root = tmp_path / "blobs"

    def start(how: str) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(root), how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    living, living_name = start("wait")
    dead, dead_name = start("die")
    assert dead.wait(30) == 9
    assert {living_name, dead_name} <= set(os.listdir(root))
    LocalBlobs(root)
    assert [name for name in os.listdir(root) if name.startswith(".")] == [living_name]
    living.communicate("")
    assert living.returncode == 0
    assert os.listdir(root) == ["0" * 64 + ".safetensors"]


def test_a_file_that_somebody_keeps_is_not_deleted_by_anyone(
    opened: Callable[[], Blobs], adapter: tuple[str, Callable[[Path], None]]
) -> None:
    digest, write_it = adapter
    blobs = opened()
    assert blobs.keep(digest) is None
    blobs.put(digest, write_it)
    one, two = blobs.keep(digest), blobs.keep(digest)
    assert one is not None
    assert two is not None
    assert not blobs.delete(digest)
    one.close()
    assert not blobs.delete(digest)
    with open_adapter(blobs.path(digest)) as found:
        assert found.digest == digest
    two.close()
    assert blobs.delete(digest)
    assert blobs.keep(digest) is None
    assert blobs.delete(digest)


def test_a_file_is_kept_between_processes_and_a_killed_one_keeps_nothing(
    adapter: tuple[str, Callable[[Path], None]], tmp_path: Path
) -> None:
    digest, write_it = adapter
    blobs = LocalBlobs(tmp_path / "blobs")
    blobs.put(digest, write_it)
    script = """
import sys
from pathlib import Path
from heddle.lora.blobs import LocalBlobs
kept = LocalBlobs(Path(sys.argv[1])).keep(sys.argv[2])
print(kept is not None, flush=True)
sys.stdin.read()
"""
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "blobs"), digest],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "True\n"
    assert not blobs.delete(digest)
    other.kill()
    other.communicate()
    assert blobs.delete(digest)
    assert not blobs.exists(digest)
