"""Rollout engines of a trainer: start them, keep all on one version, bring them back."""
