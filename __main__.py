"""`python -m heddle`: the `heddle` command where its script is not on the path."""

from __future__ import annotations

from .api.cli import main

if __name__ == "__main__":
    main(prog_name="heddle")
