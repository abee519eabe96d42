"""A sparse model as a file: mask bits, eight per byte, and the kept values, 32 bits each."""

from safetensors.torch import load, save
from torch import Tensor

from ..communication import KEPT, MASK, Payload
from ..layout import Layout
from ..masks import Mask

PARTS = Payload({"w": KEPT, "mask": MASK})


def pack(w: Tensor, m: Mask, layout: Layout) -> bytes:
    """The content of the file."""
    return save(PARTS.pack(layout, {"w": w, "mask": layout.flat_mask(m, like=w)}, m))


def unpack(file: bytes, layout: Layout) -> Tensor:
    """The weights from a packed file, with zeros where its mask prunes."""
    return PARTS.unpack(layout, load(file), None)["w"]
