"""The `heddle` command. Its modules import nothing heavy at the top, so that `heddle --help` is instant."""

from __future__ import annotations

import rich_click as click

from ... import __version__
from .adapters import adapters
from .bench import bench
from .doctor import doctor
from .generate import generate
from .keys import keys
from .quantize import quantize
from .serve import demo, serve
from .tenants import tenants

__all__ = ["main"]

HELP = {
    "options_table_column_types": ["required", "opt_long", "opt_short", "help"],
    "options_table_help_sections": ["help", "envvar", "default", "required", "metavar"],
}
"""Values and defaults stand in the help column, so that no flag's name is cut."""


@click.rich_config(help_config=HELP)
@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="heddle")
def main() -> None:
    """Serve thousands of LoRA adapters over one quantised LLaMA base."""


for command in (demo, serve, adapters, tenants, keys, generate, quantize, bench, doctor):
    main.add_command(command)
