"""LeNet-5's gradient as one compiled function (native.cpp), several times as fast on a CPU as eager PyTorch.

It is compiled on first use into the user's cache, and needs a C++ compiler and a processor with AVX2.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from ..models import LeNet5
from .sources import user_cache

SOURCE = Path(__file__).with_name("native.cpp")
# Fixed sets instead of -march=native: a cache in a shared home folder then serves machines of different kinds.
FLAGS = {"AVX2": ["-mavx2", "-mfma"], "AVX512": ["-mavx512f", "-mfma"]}


class Unavailable(Exception):
    """Why this network has no native gradient."""


class NotHere(Unavailable):
    """What this machine lacks for it."""


class Kernel:
    """`gradient` and `logits` of one LeNet-5, on its flat parameter vector."""

    def __init__(self, net: nn.Module, image: dict[str, int], device: torch.device):
        if not isinstance(net, LeNet5):
            raise Unavailable("it knows only lenet5")
        if device.type != "cpu" or next(net.parameters()).dtype != torch.float32:
            raise Unavailable("it computes in single precision on a CPU")
        if image["size"] % 4:
            raise Unavailable(f"it needs a size of the image that 4 divides, not {image['size']}")
        layers = net.conv1.out_channels, net.conv2.out_channels, net.fc1.out_features, net.fc2.out_features
        names = ("CHANNELS", "SIZE", "C1", "C2", "H1", "H2", "CLASSES")
        sizes = (image["channels"], image["size"], *layers, net.fc3.out_features)
        self.library = _library(*(f"-D{k}={v}" for k, v in zip(names, sizes, strict=True)))
        self.workspace = torch.zeros(self.library.workspace_bytes(), dtype=torch.uint8)
        self.classes, self.parameters = net.fc3.out_features, sum(p.numel() for p in net.parameters())
        self.image = (image["channels"], image["size"], image["size"])

    def gradient(self, u: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """(u, x, y) -> cross-entropy of the network with parameters u, and its gradient."""
        self._check(u, x)
        if y.shape != x.shape[:1] or y.dtype != torch.int64:
            raise ValueError(f"y: {y.dtype} {tuple(y.shape)} is not allowed; it must be an int64 for each of x")
        u, x, y = u.contiguous(), x.contiguous(), y.contiguous()  # crops and flips come as views
        g = torch.empty_like(u)
        loss = self.library.gradient(*_pointers(self.workspace, u, x, y), len(x), *_pointers(g))
        return torch.tensor(loss), g

    def _check(self, u: Tensor, x: Tensor) -> None:
        # What the compiled function could only answer with a crash.
        for name, t, shape in (("u", u, (self.parameters,)), ("x", x, (len(x), *self.image))):
            if t.dtype != torch.float32 or t.shape != shape:
                raise ValueError(f"{name}: {t.dtype} {tuple(t.shape)} is not allowed; it must be float32 {shape}")

    def logits(self, u: Tensor, x: Tensor) -> Tensor:
        self._check(u, x)
        u, x, out = u.contiguous(), x.contiguous(), torch.empty(len(x), self.classes)
        self.library.logits(*_pointers(self.workspace, u, x), len(x), *_pointers(out))
        return out


def _pointers(*tensors: Tensor) -> list[ctypes.c_void_p]:
    if not all(t.is_cpu for t in tensors):
        raise ValueError("the native gradient takes tensors on the CPU")
    return [ctypes.c_void_p(t.data_ptr()) for t in tensors]


@cache
def _library(*sizes: str) -> ctypes.CDLL:
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in FLAGS:
        raise NotHere("this processor has no AVX2")
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    command = ["-std=c++17", "-O3", "-w", "-shared", "-fPIC", *FLAGS[capability], *sizes]
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join(command).encode()).hexdigest()[:16]
    path = user_cache() / f"lenet5-{key}.so"
    try:
        if not path.exists():
            _compile(compiler, command, path)
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NotHere(f"{path} could not be made or loaded ({error})") from error
    library.gradient.restype = ctypes.c_float
    return library


def _compile(compiler: str | None, command: list[str], path: Path) -> None:
    if compiler is None:
        raise NotHere("there is no C++ compiler (c++, g++ or clang++) on the PATH")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part = Path(folder) / path.name
        done = subprocess.run([compiler, *command, str(SOURCE), "-o", str(part)], capture_output=True, text=True)
        if done.returncode:
            reason = next((line for line in done.stderr.splitlines() if "error" in line), "no reason given")
            raise NotHere(f"{compiler} failed ({reason})")
        part.replace(path)
