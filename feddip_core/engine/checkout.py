"""What stands beside the package: the notebook of a batch, and the app that `flwr run` reads."""

from pathlib import Path

PACKAGE = Path(__file__).parent.parent


def beside(name: str) -> Path:
    """A file of the checkout; an installed package has brought it along (setup.py)."""
    brought = PACKAGE / "assets" / "checkout" / name
    return brought if brought.exists() else PACKAGE.parent / name
