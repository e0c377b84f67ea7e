"""Programs to run from a checkout; `support` lets diffusers be imported beside a CPU torch."""

import support

__all__ = ["support"]
