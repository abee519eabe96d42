"""Where the kept weights of a layer are: the gaps between them, in as few bits as their layer needs.

A gap takes `width` bits. If all bits are set, it skips 2^width − 1 pruned weights and reaches no kept one. The last gap
ends one place beyond the last weight, so a code that is cut off or has another shape is detected. With a width of 1
this is the mask, bit by bit. A width of 0 means that every weight is kept, and takes no bits.
"""

import numpy as np
from torch import Tensor

WIDEST = 16


def encode(weight: Tensor) -> tuple[int, bytes]:
    """The width that makes the shortest code of where a weight is not zero, and that code."""
    at = np.flatnonzero(weight.detach().numpy().ravel())
    if len(at) == weight.numel():
        return 0, b""
    gaps = np.diff(at, prepend=-1, append=weight.numel()) - 1
    bits = {width: width * int((gaps // (2**width - 1) + 1).sum()) for width in range(1, WIDEST + 1)}
    width = min(bits, key=bits.__getitem__)
    return width, _code(gaps, width)


def _code(gaps: np.ndarray, width: int) -> bytes:
    longest = 2**width - 1
    steps, rest = np.divmod(gaps, longest)
    words = np.full(int((steps + 1).sum()), longest)
    words[(steps + 1).cumsum() - 1] = rest
    return np.packbits((words[:, None] >> np.arange(width - 1, -1, -1)) & 1).tobytes()
