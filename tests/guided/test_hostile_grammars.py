"""The nastiest grammars there are: each is refused or followed, within bounds, and nobody is hurt."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from heddle.api.generation import grammar_checker
from heddle.api.generation.grammar_checker import GrammarChecker
from heddle.core.text.check_grammars import Item
from heddle.core.text.grammar import MAX_SOURCE_BYTES, Grammar, GrammarError

from .conftest import END_IDS, VOCAB


def _chain(length: int, link: Callable[[dict[str, str]], dict[str, Any]]) -> str:
    """Definitions that each refer to the next one."""
    schemas = {f"a{i}": link({"$ref": f"#/$defs/a{i + 1}"}) for i in range(length)}
    return json.dumps({"$defs": {**schemas, f"a{length}": {"type": "string"}}, "$ref": "#/$defs/a0"})


def _longest_chain() -> str:
    """The deepest recursion that fits: nested as deep as JSON may be, and then a reference to the next one."""
    deep, schemas, size = 50, {}, 0
    while size < MAX_SOURCE_BYTES - 8000:
        name = f"{len(schemas)}"
        text = '{"items":' * deep + f'{{"$ref":"#/$defs/{len(schemas) + 1}"}}' + "}" * deep
        schemas[name] = text
        size += len(text) + len(name) + 4
    body = ",".join(f'"{name}":{text}' for name, text in schemas.items())
    return f'{{"$defs":{{{body},"{len(schemas)}":{{}}}},"$ref":"#/$defs/0"}}'


HOSTILE: dict[str, Callable[[], tuple[str, str]]] = {
    "schema nested thousands deep": lambda: ("json", '{"items":' * 6000 + "{}" + "}" * 6000),
    "references in a long chain": lambda: ("json", _chain(1000, lambda ref: {"type": "array", "items": ref})),
    "the longest chain there is": lambda: ("json", _longest_chain()),
    "references that double": lambda: ("json", _chain(30, lambda ref: {"allOf": [ref, ref]})),
    "objects that double": lambda: (
        "json",
        _chain(25, lambda ref: {"properties": {"x": ref, "y": ref}, "allOf": [{"properties": {"x": ref}}]}),
    ),
    "a reference to itself": lambda: ("json", '{"$ref": "#"}'),
    "allOf of itself": lambda: ("json", '{"allOf": [{"$ref": "#"}, {"type": "object"}]}'),
    "lists of lists without an end": lambda: (
        "json",
        '{"type": "array", "items": {"$ref": "#"}, "minItems": 1}',
    ),
    "alternatives multiplied": lambda: (
        "json",
        json.dumps(
            {
                "allOf": [
                    {"anyOf": [{"type": "object", "properties": {f"p{i}{j}": {}}} for j in range(6)]}
                    for i in range(12)
                ]
            }
        ),
    ),
    "huge lengths": lambda: ("json", '{"type": "string", "minLength": 1000000000}'),
    "huge lists": lambda: ("json", '{"type": "array", "minItems": 100000000, "items": {"type": "string"}}'),
    "huge objects": lambda: ("json", '{"type": "object", "minProperties": 100000000}'),
    "negative lengths": lambda: ("json", '{"type": "array", "maxItems": -1}'),
    "multiples of primes": lambda: (
        "json",
        '{"type": "integer", "allOf": [{"multipleOf": 7919}, {"multipleOf": 7907}]}',
    ),
    "tiny multiples": lambda: ("json", '{"type": "number", "multipleOf": 1e-300}'),
    "huge bounds": lambda: ("json", '{"type": "number", "minimum": 1e308, "maximum": 1.7e308}'),
    "thousands of properties": lambda: (
        "json",
        json.dumps({"type": "object", "required": [f"p{i}" for i in range(6000)]}),
    ),
    "hundreds of optional properties": lambda: (
        "json",
        json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}}),
    ),
    "thousands of values": lambda: ("json", json.dumps({"enum": [{"a": [i] * 5} for i in range(1700)]})),
    "patterns of properties": lambda: (
        "json",
        json.dumps(
            {"type": "object", "patternProperties": {f"^(.*{c}.{{20}})$": {} for c in "abcdefghijklmnop"}}
        ),
    ),
    "patterns all at once": lambda: (
        "json",
        json.dumps({"type": "string", "allOf": [{"pattern": f".*a.{{{i}}}b.*"} for i in range(30, 60)]}),
    ),
    "brackets thousands deep": lambda: ("regex", "(" * 30_000 + "a" + ")" * 30_000),
    "brackets hundreds deep": lambda: ("regex", "(" * 200 + "a" + ")" * 200),
    "repeated repeats": lambda: ("regex", "((((a{1000}){1000}){1000}){1000}){1000}"),
    "optional repeats": lambda: ("regex", "((((ab?c){1,1000}d){1,1000}e){1,1000}f){1,1000}"),
    "stars of stars": lambda: ("regex", "(a|aa|a*)*{1000}b"),
    "a far look back": lambda: ("regex", "(.*a.{20})"),
    "far look backs": lambda: ("regex", "|".join(f".*{i}.*{i + 1}.*" for i in range(3000))),
    "counts of classes": lambda: ("regex", "(.{0,1000}[a-z]){0,100}x"),
    "gaps": lambda: ("regex", "(.*[ab].{30}[cd].{30}){5}"),
    "all of Unicode": lambda: ("regex", r"(\p{L}\p{N}\w\W\s\S\d\D.){500}"),
    "a large class": lambda: (
        "regex",
        "[" + "".join(chr(0x4E00 + 2 * i) for i in range(15_000)) + "]{1,100}",
    ),
    "a huge count": lambda: ("regex", "a{4294967295}"),
    "nothing": lambda: ("regex", r"[^\s\S]"),
    "bytes": lambda: ("regex", r"(?-u)\xff+"),
}

CHILD = """
import json, sys, time, resource
from pathlib import Path
import numpy as np
from heddle.core.engine.grammars import Guide, OutOfGrammar
from heddle.core.text.grammar import Grammar, GrammarCompiler
from heddle.core.text.tokenizer import Tokenizer

