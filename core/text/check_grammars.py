"""A process that tries grammars out, so that one that hangs, or takes all memory, does so where it can be killed.

`python -m heddle.core.text.check_grammars FOLDER VOCAB_SIZE END_TOKEN…` says `ready`, and then answers lines on
stdin, one each: in goes a JSON list of `Item`, out comes null, or which one is no good and why. It ends with its
stdin. Control code: no torch.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Literal

import msgspec

from .grammar import GrammarCompiler, GrammarError, check_schema
from .tokenizer import Tokenizer

MEMORY_BYTES = 2 << 30
"""Address space that a check may take beyond what the process starts with."""
CPU_SECONDS = 20
"""For one line; whoever asks is less patient, unless it is gone."""


class Item(msgspec.Struct, frozen=True, array_like=True):
    """A grammar, to be compiled and tried; or a JSON schema as text, to be read only."""

    kind: Literal["grammar", "schema"]
    text: str


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """What is wrong with the index-th item."""

    index: int
    reason: str


def main(argv: list[str]) -> None:
    folder, vocab_size, *ends = argv[1:]
    tokenizer = Tokenizer.load(Path(folder))
    # Without one there is nothing to guide, and only schemas are asked about.
    compiler = GrammarCompiler(tokenizer, int(vocab_size), map(int, ends)) if tokenizer.joins_tokens else None
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_AS, size + MEMORY_BYTES)
    print("ready", flush=True)
    for line in sys.stdin.buffer:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + CPU_SECONDS)
        verdict = _first_fault(compiler, msgspec.json.decode(line, type=list[Item]))
        sys.stdout.buffer.write(msgspec.json.encode(verdict) + b"\n")
        sys.stdout.buffer.flush()


def _first_fault(compiler: GrammarCompiler | None, items: list[Item]) -> Verdict | None:
    for index, item in enumerate(items):
        try:
            if item.kind == "grammar":
                assert compiler is not None, "the server does not ask"
                compiler.try_out(item.text)
            else:
                check_schema(msgspec.json.decode(item.text))
        except GrammarError as error:
            return Verdict(index, str(error))
    return None


def _limit(which: int, soft: int) -> None:
    _, hard = resource.getrlimit(which)
    resource.setrlimit(which, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


if __name__ == "__main__":
    main(sys.argv)
