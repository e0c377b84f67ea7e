"""Test support: tiny checkpoints and the real engine on a CPU. Used by the tests and the demo, not installed."""

from support.engine_site import sitecustomize  # this process imports diffusers too, and with it torchvision

__all__ = ["sitecustomize"]
