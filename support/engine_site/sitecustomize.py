"""Lets a CPU build of torch import torchvision, whose wheel is a CUDA build.

Python imports this module at start-up in every process whose PYTHONPATH holds this folder (the engine spawns its
workers, which inherit it). torchvision's Python code registers fake kernels for two operators that its C extension
would have defined; beside a CPU torch that extension cannot load, so the import dies. Declaring the two schemas is all
that is missing: the models of the tests never call them.
"""

import importlib.abc
import sys

_SCHEMAS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class DeclareTorchvisionOperators(importlib.abc.MetaPathFinder):
    """Declares the schemas just before torchvision is imported, once, and finds nothing itself."""

    library = None

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision" and self.library is None:
            import torch

            if torch.version.cuda is None:
                self.library = torch.library.Library("torchvision", "FRAGMENT")  # they live as long as this object
                self.library.define("nms" + _SCHEMAS)
                self.library.define("qnms" + _SCHEMAS)


if not any(type(finder).__name__ == DeclareTorchvisionOperators.__name__ for finder in sys.meta_path):
    sys.meta_path.insert(0, DeclareTorchvisionOperators())
