"""Folders of compiled kernels: held while a process uses them, removed when they are old or many."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from heddle.kernels.cpu.cache_folder import HOLD, KEPT, KEPT_SECONDS, hold, own_folder, prune, sources_digest

DAY = 24 * 3600


def made(root: Path, name: str, days: float) -> Path:
    """A folder of another version, last used so many days ago."""
    folder = root / f"kernels-{name}"
    (folder / "cpu_1").mkdir(parents=True)
    (folder / "cpu_1" / "kernel.nbc").write_bytes(b"code")
    (folder / HOLD).touch()
    used = time.time() - days * DAY
    os.utime(folder / HOLD, (used, used))
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where folders lie in this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "cache" / "heddle"
    root.mkdir(parents=True)
    return root


def sources(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "a.py").write_text(text)
    return folder


def test_a_new_version_removes_what_was_not_used_for_long(cache: Path, tmp_path: Path) -> None:
    recent, old = made(cache, "recent", days=29), made(cache, "old", days=31)
    other = cache / "v1"
    other.mkdir()
    own = own_folder(sources(tmp_path / "sources", "x = 1\n"))
    assert KEPT_SECONDS == 30 * DAY
    assert own is not None
    assert sorted(cache.iterdir()) == sorted([own, recent, other])
    assert not old.exists()


def test_of_many_versions_those_used_last_stay(cache: Path, tmp_path: Path) -> None:
    folders = [made(cache, f"{days:02}", days) for days in range(KEPT + 3)]
    own = own_folder(sources(tmp_path / "sources", "x = 1\n"))
    assert sorted(cache.iterdir()) == sorted([own, *folders[:KEPT]])


def test_an_old_folder_that_a_process_holds_stays(cache: Path, tmp_path: Path) -> None:
    """The process was started long ago, and may still look for kernels."""
    held = cache / "kernels-held"
    script = "import sys, pathlib; from heddle.kernels.cpu.cache_folder import hold\n"
    script += "file = hold(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script, str(held)]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "its own")}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        os.utime(held / HOLD, (0, 0))
        left = made(cache, "left", days=100)
        own_folder(sources(tmp_path / "sources", "x = 1\n"))
        assert held.is_dir()
        assert not left.exists()
        process.communicate()
    own_folder(sources(tmp_path / "sources", "x = 2\n"))
    assert not held.exists()


def test_using_a_folder_again_makes_it_recent_and_removes_nothing(cache: Path, tmp_path: Path) -> None:
    own = own_folder(sources(tmp_path / "sources", "x = 1\n"))
    assert own is not None
    os.utime(own / HOLD, (0, 0))
    old = made(cache, "old", days=100)
    assert own_folder(tmp_path / "sources") == own
    assert time.time() - (own / HOLD).stat().st_mtime < 60
    assert old.exists()


def test_a_folder_of_which_nobody_says_when_it_was_used_has_its_own_time(cache: Path) -> None:
    old, recent = cache / "kernels-old", cache / "kernels-recent"
    old.mkdir()
    recent.mkdir()
    os.utime(old, (0, 0))
    prune(cache, cache / "kernels-own")
    assert list(cache.iterdir()) == [recent]


def test_what_a_killed_process_had_begun_to_remove_is_removed(cache: Path) -> None:
    made(cache, "half.removed", days=0)
    prune(cache, cache / "kernels-own")
    assert not list(cache.iterdir())


def test_a_folder_removed_while_somebody_waits_for_it_is_made_again(cache: Path) -> None:
    folder = cache / "kernels-own"
    folder.mkdir()
    with (folder / HOLD).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        files = []
        waiting = threading.Thread(target=lambda: files.append(hold(folder)))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        folder.rename(cache / "kernels-own.removed")
    waiting.join(10)
    assert (folder / HOLD).is_file()
    [held] = files
    assert os.path.samestat(os.fstat(held.fileno()), (folder / HOLD).stat())
    held.close()


def test_a_changed_source_is_another_version(tmp_path: Path) -> None:
    """Also when only a file changed that others call into."""
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.py").write_text("y = 1\n")
    before = sources_digest(tmp_path)
    assert sources_digest(tmp_path) == before
    (tmp_path / "b.py").write_text("y = 2\n")
    changed = sources_digest(tmp_path)
    assert changed != before
    (tmp_path / "b.py").rename(tmp_path / "c.py")
    assert sources_digest(tmp_path) != changed
