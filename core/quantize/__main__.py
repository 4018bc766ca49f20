"""One quantisation as a process of its own, for a parent without torch: `python -m … METHOD FOLDER TARGET`.

TARGET is an empty folder. Every step of progress is a line of JSON on stdout, [what, done, total]; a failure is
its reason on stderr and status 1.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ..model.json_file import ModelError
from .driver import write
from .settings import QuantizeSettings


def main(method: str, folder: str, target: str) -> None:
    def tell(what: str, done: int, total: int) -> None:
        print(json.dumps([what, done, total]), flush=True)

    try:
        write(Path(folder), Path(target), QuantizeSettings(method=method), tell)  # type: ignore[arg-type]
    except (ModelError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
