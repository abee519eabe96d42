"""A base for methods whose questions before the first round are part of their cost."""

from ..method import Method


class Asking(Method):
    """What its clients are asked and answer is counted with the first round."""

    def bits_before(self) -> tuple[int, int]:
        """The bits sent down and up before the first round."""
        raise NotImplementedError
