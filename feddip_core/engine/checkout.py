"""Files outside the package: the notebook that a batch runs, and the app that `flwr run` reads."""

from pathlib import Path

PACKAGE = Path(__file__).parent.parent


def beside(name: str) -> Path:
    """The path of a file in the checkout; an installed package ships a copy (setup.py)."""
    brought = PACKAGE / "assets" / "checkout" / name
    return brought if brought.exists() else PACKAGE.parent / name
