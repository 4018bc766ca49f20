"""The exit status of every command: 2 for a command line that is wrong by itself, 1 for all that goes wrong then."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from heddle.api.cli import main


def leaves(
    command: click.Command, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from leaves(inner, (*words, name))
    else:
        yield words, command


COMMANDS = dict(leaves(main))
ARGUMENTS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("serve",): ("nowhere/",),
    ("generate",): ("nowhere/", "hello"),
    ("quantize",): ("nowhere/", "--method", "gptq", "-o", "out"),
    ("adapters", "add"): ("a", "hf:org/a"),
    ("keys", "create"): ("--tenant", "t"),
    ("keys", "list"): ("--tenant", "t"),
    ("keys", "revoke"): ("id", "--tenant", "t"),
}
"""What a good command line has besides; for all others a name where one is wanted."""


def line(words: tuple[str, ...]) -> list[str]:
    """A good command line, whose server is still to be named."""
    wanted = [
        param for param in COMMANDS[words].params if isinstance(param, click.Argument) and param.name != "url"
    ]
    return [*words, *ARGUMENTS.get(words, ("a",) * len(wanted))]


def at(words: tuple[str, ...], url: str) -> list[str]:
    """The same, of a server's command, with its server."""
    return [*line(words), url, "--model", "m"] if words == ("bench",) else [*line(words), "--url", url]


every = pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
OF_A_SERVER = [
    words for words, command in COMMANDS.items() if any(param.name == "url" for param in command.params)
]
every_of_a_server = pytest.mark.parametrize("words", OF_A_SERVER, ids=" ".join)
LOCAL = [("serve",), ("generate",), ("quantize",)]


def test_all_commands_are_looked_at():
    assert len(OF_A_SERVER) == 18
    assert set(COMMANDS) - set(OF_A_SERVER) == {*LOCAL, ("demo",), ("doctor",)}


@every
def test_a_flag_that_there_is_none_of_is_2(heddle, words):
    assert heddle(*line(words), "--no-such-flag").exit_code == 2


@every
def test_an_argument_too_many_is_2(heddle, words):
    assert heddle(*line(words), "http://a:1" if words == ("bench",) else "x", "y").exit_code == 2


@pytest.mark.parametrize(
    "words",
    [
        words
        for words, command in COMMANDS.items()
        if any(isinstance(param, click.Argument) for param in command.params)
    ],
    ids=" ".join,
)
def test_an_argument_that_is_missing_is_2(heddle, words):
    assert heddle(*words).exit_code == 2


FILES = [
    (words, param.opts[0])
    for words, command in COMMANDS.items()
    for param in command.params
    if isinstance(param.type, click.Path) and param.type.exists
]


def test_files_that_a_flag_reads_are_declared_so():
    assert FILES == [
        (("generate",), "--adapter"),
        (("quantize",), "--calibration"),
        (("bench",), "--dataset"),
    ]


@pytest.mark.parametrize(("words", "flag"), FILES, ids=str)
def test_a_flags_file_that_is_not_there_is_2(heddle, tmp_path, words, flag):
    url = ["http://127.0.0.1:1"] if words == ("bench",) else []
    result = heddle(*line(words), *url, flag, str(tmp_path / "nowhere"))
    assert result.exit_code == 2
    assert "does not exist" in " ".join(result.stderr.replace("\u2502", " ").split())


@pytest.mark.parametrize("words", LOCAL, ids=" ".join)
def test_a_model_that_is_nowhere_is_1(heddle, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = heddle(*line(words))
    assert result.exit_code == 1
    assert result.stderr.startswith("heddle: there is no file or folder 'nowhere/'")


@pytest.mark.parametrize("words", LOCAL, ids=" ".join)
def test_a_model_that_is_none_is_1(heddle, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("nowhere").mkdir()
    result = heddle(*line(words))
    assert result.exit_code == 1
    assert result.stderr.startswith("heddle: nowhere/ is a folder without config.json")


@every_of_a_server
def test_no_server_is_1(heddle, words):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        result = heddle(*at(words, url))
    assert result.exit_code == 1
    assert result.stderr.startswith("heddle: ")


@every_of_a_server
@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 429, 500, 503])
def test_a_refusal_is_1(heddle, server, words, status):
    server.refuse(status, "it is refused", "a_code")
    result = heddle(*at(words, server.url))
    assert result.exit_code == 1
    assert "it is refused" in result.stderr


@every_of_a_server
def test_an_address_that_is_none_is_2(heddle, words):
    assert heddle(*at(words, "nota url")).exit_code == 2


def test_a_source_that_is_nowhere_is_1(heddle, server, tmp_path):
    """It might lie on the hub or on the server."""
    for source in ("nowhere", "~nobody-of-this-name/x", str(tmp_path)):
        result = heddle("adapters", "add", "a", source, "--url", server.url)
        assert result.exit_code == 1
        assert source in result.stderr
    assert not server.asked
