"""Flower's messages: each has a few flat arrays and a few plain values."""

from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from torch import Tensor

WHO, ASK, TRAIN = "query.who", "query.ask", "train"  # what a client is asked


def content(tensors: Mapping[str, Tensor], plain: dict[str, Any]) -> RecordDict:
    """The content of a message."""
    return RecordDict({"arrays": array_record(tensors), "config": ConfigRecord(plain)})


def array_record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Tensors as Flower carries them."""
    return ArrayRecord({k: Array(v.detach().cpu().contiguous().numpy()) for k, v in tensors.items()})


def arrays_of(record: ArrayRecord) -> dict[str, Tensor]:
    """The tensors again; Flower reads them without unpickling."""
    return {k: torch.from_numpy(v.numpy().copy()) for k, v in record.items()}


def error_of(reply: Message | None) -> str | None:
    """Why a client did not answer, in a few words; None if it did."""
    if reply is None:
        return "it cannot be read"
    if reply.has_error():
        return f"Flower says: {reply.error.reason or f'error {reply.error.code}'!s:.200}"
    config = reply.content.config_records.get("config", {})
    return f"{config['error']!r:.200}" if "error" in config else None


def size_of(message: Message | None) -> int:
    """The bytes of a message as Flower sends it over the network, object by object."""
    if message is None or not message.has_content():
        return 0
    return sum(len(part.deflate()) for part in get_all_nested_objects(message).values())
