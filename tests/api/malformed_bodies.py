"""Malformed JSON and multipart bodies, at random."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

BOUNDARY = "fuzz-boundary"
LIMITS = {"max_tokens": 4}
"""Keeps what turns out to be well-formed from costing much."""

VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": "hi", **LIMITS, "temperature": 0, "n": 1, "stop": ["x"], "logprobs": 1, "echo": False,
        "stream": False, "logit_bias": {"5": 1.0}, "seed": 1, "adapter": "one", "top_p": 1.0, "user": "u",
    },
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hi"}], **LIMITS, "logprobs": True, "top_logprobs": 1,
        "tools": None, "response_format": {"type": "text"}, "stream_options": None, "adapter": [{"name": "one"}],
    },
    "/tokenize": {"prompt": "hi", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"tokens": [104, 105]},
    "/adapters?dry_run=true": {"name": "fuzz", "source": "one", "pinned": False, "replace": True, "preload": False},
    "/v1/load_lora_adapter": {"lora_name": "fuzz", "lora_path": "one", "load_inplace": True},
    "/v1/unload_lora_adapter": {"lora_name": "fuzz"},
    "/adapters/nope/evict": {"to": "host"},
}  # fmt: skip

JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 2, 129, 2**31, 2**63, -(2**63) - 1, 2**64, 10**30, 0.5, -0.0, 1e308, 5e-324,
    "", " ", "a", "one", "one@1", "one@", "@", "one@999999999999", "../one", "/etc/passwd", "\0", "\ud7ff", "😀" * 9,
    "x" * 5000, "hf:a/b", "hf:", "%2e%2e", [], [[]], [None], [0] * 300, ["a"] * 70, [[1], "a"], [[2**40]], [{}],
    {}, {"": None}, {"type": "json_object"}, {"name": "one", "weight": -1e400}, {"a": {"b": {"c": []}}},
    [{"role": "user"}], [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///"}}]}],
    [{"role": "x" * 300, "content": ""}], [{"role": "assistant", "content": None, "tool_calls": "x"}],
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "no such"}}}],
]  # fmt: skip


@dataclass
class Malformed:
    """One call, and in which way it is wrong."""

    kind: str
    path: str
    content: bytes
    headers: dict[str, str] = field(default_factory=dict)


# ------------------------------------------------------------------ JSON


def json_body(random: Random, adapter: Path) -> Malformed:
    path = random.choice(list(VALID))
    body = json.loads(json.dumps(VALID[path]))
    for _ in range(random.choice([1, 1, 1, 2, 5])):
        _spoil(random, body)
    content = json.dumps(body).encode()
    kind, spoiler = random.choice(list(SPOILERS.items()))
    headers = {"content-type": "application/json"}
    if kind == "content type":
        types = [
            "text/plain",
            "application/xml",
            "multipart/mixed",
            "a" * 300,
            ";;;",
            "application/json; charset=x",
        ]
        headers = {"content-type": random.choice(types)}
    return Malformed(f"json: {kind}", path, spoiler(random, content), headers)


def _junk(random: Random) -> Any:
    """A copy, as it may be changed further."""
    return copy.deepcopy(random.choice(JUNK))


def _spoil(random: Random, body: dict[str, Any]) -> None:
    """Another value in some place of `body`, or a field too many or too few."""
    key = random.choice(list(body) or ["x"])
    match random.randrange(5):
        case 0:
            body.pop(key, None)
        case 1:
            body["".join(random.choices('abc\0😀é"\\', k=3))] = _junk(random)
        case 2 if isinstance(body.get(key), dict):
            body[key][random.choice(["x", "weight", "type", "role"])] = _junk(random)
        case 3:
            body[key] = [body.get(key), _junk(random)]
        case _:
            body[key] = _junk(random)


def _nested(random: Random, content: bytes) -> bytes:
    depth = random.choice([30, 900, 20_000, 100_000])
    opening, closing = random.choice([(b"[", b"]"), (b'{"a":', b"}")])
    inner = opening * depth + (b"1" + closing * depth if random.random() < 0.5 else b"")
    return content[:-1] + b', "messages": ' + inner + b"}"


def spliced(random: Random, content: bytes) -> bytes:
    """Some bytes are others."""
    data = bytearray(content)
    for _ in range(random.choice([1, 3, 20])):
        data[random.randrange(len(data))] = random.randrange(256)
    return bytes(data)


def _number(random: Random, content: bytes) -> bytes:
    odd = [
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"1e999",
        b"-1e999",
        b"0x10",
        b"01",
        b"1" * 5000,
        b"1.",
        b"+1",
        b"1e-9999",
    ]
    name = random.choice([b"temperature", b"seed", b"max_tokens", b"top_p", b"n", b"tokens", b"version"])
    return content[:-1] + b', "' + name + b'": ' + random.choice(odd) + b"}"


def _twice(random: Random, content: bytes) -> bytes:
    name = random.choice([b"prompt", b"messages", b"adapter", b"name", b"n", b"lora_name"])
    value = json.dumps(_junk(random)).encode()
    return content[:-1] + b', "' + name + b'": ' + value + b', "' + name + b'": "hi"}'


SPOILERS: dict[str, Callable[[Random, bytes], bytes]] = {
    "values": lambda random, content: content,
    "values again": lambda random, content: content,
    "content type": lambda random, content: content,
    "cut": lambda random, content: content[: random.randrange(len(content))],
    "spliced": spliced,
    "nested": _nested,
    "number": _number,
    "key twice": _twice,
    "not UTF-8": lambda random, content: content.replace(
        b"hi", random.choice([b"\xff", b"\xc3", b"\xed\xa0\x80"])
    ),
    "lone surrogate": lambda random, content: content.replace(b"hi", b"\\ud800"),
    "UTF-16": lambda random, content: content.decode().encode("utf-16"),
    "byte order mark": lambda random, content: b"\xef\xbb\xbf" + content,
    "trailing": lambda random, content: content + random.choice([b"x", b"{}", b"\0", content]),
    "no object": lambda random, content: json.dumps(_junk(random)).encode(),
    "random bytes": lambda random, content: random.randbytes(random.randrange(200)),
}


# ------------------------------------------------------------------ multipart


def multipart_body(random: Random, adapter: Path) -> Malformed:
    sound = [
        part('name="name"', b"fuzz"),
        part('name="replace"', b"true"),
        file("adapter_config.json", (adapter / "adapter_config.json").read_bytes()),
        file("adapter_model.safetensors", (adapter / "adapter_model.safetensors").read_bytes()),
    ]
    kind, spoiler = random.choice(list(PARTS.items()))
    parts = spoiler(random, sound)
    content_type, ending = f"multipart/form-data; boundary={BOUNDARY}", f"--{BOUNDARY}--\r\n".encode()
    if kind == "boundary":
        wrong = [
            "",
            "; boundary=",
            "; boundary=other",
            f"; boundary={'b' * 300}",
            '; boundary="',
            "; boundary=é",
        ]
        content_type = "multipart/form-data" + random.choice(wrong)
    if kind == "ending":
        ending = random.choice([b"", f"--{BOUNDARY}".encode(), f"--{BOUNDARY}--".encode() * 2, b"--"])
    content = b"".join(parts) + ending
    if kind == "cut":
        content = content[: random.randrange(len(content))]
    elif kind == "spliced":
        content = spliced(random, content)
    elif kind == "bare line feeds":
        content = content.replace(b"\r\n", b"\n")
    header = {"content-type": content_type}
    return Malformed(f"multipart: {kind}", f"/adapters{_dry(random)}", content, header)


def part(disposition: str, content: bytes, more: str = "") -> bytes:
    head = f"--{BOUNDARY}\r\nContent-Disposition: form-data; {disposition}\r\n{more}\r\n"
    return head.encode() + content + b"\r\n"


def file(name: str, content: bytes) -> bytes:
    return part(f'name="files"; filename="{name}"', content)


def _dry(random: Random) -> str:
    return random.choice(["", "?dry_run=true", "?dry_run=1", "?dry_run=x", "?dry_run="])


def _odd_file(random: Random, parts: list[bytes]) -> list[bytes]:
    names = [
        "../adapter_config.json",
        "/etc/passwd",
        "a/b",
        "",
        "x" * 4000,
        "adapter_model.bin",
        "é\0",
        "C:\\x",
        ".",
    ]
    return [*parts[:2], file(random.choice(names), b"{}"), *parts[random.choice([2, 3]) :]]


def _odd_field(random: Random, parts: list[bytes]) -> list[bytes]:
    name = random.choice(["name", "pinned", "description", "source", "nothing", "", "x" * 3000, "files", "é"])
    value = random.choice(
        [b"", b"\xff", b"true", b"yes", b"../x", b"\0", b"a" * 70_000, b"[1]", "😀".encode() * 2000]
    )
    return [part(f'name="{name}"', value), *parts[random.choice([0, 1]) :]]


PARTS: dict[str, Callable[[Random, list[bytes]], list[bytes]]] = {
    "boundary": lambda random, parts: parts,
    "ending": lambda random, parts: parts,
    "cut": lambda random, parts: parts,
    "spliced": lambda random, parts: parts,
    "bare line feeds": lambda random, parts: parts,
    "odd file": _odd_file,
    "odd field": _odd_field,
    "missing": lambda random, parts: random.sample(parts, random.randrange(len(parts))),
    "twice": lambda random, parts: [*parts, random.choice(parts)],
    "shuffled": lambda random, parts: random.sample(parts, len(parts)),
    "thousands": lambda random, parts: [*parts, *([part('name="x"', b"y")] * random.choice([20, 3000]))],
    "huge header": lambda random, parts: [
        part('name="name"', b"fuzz", f"X-Long: {'h' * random.choice([3000, 100_000])}\r\n"),
        *parts[1:],
    ],
    "many headers": lambda random, parts: [part('name="name"', b"fuzz", "A: b\r\n" * 3000), *parts[1:]],
    "no disposition": lambda random, parts: [f"--{BOUNDARY}\r\n\r\nx\r\n".encode(), *parts],
    "encoded": lambda random, parts: [
        part('name="name"', b"Zm9v", "Content-Transfer-Encoding: base64\r\n"),
        *parts[1:],
    ],
    "inside another": lambda random, parts: [file("adapter_config.json", b"".join(parts)), *parts],
}
