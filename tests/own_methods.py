"""Methods of one's own in a module, where other processes find them."""

from typing import ClassVar

from feddip_core import Method, masks


class Half(Method):
    """After the first round the larger half of the weights, chosen anew in every round."""

    SHARE: ClassVar[float] = 0.5

    def next_mask(self, w, m, t):
        return masks.magnitude_mask(w, self.SHARE)
