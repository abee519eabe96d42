"""What travels between the server and a client, as a few flat arrays.

The method says what travels and in which form: `method.download` and `method.upload`. Here the payloads are filled and
read. Both ends hold the same experiment, so neither layers nor positions need names. A node caches the mask of its last
round and what the client keeps for itself, so neither is sent again. What a client sends is checked before it is used.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..communication import MASK, Payload
from ..layout import Layout
from ..masks import Mask, kept
from ..server import Federation
from ..state import State, Tensors, Upload
from .belief import Rejected

OWN = "own/"  # prefix of the names of what a client keeps for itself


class MaskMissing(Exception):
    """The client does not hold the mask in force, or a mask of its own that the server counts on."""


@dataclass(frozen=True)
class Order:
    """What a client is told beside the arrays of its download."""

    t: int
    mask_version: int
    sparse: bool  # whether there is a mask
    own: int  # the round after which it must hold what it keeps for itself; -1: it has none, or it comes along


@dataclass(frozen=True)
class ClientCache:
    """What a node holds from its last round; the server knows only the round and the version."""

    version: int = -1  # of the mask
    t: int = -1
    arrays: Tensors = field(default_factory=dict)


def download(fed: Federation, state: State, n: int, cache: ClientCache) -> tuple[Order, Tensors]:
    """What client n needs for its round, if its node holds this."""
    method, layout = fed.method, fed.clients.layout
    own = state.own.get(n, {})
    # The client's own batch norms replace the server's.
    w, statistics = fed.clients.with_norms(state.w, state.statistics, own)
    tensors = {**state.memory, "w": w, "statistics": statistics}
    if state.m is not None:
        tensors["mask"] = layout.flat_mask(state.m, like=w)
    payload = method.download(state.replace(client_mask_versions=(cache.version,) * len(state.client_mask_versions)), n)
    arrays = payload.pack(layout, tensors, None if payload.kept is None else state.m)
    kept = own_arrays(layout, own)
    order = Order(state.t, state.mask_version, state.m is not None, cache.t if kept else -1)
    return order, arrays if cache.t >= 0 else arrays | kept


def begin(fed: Federation, order: Order, arrays: Mapping[str, Tensor], n: int, cache: ClientCache) -> State:
    """The state from which client n starts its round; MaskMissing if its node does not hold what it should."""
    method, layout = fed.method, fed.clients.layout
    own = {k: v for k, v in arrays.items() if k.startswith(OWN)}
    arrays = {k: v for k, v in arrays.items() if k not in own}
    if order.own >= 0:
        if cache.t != order.own:
            raise MaskMissing
        own = {k: v for k, v in cache.arrays.items() if k.startswith(OWN)}
    comes = "mask" in arrays
    m = None if not order.sparse else layout.full_mask(None) if comes else _cached_mask(layout, order, cache)
    holds = (-1 if comes else order.mask_version,) * fed.exp.clients
    empty, others = torch.empty(0), arrays.keys() - {"w", "statistics", "mask"}
    memory = dict.fromkeys(others, empty)
    state = State(order.t, empty, m, empty, order.mask_version, holds, memory, {n: _own_tensors(layout, own)})
    # Only now the form of each part is known.
    payload = method.download(state, n)
    tensors = payload.unpack(layout, arrays, None if payload.kept is None else m)
    m = layout.mask_of(tensors["mask"]) if comes else m
    return _on(fed, state.replace(m=m, memory={k: tensors[k] for k in others}), tensors)


def _cached_mask(layout: Layout, order: Order, cache: ClientCache) -> Mask:
    """The mask in force, from a node that holds it."""
    if cache.version != order.mask_version:
        raise MaskMissing
    if "mask" not in cache.arrays:  # the model was dense, and nothing has been pruned since
        return layout.full_mask(None)
    return layout.mask_of(MASK.unpack(layout, cache.arrays["mask"], None))


def _on(fed: Federation, state: State, tensors: Tensors) -> State:
    """The state with these weights and statistics, on the client's device."""
    device = fed.clients.device
    m = state.m and {k: v.to(device) for k, v in state.m.items()}
    memory = {k: v.to(device) for k, v in state.memory.items()}
    own = {n: {k: v.to(device) for k, v in kept.items()} for n, kept in state.own.items()}
    w, statistics = tensors["w"].to(device), tensors["statistics"].to(device)
    return state.replace(w=w, m=m, statistics=statistics, memory=memory, own=own)


