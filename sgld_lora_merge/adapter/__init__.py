"""Adapters: pairs of LoRA matrices, their names, files, families and scales."""
