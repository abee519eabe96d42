"""Random streams, each derived from (seed, purpose, round, client) and from nothing else.

So no result depends on what ran before it in the process, on the order of clients or on who trains them.
"""

import hashlib
import threading
from contextlib import contextmanager

import torch

GLOBAL = threading.RLock()  # there is one global generator, whatever thread draws from it


def stream_seed(seed: int, purpose: str, t: int = 0, n: int = 0) -> int:
    """A 63-bit number that differs for every (seed, purpose, round, client)."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{t}/{n}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def stream(seed: int, purpose: str, t: int = 0, n: int = 0) -> torch.Generator:
    """A generator on the CPU, so that every device draws the same numbers."""
    return torch.Generator().manual_seed(stream_seed(seed, purpose, t, n))


@contextmanager
def global_stream(device: torch.device, seed: int, purpose: str, t: int = 0, n: int = 0):
    """For what only draws from torch's global generator (initialisation, dropout): seed it, and put it back after."""
    with GLOBAL, torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(stream_seed(seed, purpose, t, n))
        yield
