"""The `heddle` command as a whole: its version, its help, and what its processes never load."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numba", "numpy", "sqlalchemy", "uvicorn", "litestar")


def loaded_by(*args: str) -> tuple[int, set[str]]:
    """Exit status of `heddle args` in its own process, and the top-level modules loaded at its end."""
    code = (
        "import json, sys\n"
        "from heddle.api.cli import main\n"
        "try:\n"
        f"    main({list(args)!r}, prog_name='heddle')\n"
        "except SystemExit as end:\n"
        "    print(json.dumps([end.code, sorted({name.partition('.')[0] for name in sys.modules})]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    status, modules = json.loads(done.stdout.splitlines()[-1])
    return status, set(modules)


@pytest.mark.parametrize("args", ["--help", "serve --help", "demo --help", "adapters list --help"])
def test_help_loads_nothing_heavy(args):
    status, modules = loaded_by(*args.split())
    assert status == 0
    assert "rich_click" in modules
    assert modules.isdisjoint(HEAVY)


def test_the_serving_process_has_not_loaded_torch_when_it_hands_over(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    code = (
        "import sys\n"
        "from types import SimpleNamespace\n"
        "sys.modules['heddle.api.server'] = SimpleNamespace(\n"
        "    run=lambda config, **_: 40 + ('torch' in sys.modules))\n"
        "from heddle.api.cli import main\n"
        f"main(['serve', {str(tmp_path)!r}], prog_name='heddle')\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 40


def test_version(heddle):
    import heddle as package

    result = heddle("--version")
    assert result.exit_code == 0
    assert package.__version__ in result.stdout


def test_the_package_itself_is_the_command():
    import heddle as package

    for args, words in ((["--version"], package.__version__), (["keys", "--help"], "keys")):
        done = subprocess.run(
            [sys.executable, "-m", "heddle", *args],
            cwd="/",
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert words in done.stdout
    done = subprocess.run(
        [sys.executable, "-m", "heddle", "frobnicate"], cwd="/", capture_output=True, check=False
    )
    assert done.returncode == 2


@pytest.mark.parametrize("args", [["frobnicate"], ["adapters", "frobnicate"], ["adapters", "show"]])
def test_what_is_no_command_is_status_2(heddle, args):
    assert heddle(*args).exit_code == 2


ASKING = [
    *(
        "adapters list",
        "adapters show a",
        "adapters load a",
        "adapters evict a",
        "adapters pin a",
        "adapters unpin a",
    ),
    *("adapters remove a", "adapters versions a", "adapters add a hf:org/a"),
    *("tenants list", "tenants create t", "tenants show t", "tenants update t", "tenants remove t"),
    *("keys create --tenant t", "keys list --tenant t", "keys revoke --tenant t k"),
]


@pytest.mark.parametrize("command", [*(f"{one} --url" for one in ASKING), "bench"])
def test_an_address_that_is_none_is_wrong_usage_of_every_command(heddle, command):
    result = heddle(*command.split(), "notaurl")
    assert result.exit_code == 2
    words = " ".join(result.output.replace("\u2502", " ").split())
    assert "'notaurl' is not a server's address: give http://HOST:PORT" in words
