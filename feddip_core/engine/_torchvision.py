"""Import torchvision even if its compiled operators do not match the installed torch.

A CUDA build of torchvision fails to import beside a CPU build of torch: it registers a shape rule for the
operator nms, whose library did not load. Data sets and transforms never call that operator, so declaring its
schema is enough. With a matching pair the plain import succeeds and nothing is declared.
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
