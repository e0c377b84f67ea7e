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
    """What was noticed so far in one worker."""

    def __init__(self) -> None:
        self._high: Counter[str] = Counter()
        self._said_high: set[str] = set()
        self._said_idle: set[tuple[str, str]] = set()

    def merged(self, losses: Mapping[str, float]) -> None:
        """After an update, with the rounding loss by module."""
        for module, loss in losses.items():
            self._high[module] = self._high[module] + 1 if loss > HIGH_ROUNDING_LOSS else 0
            if self._high[module] == PATIENCE and module not in self._said_high:
                self._said_high.add(module)
                logger.warning(
                    "%s: rounding_loss is %.2f, above %g in %d updates: more than half of the update is lost to the "
                    "dtype of the weights. --lora-merge-mode dynamic keeps all of it",
                    module, loss, HIGH_ROUNDING_LOSS, PATIENCE,
                )  # fmt: skip

    def generated(self, idle: Mapping[str, Sequence[str]]) -> None:
        """After a generation, with the weights by module whose low-rank branches no layer has asked for yet."""
        for module, weights in idle.items():
            new = [weight for weight in weights if (module, weight) not in self._said_idle]
            if new:
                self._said_idle |= {(module, weight) for weight in new}
                logger.warning(
                    "%s: the low-rank branches of %s were not used by this generation; if they never are, the model "
                    "computes with these weights elsewhere and their update has no effect: --lora-merge-mode merge",
                    module, name_some(new),
                )  # fmt: skip
