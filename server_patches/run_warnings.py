"""Warn once in the log about runs that train less than they seem to."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from sgld_lora_merge.errors import name_some

logger = logging.getLogger(__name__)

HIGH_ROUNDING_LOSS = 0.5
PATIENCE = 3  # the first updates of a run are small; a loss that stays is worth a line


class RunWarnings:
    """Counts what one worker has noticed so far, and warns once of each thing."""

    def __init__(self) -> None:
        self._high_in_a_row: Counter[str] = Counter()
        self._warned_high: set[str] = set()
        self._warned_idle: set[tuple[str, str]] = set()

    def after_update(self, losses: Mapping[str, float]) -> None:
        """Warn of modules whose rounding loss stays high; call after an update with the losses by module."""
        for module, loss in losses.items():
            self._high_in_a_row[module] = self._high_in_a_row[module] + 1 if loss > HIGH_ROUNDING_LOSS else 0
            if self._high_in_a_row[module] == PATIENCE and module not in self._warned_high:
                self._warned_high.add(module)
                logger.warning(
                    "%s: rounding_loss is %.2f, above %g in %d updates: more than half of the update is lost to the "
                    "dtype of the weights. --lora-merge-mode dynamic keeps all of it",
                    module, loss, HIGH_ROUNDING_LOSS, PATIENCE,
                )  # fmt: skip

    def after_generation(self, idle: Mapping[str, Sequence[str]]) -> None:
        """Warn of low-rank branches that no layer has used; call after a generation with their weights by module."""
        for module, weights in idle.items():
            new = [weight for weight in weights if (module, weight) not in self._warned_idle]
            if new:
                self._warned_idle |= {(module, weight) for weight in new}
                logger.warning(
                    "%s: the low-rank branches of %s were not used by this generation; if they never are, the model "
                    "computes with these weights elsewhere and their update has no effect: --lora-merge-mode merge",
                    module, name_some(new),
                )  # fmt: skip
