"""The energy counters of the processor (RAPL), where the system shows them. Standard library alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


def read(root: Path = POWERCAP) -> dict[str, int]:
    """Microjoules of every package (`intel-rapl:0`; AMD's have that name too), none where they cannot be read.

    Parts of a package (`intel-rapl:0:1`) are in its own figure already.
    """
    counters = {}
    for zone in sorted(root.glob("intel-rapl:*")):
        if zone.name.count(":") == 1:
            try:
                counters[str(zone)] = int((zone / "energy_uj").read_text())
            except OSError:  # root's alone, on many systems
                continue
    return counters


def joules(before: Mapping[str, int], after: Mapping[str, int]) -> float | None:
    """Between two readings; None where there are none. A counter that began anew went up to its end before."""
    if not before or before.keys() != after.keys():
        return None
    total = 0
    for zone, start in before.items():
        used = after[zone] - start
        total += used if used >= 0 else used + int((Path(zone) / "max_energy_range_uj").read_text())
    return total / 1e6
