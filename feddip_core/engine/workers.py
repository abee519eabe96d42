"""Train a round's clients in parallel processes, to the same bits as in sequence.

A worker is a Python process on a pipe. It receives the server's state and a client's number, and returns the client's
upload, as safetensors with JSON; nothing is unpickled. All workers map one file with the data. The file has no name, so
nothing is left of it however the processes end. A worker that dies is replaced, and its client is trained again: the
result depends only on (seed, round, client).
"""

import json
import mmap
import os
import queue
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor

from ..data import Dataset
from ..experiment import Experiment
from ..server import Federation
from ..state import State, Upload
from .assembly import assemble, gradient_name
from .checkpoints import state_of, tensors_of
from .computing import computing

ATTEMPTS = 3  # per client, before the death of its workers is an error
LENGTH = struct.Struct("<QQ")
ALIGNMENT = 64  # bytes, of each array in the file


class Workers:
    """`train(state, chosen)` yields the uploads of the chosen clients, in their order."""

    def __init__(self, federation: Federation, count: int):
        self.data = tempfile.TemporaryFile(prefix="feddip-")  # noqa: SIM115, closed at the end
        self.order = json.dumps(_share(federation, self.data))
        self.threads = ThreadPoolExecutor(count)
        self.idle: queue.SimpleQueue[subprocess.Popen] = queue.SimpleQueue()
        self.closed = False
        self.processes = [self._start() for _ in range(count)]
        for process in self.processes:
            self.idle.put(process)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_) -> None:
        self.closed = True
        for process in self.processes:
            process.kill()
        self.threads.shutdown(cancel_futures=True)
        for process in self.processes:
            process.kill()  # also one that a thread has just started
            process.wait()
            with suppress(OSError):
                process.stdin.close()
            process.stdout.close()
        self.data.close()

    def train(self, state: State, chosen: list[int]) -> Iterator[Upload]:
        tensors = to_bytes({k: v.contiguous() for k, v in tensors_of(state).items()})
        counters = {"t": state.t, "mask_version": state.mask_version}
        return self.threads.map(lambda n: self._train(tensors, counters | {"client": n}), chosen)

    def _train(self, tensors: bytes, request: dict) -> Upload:
        process = self.idle.get()
        try:
            for _ in range(ATTEMPTS):
                try:
                    _send(process.stdin, request, tensors)
                    answer, upload = _receive(process.stdout)
                    break
                except (OSError, EOFError):
                    if self.closed:
                        raise
                    process = self._replace(process)
            else:
                raise RuntimeError(f"client {request['client']}: its worker died {ATTEMPTS} times in a row")
        finally:
            self.idle.put(process)
        if "error" in answer:
            raise RuntimeError(f"client {request['client']} failed in its worker: {answer['error']}")
        named = from_bytes(upload)
        own = {k.removeprefix("own/"): v for k, v in named.items() if k.startswith("own/")}
        return Upload({k: v for k, v in named.items() if not k.startswith("own/")}, own)

    def _start(self) -> subprocess.Popen:
        # The same package, even if it is not installed, and no more threads than the experiment says.
        path = os.pathsep.join(
            [str(Path(__file__).parent.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        work = "from feddip_core.engine.workers import serve; serve()"
        command = [sys.executable, "-P", "-c", work]  # -P: import nothing from the working folder
        # In a separate session: Ctrl-C reaches only the server, which then ends its workers.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True,
            pass_fds=() if os.name == "nt" else [self.data.fileno()],
        )  # fmt: skip
        with suppress(OSError):  # it is already dead: the next request fails and is counted
            process.stdin.write(self.order.encode() + b"\n")
            process.stdin.flush()
        return process

    def _replace(self, dead: subprocess.Popen) -> subprocess.Popen:
        dead.kill()
        process = self._start()
        self.processes[self.processes.index(dead)] = process
        dead.wait()
        for pipe in (dead.stdin, dead.stdout):
            with suppress(OSError):  # unwritten data is lost with it
                pipe.close()
        return process


def _share(federation: Federation, file: BinaryIO) -> dict:
    """What a worker needs to build the same federation: the settings, and each data array's place in the file."""
    arrays = {k: v.contiguous() for k, v in vars(federation.clients.data).items() if isinstance(v, Tensor)}
    places = {}
    for name, tensor in arrays.items():
        file.seek(-file.tell() % ALIGNMENT, os.SEEK_CUR)
        places[name] = (tensor.shape, str(tensor.dtype).removeprefix("torch."), file.tell())
        file.write(tensor.numpy().data if tensor.numel() else b"")
    file.write(b"\0" * ALIGNMENT)  # an empty array at the end has a place too
    file.flush()
    return {
        "experiment": federation.exp.to_dict() | {"gradient": gradient_name(federation)},
        # The file has no name, but a number that a worker inherits. On Windows it has a name while it is open.
        "file": file.name if os.name == "nt" else f"/dev/fd/{file.fileno()}",
        "arrays": places,
        "crop_padding": federation.clients.data.crop_padding,
        "path": [os.path.abspath(entry) for entry in sys.path],
    }


def _mapped(order: dict) -> Dataset:
    number = os.open(order["file"], os.O_RDWR | getattr(os, "O_TEMPORARY", 0))
    memory = mmap.mmap(number, 0)
    os.close(number)
    places = order["arrays"].items()
    arrays = {k: torch.from_numpy(np.ndarray(shape, dtype, memory, start)) for k, (shape, dtype, start) in places}
    return Dataset(**arrays, crop_padding=order["crop_padding"], sha256={})


def _send(pipe: BinaryIO, plain: dict, tensors: bytes) -> None:
    text = json.dumps(plain).encode()
    pipe.write(LENGTH.pack(len(text), len(tensors)) + text)
    pipe.write(tensors)
    pipe.flush()


def _receive(pipe: BinaryIO) -> tuple[dict, bytes]:
    def read(count):
        content = pipe.read(count)
        if len(content) < count:
            raise EOFError
        return content

    text, tensors = LENGTH.unpack(read(LENGTH.size))
    return json.loads(read(text)), read(tensors)


def _work(requests: BinaryIO, answers: BinaryIO) -> None:
    order = json.loads(requests.readline())
    sys.path += [entry for entry in order["path"] if entry not in sys.path]  # last: only for the user's own modules
    exp = Experiment(**order["experiment"])
    with computing(exp):
        federation = assemble(exp, _mapped(order))
        while True:
            try:
                request, tensors = _receive(requests)
            except EOFError:  # the server is done, or dead
                return
            prunable = federation.clients.layout.prunable
            state = state_of(from_bytes(tensors), request["t"], request["mask_version"], prunable)
            try:
                upload = federation.train_client(state, request["client"])
                named = upload.values | {f"own/{k}": v for k, v in upload.own.items()}
                _send(answers, {}, to_bytes({k: v.contiguous() for k, v in named.items()}))
            except Exception as error:
                _send(answers, {"error": f"{type(error).__name__}: {error}"}, b"")


def serve() -> None:
    """The main function of a worker. All prints, even of C libraries, go to stderr: the pipe carries answers only."""
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _work(sys.stdin.buffer, pipe)
