"""A run's state on disk: a killed run resumes from it, to the same bits.

One safetensors file holds the tensors, and plain data as JSON. Nothing is unpickled. Random streams are not saved: each
is derived from (seed, purpose, round, client). A damaged file is renamed and never used. A checkpoint of another run is
left untouched.
"""

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from ..state import State
from .records import AnotherRun, write

NAME = "checkpoint.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """Named tensors and plain data, for one run and its data."""

    tensors: dict[str, Tensor]
    plain: dict


def save(folder: Path, key: str, checkpoint: Checkpoint) -> None:
    """Replace the run's checkpoint atomically; `key` names the run and the data it belongs to."""
    tensors = {k: v.detach().cpu().contiguous() for k, v in checkpoint.tensors.items()}
    plain = json.dumps(checkpoint.plain)
    metadata = {"key": key, "plain": plain, "sha256": digest(tensors, key + plain)}
    write(folder / NAME, to_bytes(tensors, metadata))


def load(folder: Path, key: str, device: torch.device) -> Checkpoint | None:
    """The run's checkpoint, or None if it is missing or damaged; another run's is refused."""
    path = folder / NAME
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118, not a dict
        if metadata["sha256"] != digest(tensors, metadata["key"] + metadata["plain"]):
            raise ValueError("its checksum does not match")
        plain = json.loads(metadata["plain"])
    except MemoryError:  # says nothing about the file
        raise
    except Exception as error:  # whatever is wrong with the file, the run can start over
        aside = _set_aside(path)
        warnings.warn(f"{path} is unusable ({error}); renamed to {aside.name}, the run starts over", stacklevel=2)
        return None
    if metadata["key"] != key:
        theirs, ours = (" ".join(word[:12] for word in each.split()) for each in (metadata["key"], key))
        raise AnotherRun(
            f"{path} belongs to another run or other data ({theirs}, but here it is {ours}); choose another folder, "
            "or move this one away"
        )
    # Outside the try: a full GPU is no reason to discard a good checkpoint.
    return Checkpoint({k: v.to(device) for k, v in tensors.items()}, plain)


def digest(tensors: Mapping[str, Tensor], text: str) -> str:
    """A checksum of named tensors and their description."""
    sha256 = hashlib.sha256(text.encode())
    for k in sorted(tensors):
        sha256.update(f"{k} {tensors[k].dtype} {tuple(tensors[k].shape)}".encode())
        sha256.update(tensors[k].flatten().view(torch.uint8).numpy().data if tensors[k].numel() else b"")
    return sha256.hexdigest()


def _set_aside(path: Path) -> Path:
    for i in range(1, 1000):
        aside = path.with_name(f"{path.stem}.unusable-{i}{path.suffix}")
        if not aside.exists():
            return path.rename(aside)
    return path.rename(path.with_name(f"{path.stem}.unusable{path.suffix}"))


def tensors_of(state: State) -> dict[str, Tensor]:
    """A state as named tensors, without its two counters."""
    named = {f"mask/{k}": v for k, v in (state.m or {}).items()} | {f"memory/{k}": v for k, v in state.memory.items()}
    named |= {f"own/{n}/{k}": v for n, own in state.own.items() for k, v in own.items()}
    return {
        "w": state.w,
        "statistics": state.statistics,
        "client_mask_versions": torch.tensor(state.client_mask_versions),
    } | named


def state_of(tensors: Mapping[str, Tensor], t: int, mask_version: int, prunable: Sequence[str]) -> State:
    """The inverse of `tensors_of`; the mask follows the order of the network's layers."""

    def part(name: str) -> dict[str, Tensor]:
        return {k.removeprefix(f"{name}/"): v for k, v in tensors.items() if k.startswith(f"{name}/")}

    own: dict[int, dict[str, Tensor]] = {}
    for k, v in part("own").items():
        n, _, name = k.partition("/")
        own.setdefault(int(n), {})[name] = v
    m = part("mask")  # the file sorts names
    ordered = {k: m[k] for k in prunable} if m else None
    versions = tuple(tensors["client_mask_versions"].tolist())
    return State(t, tensors["w"], ordered, tensors["statistics"], mask_version, versions, part("memory"), own)
