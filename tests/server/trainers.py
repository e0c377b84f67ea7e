"""What the tests of the trainer's side on the real server share."""

from __future__ import annotations

import argparse

from sgld_lora_merge.trainer import add_lora_arguments, validate_lora_arguments


def arguments(*flags: str) -> argparse.Namespace:
    """A trainer's arguments at rank 4 and alpha 6, which is a scale of 1.5."""
    parser = argparse.ArgumentParser()
    add_lora_arguments(parser)
    given = ["--model-family", "zimage", "--lora-rank", "4", "--lora-alpha", "6", *flags]
    return validate_lora_arguments(parser.parse_args(given))
