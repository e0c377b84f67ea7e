"""The command line: ``sgld-lora-merge``."""

from sgld_lora_merge.cli.commands import app, main

__all__ = ["app", "main"]
