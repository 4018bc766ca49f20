"""Build every kernel at every configuration that can be chosen, for chips that are not here, and tell what came out.

`python -m heddle.kernels.triton.compile_report sm_80,sm_90 float16` prints one JSON object a line. The launchers
themselves say what to build: they are called with tensors on the "meta" device at the shapes of Llama-3-8B.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .compile_cases import cases
from .launch import Launch, recorded

POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
ALIGNED = [["tt.divisibility", 16]]
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}
"""Bytes one program may take, by compute capability."""


@dataclass(frozen=True)
class Build:
    """One specialisation of one kernel, as a launch of it would be compiled."""

    launch: Launch
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...]

    @property
    def config(self) -> dict[str, Any]:
        types = {
            name: kind
            for name, kind in self.signature.items()
            if kind.startswith("*") and name not in ("bias", "out", "sums")
        }
        return types | {k: v for k, v in self.constants.items() if v is not None} | self.options

    @property
    def options(self) -> dict[str, int]:
        return {name: self.launch.options[name] for name in OPTIONS if name in self.launch.options}

    @property
    def key(self) -> str:
        return repr((self.launch.name, self.signature, self.constants, self.aligned, self.options))


def specialise(launch: Launch) -> Build:
    """As Triton's own launcher would: None and 1 are constants, what 16 divides is told to the compiler."""
    kernel = launch.kernel
    values = dict(zip(kernel.arg_names, launch.arguments))
    values |= {k: v for k, v in launch.options.items() if k not in OPTIONS}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned = []
    for parameter in kernel.params:
        name, value = parameter.name, values[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
            if value.storage_offset() * value.element_size() % 16 == 0:
                aligned.append(name)
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif parameter.do_not_specialize:
            signature[name] = "i32" if value < 2**31 else "i64"
        elif value == 1:
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0:
                aligned.append(name)
    return Build(launch, signature, constants, tuple(aligned))


def builds(dtypes: tuple[torch.dtype, ...]) -> list[Build]:
    """Everything that the cases would compile for activations of these dtypes, each once."""
    found: dict[str, Build] = {}
    for case in cases(dtypes):
        with recorded(run=False) as launches:
            case()
        for launch in launches:
            build = specialise(launch)
            found.setdefault(build.key, build)
    return list(found.values())


def compile_one(build: Build, capability: int) -> dict[str, Any]:
    """What the compiler made of it."""
    report: dict[str, Any] = {
        "kernel": build.launch.name,
        "target": f"sm_{capability}",
        "config": build.config,
    }
    kernel = build.launch.kernel
    place = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        fn=kernel,
        signature=build.signature,
        constexprs={place[name]: value for name, value in build.constants.items()},
        attrs={place[name]: ALIGNED for name in build.aligned},
    )
    try:
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=build.options)
    except Exception as error:  # noqa: BLE001 - whatever the compiler says is the finding
        return report | {"status": "failed", "error": f"{type(error).__name__}: {error}"}
    shared = made.metadata.shared
    report |= resources(made.asm["cubin"]) | {"shared_bytes": shared} | features(made.asm["ptx"])
    fits = shared <= SHARED_LIMIT.get(capability, shared)
    if fits:
        return report | {"status": "ok"}
    return report | {
        "status": "failed",
        "error": f"{shared} bytes of shared memory; {SHARED_LIMIT[capability]} is the limit",
    }


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and spilled bytes a thread, by the cuobjdump that comes with Triton."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return {"registers": int(found[1]), "spills": int(found[2])}


def features(ptx: str) -> dict[str, Any]:
    """How the code computes and loads: tensor core instruction, whether products and sums are contracted, copies in
    flight, widths of global loads in bits."""
    tensor_cores = next((name for name in ("wgmma", "mma.sync") if name in ptx), None)
    waits = [int(n) for n in re.findall(r"cp\.async\.wait_group\s+(?:0x)?(\d+)", ptx)]
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?\],\s*\[[^\]]*\],\s*(0x[0-9a-f]+|\d+)", ptx)
    loads = re.findall(r"ld\.global[.\w:]*?(?:\.v(\d))?\.[bfsu](\d+)", ptx)
    return {
        "tensor_cores": tensor_cores,
        "contracted": re.search(r"fma\.rn[.\w]*\.f(32|64)", ptx)
        is not None,  # with bf16 it is a sum, of one factor 1
        "copies_in_flight": max(waits, default=0),
        "copy_bits": sorted({8 * int(size, 0) for size in copies}),
        "load_bits": sorted({int(vector or 1) * int(bits) for vector, bits in loads}),
    }


def main(targets: str, dtypes: str) -> None:
    """One JSON object a line: how many builds there will be, then each as it is done."""
    wanted = builds(tuple(DTYPES[name] for name in dtypes.split(",")))
    capabilities = [int(name.removeprefix("sm_")) for name in targets.split(",")]
    print(json.dumps({"total": len(wanted) * len(capabilities)}), flush=True)
    for capability in capabilities:
        for build in wanted:
            print(json.dumps(compile_one(build, capability)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