def upload(fed: Federation, state: State, n: int, result: Upload) -> Tensors:
    """What client n sends after its round; its mean loss travels separately."""
    payload, m = _upload(fed, state, n)
    own = {OWN + k: v for k, v in result.own.items()}
    if unknown := own.keys() - payload.parts.keys():
        name = min(unknown)
        raise ValueError(
            f"upload: {fed.exp.method} must name {name!r} among its parts; else a restart would lose what the client "
            "keeps for itself"
        )
    return payload.pack(fed.clients.layout, result.values | own, m)


def unpack_upload(fed: Federation, state: State, n: int, arrays: Mapping[str, Tensor], loss: object) -> Upload:
    """The result of client n's round; Rejected if it does not have the required form."""
    if type(loss) is not float:
        raise Rejected(f"its loss is {loss!r}; it must be a number")
    payload, m = _upload(fed, state, n)
    tensors = unpacked(fed, payload, arrays, m)
    if payload.kept is not None and "mask" in tensors:
        count = kept(fed.clients.layout.mask_of(tensors["mask"]))
        if count > payload.kept or (count < payload.kept and not fed.method.plan_is_a_bound):
            raise Rejected(f"mask keeps {count} weights; it must keep {payload.kept}")
    tensors["loss"] = torch.tensor(loss, dtype=torch.get_default_dtype(), device=fed.clients.device)
    own = {k.removeprefix(OWN): v for k, v in tensors.items() if k.startswith(OWN)}
    return Upload({k: v for k, v in tensors.items() if not k.startswith(OWN)}, own)


def unpacked(fed: Federation, payload: Payload, arrays: Mapping[str, Tensor], m: Mask | None) -> Tensors:
    """What a client has packed, on the server's device; or Rejected."""
    try:
        tensors = payload.unpack(fed.clients.layout, arrays, m)
    except ValueError as error:
        raise Rejected(str(error)) from error
    return {k: v.to(fed.clients.device) for k, v in tensors.items()}


def _upload(fed: Federation, state: State, n: int) -> tuple[Payload, Mask | None]:
    """What client n uploads, and the mask of the values that are kept."""
    payload = fed.method.upload(state, n)
    return payload, None if payload.kept is None else fed.method.client_mask(state, n)


def kept_arrays(fed: Federation, state: State, n: int, result: Upload) -> Tensors:
    """What the node caches after client n's round."""
    layout, own = fed.clients.layout, {**state.own.get(n, {}), **result.own}
    mask = {} if state.m is None else {"mask": MASK.pack(layout, layout.flat_mask(state.m, like=state.w), None)}
    return mask | own_arrays(layout, own)


def own_arrays(layout: Layout, own: Mapping[str, Tensor]) -> Tensors:
    """What a client keeps for itself: cached by its node, and sent again to a node that lost it."""
    kept = {k: v for k, v in own.items() if k != "norms"}  # which travel as weights and statistics
    return {OWN + k: MASK.pack(layout, v, None) if k == "mask" else v.cpu() for k, v in kept.items()}


def _own_tensors(layout: Layout, arrays: Mapping[str, Tensor]) -> Tensors:
    """The same again."""
    named = {k.removeprefix(OWN): v for k, v in arrays.items()}
    return {k: MASK.unpack(layout, v, None) if k == "mask" else v for k, v in named.items()}
