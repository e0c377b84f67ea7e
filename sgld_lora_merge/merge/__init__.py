"""Merge pairs into the weights of a model: plan, commit, undo, verify."""
