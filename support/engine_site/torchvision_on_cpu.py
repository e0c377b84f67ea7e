"""Let a CPU build of torch import torchvision, whose wheel is a CUDA build.

`make install` writes a ``.pth`` file that imports this module at the start of every Python process of the environment.
torchvision's Python code registers fake kernels for two operators that its C extension defines; beside a CPU build of
torch that extension cannot load, and the import fails with "operator torchvision::nms does not exist". To declare the
two schemas is enough: the models of the tests never call them.
"""

import importlib.abc
import sys

_SCHEMAS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class DeclareTorchvisionOperators(importlib.abc.MetaPathFinder):
    """Declare the schemas just before torchvision is imported, once. It finds no module itself."""

    library = None

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision" and self.library is None:
            import torch

            if torch.version.cuda is None:
                self.library = torch.library.Library("torchvision", "FRAGMENT")  # they live as long as this object
                self.library.define("nms" + _SCHEMAS)
                self.library.define("qnms" + _SCHEMAS)


sys.meta_path.insert(0, DeclareTorchvisionOperators())
