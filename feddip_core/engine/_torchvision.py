"""torchvision, also where its compiled operators do not match the installed torch.

A torchvision built for CUDA beside a CPU torch fails at import: it registers the shape rule of an
operator, nms, whose library could not be loaded. Datasets and transforms need no such operator, so
declaring its schema is enough. With a matching pair the first import succeeds and nothing is declared.
"""

import sys

import torch

try:
    import torchvision
except RuntimeError as error:
    if "torchvision::nms" not in str(error):
        raise
    for name in [k for k in sys.modules if k.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch.library.define("torchvision::qnms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision

__all__ = ["torchvision"]
