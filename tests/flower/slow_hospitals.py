"""The hospitals' data, at a machine that hangs: as long as a file `slow-<client>` stands in FEDDIP_SLOW, its loader
leaves `busy-<client>` there and never ends."""

import os
import time
from pathlib import Path

from feddip_core.lab.hospitals import network
from feddip_core.lab.hospitals import samples as quick

__all__ = ["network", "samples"]


def samples(client):
    folder = Path(os.environ["FEDDIP_SLOW"])
    while (folder / f"slow-{client}").exists():
        (folder / f"busy-{client}").touch()
        time.sleep(0.1)
    return quick(client)