compiler = GrammarCompiler(Tokenizer.load(Path(sys.argv[1])), 520, [1, 2])
for line in sys.stdin:
    kind, source = json.loads(line)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, slowest, steps = time.perf_counter(), 0.0, 0
    try:
        guide = Guide(compiler.compile(getattr(Grammar, kind)(source)), 520)
        compiled = time.perf_counter() - began
        draws, tokens = np.random.default_rng(0), []
        while steps < 150:
            at = time.perf_counter()
            allowed = np.flatnonzero(guide.allowed(tokens))
            token = int(draws.choice(allowed))
            tokens.append(token)
            done = token in (1, 2) or guide.take(token)
            slowest, steps = max(slowest, time.perf_counter() - at), steps + 1
            if done:
                break
    except OutOfGrammar:
        pass  # the end of its own request
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps([compiled, slowest, steps, grown / 1024]), flush=True)
"""


async def _checked(folder: Path) -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
    """Of the hostile ones those that are refused, with the reason, and the others."""
    checker = GrammarChecker(folder, VOCAB, END_IDS)
    refused, accepted = {}, {}
    try:
        for name, make in HOSTILE.items():
            kind, source = make()
            began = time.monotonic()
            try:
                verdict = await checker.check([Item("grammar", getattr(Grammar, kind)(source))], "a")
                reason = None if verdict is None else verdict.reason
            except GrammarError as error:
                reason = str(error)
            assert time.monotonic() - began < grammar_checker.START_PATIENCE, name
            if reason is None:
                accepted[name] = (kind, source)
            else:
                assert 0 < len(reason) < 500, name
                refused[name] = reason
    finally:
        await checker.close()
    return refused, accepted


def test_no_grammar_hangs_or_kills_anybody(tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is refused, or it is compiled and followed in bounded time, in a process that lives through them all."""
    monkeypatch.setattr(grammar_checker, "PATIENCE", 1.0)
    refused, accepted = asyncio.run(_checked(tokenizer_folder))
    assert {
        "nothing",
        "a reference to itself",
        "multiples of primes",
        "patterns all at once",
    } <= refused.keys()
    assert {"references that double", "huge lists", "brackets hundreds deep"} <= accepted.keys()
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tokenizer_folder)],
        input="".join(json.dumps(case) + "\n" for case in accepted.values()),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, (list(accepted)[len(done.stdout.splitlines())], done.stderr[-500:])
    for name, (compiled, slowest, steps, grown) in zip(accepted, map(json.loads, done.stdout.splitlines())):
        assert compiled < 5, name
        assert slowest < 0.5, name
        assert grown < 500, name
        assert steps, name
