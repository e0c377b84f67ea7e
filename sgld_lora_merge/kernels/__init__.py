"""The front door of the merge: jobs in, statistics out. Which code runs behind it is decided here and nowhere else."""

from __future__ import annotations

from sgld_lora_merge.kernels.reference import MergeJob, MergeStats, Scratch, Term, merge, scratch_for

__all__ = ["MergeJob", "MergeStats", "Scratch", "Term", "merge", "scratch_for"]
