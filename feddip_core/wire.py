"""What travels between the server and a client: of a sparse model the kept values, and to those without it the mask.

Both ends hold the same experiment, so that neither layers nor positions need names. `download` and `upload` make few
flat arrays of a state and of an upload, `unpack_state` and `unpack_upload` the same state and upload again, to the bit.
What a client sends is checked before it is believed.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from .communication import packed, unpacked
from .federation import Federation, State
from .masks import Mask

Arrays = dict[str, Tensor]
LARGEST = 1e6  # that a weight may be


class Rejected(Exception):
    """Why an answer cannot be used."""


class MaskMissing(Exception):
    """The client does not hold the mask in force."""


def download(site: Federation, state: State, n: int, with_mask: bool) -> Arrays:
    """What client n needs for its round."""
    # With a dense memory a client starts from all weights; the exact count of bits leaves out what could stay here.
    m = None if site.exp.regrowth == "dense_memory" else state.m
    arrays = {"w": _values(site, state.w, m), "statistics": state.statistics}
    if with_mask and state.m is not None:
        arrays["mask"] = packed(state.m)
    if site.own_norms:
        arrays["norms"] = state.norms[n]
    for name in site.method.remembered_for(state, n):
        arrays[f"memory/{name}"] = packed(site.mask_of(state.memory[name]))
    return {k: v for k, v in arrays.items() if v.numel()}


def unpack_state(
    site: Federation, arrays: Mapping[str, Tensor], t: int, version: int, sparse: bool, n: int
) -> tuple[State, Tensor | None]:
    """The state that client n begins its round with, and its mask in bits, for the rounds that send none."""
    bits = arrays.get("mask")
    if sparse and bits is None:
        raise MaskMissing
    shapes = site.layout.prunable_shapes
    m = _on(site, unpacked(bits, shapes)) if sparse else None
    w = _with_zeros(site, arrays["w"], None if site.exp.regrowth == "dense_memory" else m)
    statistics = arrays.get("statistics", torch.empty(0)).to(site.device)
    own = {k.removeprefix("memory/"): unpacked(v, shapes) for k, v in arrays.items() if k.startswith("memory/")}
    memory = {k: site.layout.flat_mask(v, like=w) for k, v in own.items()}
    norms = {n: arrays["norms"].to(site.device)} if "norms" in arrays else {}
    return State(t, w, m, statistics, version, memory=memory, norms=norms), bits


def upload(site: Federation, state: State, n: int, result: Mapping[str, Tensor]) -> Arrays:
    """What client n sends of the result of its round; its mean loss travels by itself."""
    own = site.method.client_mask(state, n)
    sends = site.method.sends(state.t, own)
    m = None if site.method.feedback else own
    if "mask" in sends:
        weights = site.layout.weights(result["w"])
        m = site.mask_of(result["mask"]) if "mask" in result else {k: v != 0 for k, v in weights.items()}
    arrays = {"w": _values(site, result["w"], m), "statistics": result["statistics"]}
    for name in sends:
        if name == "mask":
            arrays[name] = packed(m)
        elif name == "kept back":
            arrays[name] = packed(site.mask_of(result[name]))
        else:
            arrays[name] = result[name]
    return {k: v.detach().cpu() for k, v in arrays.items() if v.numel()}


def unpack_upload(site: Federation, state: State, n: int, arrays: Mapping[str, Tensor], loss: float) -> Arrays:
    """The result of client n's round, or Rejected."""
    own, shapes, size = site.method.client_mask(state, n), site.layout.prunable_shapes, site.layout.size
    sends = site.method.sends(state.t, own)
    expected = {"w", *sends, *(["statistics"] if site.statistics.size else [])}
    if type(loss) is not float:
        raise Rejected(f"its loss is {loss!r:.100}; it must be a number")
    if set(arrays) != expected:
        raise Rejected(f"it holds {sorted(arrays)}, not {sorted(expected)}")
    try:
        masks = {k: _on(site, unpacked(arrays[k], shapes)) for k in sends if k in ("mask", "kept back")}
    except ValueError as error:
        raise Rejected(str(error)) from error
    m = masks.get("mask", None if site.method.feedback else own)
    kept = size if m is None else int(_keep(site, m).sum())
    lengths = {"w": kept, "statistics": site.statistics.size} | dict.fromkeys(set(sends) - set(masks), size)
    result = {k: vector(site, k, arrays[k], length) for k, length in lengths.items() if k in arrays}
    # Weights as large as this are finite, but the next forward pass is not.
    if result["w"].abs().max() > LARGEST:
        raise Rejected(f"w holds a number larger than {LARGEST:g}")
    result["w"] = _with_zeros(site, result["w"], m)
    result.setdefault("statistics", torch.empty(0, device=site.device))
    result |= {k: site.layout.flat_mask(v, like=result["w"]) for k, v in masks.items()}
    return result | {"loss": vector(site, "loss", torch.tensor([loss], dtype=torch.get_default_dtype()), 1)[0]}


def vector(site: Federation, name: str, v: Tensor, length: int) -> Tensor:
    """The vector itself on the server's device, or Rejected if its type, its length or a number cannot be right."""
    dtype = torch.get_default_dtype()
    if v.dtype != dtype or v.shape != (length,):
        raise Rejected(f"{name} is {v.dtype} of shape {tuple(v.shape)}; it must be {dtype} of shape ({length},)")
    if not v.isfinite().all():
        raise Rejected(f"{name} holds a number that is not finite")
    return v.to(site.device)


def _keep(site: Federation, m: Mask) -> Tensor:
    return site.layout.flat_mask(m, like=torch.empty(site.layout.size, device=site.device)).bool()


def _values(site: Federation, w: Tensor, m: Mask | None) -> Tensor:
    return w if m is None else w[_keep(site, m)]


def _with_zeros(site: Federation, values: Tensor, m: Mask | None) -> Tensor:
    values = values.to(site.device)
    if m is None:
        return values
    keep = _keep(site, m)
    return torch.zeros(keep.shape, dtype=values.dtype, device=site.device).masked_scatter_(keep, values)


def _on(site: Federation, m: Mask) -> Mask:
    return {k: v.to(site.device) for k, v in m.items()}
