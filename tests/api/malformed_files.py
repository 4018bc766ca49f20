"""Well-formed uploads of files that are not: safetensors headers and adapter configs, at random."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from .malformed_bodies import BOUNDARY, Malformed, file, part, spliced


def _upload(kind: str, random: Random, config: bytes, weights: bytes) -> Malformed:
    """A well-formed body of files that are not."""
    parts = [
        part('name="name"', f"fuzz-{random.randrange(4)}".encode()),
        part('name="replace"', b"true"),
        file("adapter_config.json", config),
        file("adapter_model.safetensors", weights),
        f"--{BOUNDARY}--\r\n".encode(),
    ]
    header = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    return Malformed(kind, f"/adapters{random.choice(['', '?dry_run=true'])}", b"".join(parts), header)


# ------------------------------------------------------------------ safetensors files


def safetensors_file(random: Random, adapter: Path) -> Malformed:
    whole = (adapter / "adapter_model.safetensors").read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    kind, spoiler = random.choice(list(HEADERS.items()))
    weights = _assembled(spoiler(random, header), data)
    if kind == "length":
        wrong = random.choice([0, 1, length - 1, length + 1, len(whole), 2**31, 2**40, 2**63, 2**64 - 1])
        weights = struct.pack("<Q", wrong) + weights[8:]
    elif kind == "cut":
        weights = weights[: random.randrange(len(weights))]
    elif kind == "data cut":
        weights = weights[: -random.randrange(1, len(data))]
    elif kind == "too much data":
        weights += random.randbytes(random.choice([1, 4, 5000]))
    elif kind == "not numbers":
        odd = random.choice([b"\xff\xff\xff\x7f", b"\0\0\x80\x7f", b"\0\0\x80\xff"])
        weights = weights[:-4] + odd
    elif kind == "spliced header":
        weights = weights[:8] + spliced(random, weights[8 : 8 + length]) + weights[8 + length :]
    elif kind == "not JSON":
        text = random.choice([b"[]", b"null", b"{", b"", b"\xff{}", b"[" * 50_000, b'{"a":' * 50_000])
        weights = struct.pack("<Q", len(text)) + text + data
    return _upload(f"safetensors: {kind}", random, (adapter / "adapter_config.json").read_bytes(), weights)


def _assembled(header: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _one(random: Random, header: dict[str, Any]) -> dict[str, Any]:
    return header[random.choice([name for name in header if name != "__metadata__"])]


def _offsets(random: Random, header: dict[str, Any]) -> dict[str, Any]:
    entry = _one(random, header)
    begin, end = entry["data_offsets"]
    entry["data_offsets"] = random.choice(
        [[end, begin], [begin, end + 4], [begin - 4, end], [0, 0], [-1, 4], [begin, 2**63], [0], [], None, "0:4",
         [0.0, 4.0], [True, False], [begin, end, end], _one(random, header)["data_offsets"]]
    )  # fmt: skip
    return header


def _dtype(random: Random, header: dict[str, Any]) -> dict[str, Any]:
    kinds = [
        "F64",
        "I8",
        "U8",
        "BOOL",
        "F16",
        "BF16",
        "F8_E4M3",
        "f32",
        "",
        "float",
        None,
        32,
        [],
        "X" * 1000,
    ]
    _one(random, header)["dtype"] = random.choice(kinds)
    return header


def _shape(random: Random, header: dict[str, Any]) -> dict[str, Any]:
    entry = _one(random, header)
    rows, columns = entry["shape"]
    entry["shape"] = random.choice(
        [[columns, rows], [rows * columns], [], [0], [-rows, -columns], [2**40, 2**40], [rows, columns, 1], [1] * 400,
         [float(rows), columns], [True, columns], None, "x", [rows, None], [2**64, 0], {"0": rows}]
    )  # fmt: skip
    return header


def _names(random: Random, header: dict[str, Any]) -> dict[str, Any]:
    name = random.choice(list(header))
    new = random.choice(
        ["", "x", name + ".x", name.replace("layers.0", "layers.99"), name.replace("layers.0", "layers.-1"),
         name.replace("layers.0", "layers." + "9" * 5000), "../../x", "\0", "😀", name * 200, name.upper(),
         name.replace("lora_A", "lora_magnitude_vector"), "base_model.model.lm_head.weight"]
    )  # fmt: skip
    header[new] = header.pop(name)
    return header


def _metadata(random: Random, header: dict[str, Any]) -> dict[str, Any]:
    return {
        "__metadata__": random.choice([None, [], "x", 5, {"format": 5}, {"a": "b" * 100_000}, {"": {}}]),
        **header,
    }


def _crowded(random: Random, header: dict[str, Any]) -> dict[str, Any]:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    return {**header, **{f"t{index}": entry for index in range(random.choice([100, 30_000]))}}


HEADERS: dict[str, Callable[[Random, dict[str, Any]], dict[str, Any]]] = {
    **{kind: (lambda random, header: header) for kind in ("length", "cut", "data cut", "too much data")},
    **{kind: (lambda random, header: header) for kind in ("not numbers", "spliced header", "not JSON")},
    "offsets": _offsets,
    "dtype": _dtype,
    "shape": _shape,
    "names": _names,
    "metadata": _metadata,
    "crowded": _crowded,
    "a tensor less": lambda random, header: dict(random.sample(sorted(header.items()), len(header) - 1)),
    "no object": lambda random, header: {
        **header,
        random.choice(list(header)): random.choice([None, 1, [], "x"]),
    },
}


# ------------------------------------------------------------------ adapter configs


def adapter_config(random: Random, adapter: Path) -> Malformed:
    config = json.loads((adapter / "adapter_config.json").read_bytes())
    patterns = [
        "(a+)+$",
        "(.*)*x",
        "[",
        "(?P<x",
        "\\",
        "^" * 500,
        "q_proj|" * 800,
        "(?:x{9999}){9999}",
        "[[:alpha:]]",
        "",
    ]
    keys: dict[str, list[Any]] = {
        "r": [0, -1, 2**70, 1e99, "8", True, None, [], 3],
        "lora_alpha": [1e400, -1e400, "x", True, [], 0, 10**400, 1e-320],
        "rank_pattern": [{p: 1} for p in patterns] + [[], "x", {"q_proj": -1}, {"q_proj": "1"}, {"": 2}],
        "alpha_pattern": [{p: 1} for p in patterns] + [5, {"q_proj": None}, {"q_proj": 1e400}],
        "target_modules": [
            *patterns,
            [],
            [""],
            ["q_proj"] * 50_000,
            [5],
            {"q_proj": 1},
            "all-linear",
            None,
            7,
        ],
        "exclude_modules": [*patterns, ["q_proj"], 5, ".*"],
        "layers_to_transform": [-1, [0, 99], "0", [True], 1.0, [2**70], list(range(50_000))],
        "layers_pattern": [*patterns, ["layers"], 5],
        "peft_type": ["LOHA", None, 5, "lora", ["LORA"]],
        "use_dora": [True, "yes", 1],
        "use_rslora": ["x", 1, None],
        "bias": ["all", "some", 5, []],
        "modules_to_save": [["lm_head"], "x", 5, [[]]],
        "init_lora_weights": ["pissa", "x" * 5000, 5, []],
        "brand_new": [1, {"a": {}}, "x" * 100_000],
        "base_model_name_or_path": ["/etc/passwd", "x" * 50_000, 5, "\0", "hf:x/y"],
    }
    for _ in range(random.choice([1, 1, 2, 4])):
        key = random.choice(list(keys))
        config[key] = random.choice(keys[key])
    content = json.dumps(config).encode()
    kind = random.choice(["values", "values", "values", "cut", "spliced", "not JSON", "nested"])
    if kind == "cut":
        content = content[: random.randrange(len(content))]
    elif kind == "spliced":
        content = spliced(random, content)
    elif kind == "not JSON":
        content = random.choice(
            [b"", b"[]", b"null", b"\xff", b"{}", b" " * 2_000_000, b"NaN", b'{"r":NaN}', b'"x"']
        )
    elif kind == "nested":
        content = (
            content[:-1]
            + b', "x": '
            + b"[" * random.choice([900, 100_000])
            + b"]" * random.choice([0, 900])
            + b"}"
        )
    return _upload(f"config: {kind}", random, content, (adapter / "adapter_model.safetensors").read_bytes())
