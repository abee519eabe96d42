"""Sparse inference in PyTorch: `sparse(network)` replaces the layers where zeros save time, and leaves the others.

Two things can pay. Channels that are zero throughout leave a smaller dense layer, which is faster at once. Zeros that
are scattered need compressed rows (CSR), where a kept weight costs about four times what it costs in a dense layer: so
they must be many, and the layer large. `make benchmark-inference` measures what the limits below give.
"""

import copy
import warnings

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

# In smaller layers, PyTorch's overhead of a few microseconds per operation is more than the zeros save.
LINEAR_WEIGHTS, CONV_WEIGHTS = 500_000, 30_000
LINEAR_SPARSITY, CONV_SPARSITY = 0.75, 0.85  # from here on compressed rows pay
SHRUNK_SHARE = 0.5  # of the weights, that a smaller layer may have left to pay


def sparse(network: nn.Module) -> tuple[nn.Module, pd.DataFrame]:
    """A copy for inference with the same outputs up to rounding, and a row per layer: what became of it, and why.

    Only plain `Linear` and `Conv2d` layers are replaced. The copy cannot be trained.
    """
    fast, rows = copy.deepcopy(network).eval().requires_grad_(False), []
    done: dict[int, nn.Module] = {}  # a layer that stands in two places stays one layer
    for name, layer in list(fast.named_modules(remove_duplicate=False)):
        if type(layer) not in (nn.Linear, nn.Conv2d):  # a subclass may use its weight in another way
            continue
        if id(layer) not in done:
            done[id(layer)], what, why = (
                (layer, "as it was", whole) if (whole := _whole(fast, name)) else replaced(layer)
            )
            rows.append((name, layer.weight.numel(), _sparsity(layer), what, why))
        if not name:
            return done[id(layer)], _table(rows)
        fast.set_submodule(name, done[id(layer)])
    return fast, _table(rows)


def _whole(network: nn.Module, name: str) -> str:
    """Why a layer must stay: PyTorch's larger layers, such as transformers, read the weights of their parts."""
    around = network.get_submodule(name.rpartition(".")[0])
    plain = type(around).__module__.partition(".")[0] != "torch" or type(around).__module__.endswith("container")
    return "" if plain or not name else f"its {type(around).__name__} reads its weight"


def _table(rows: list[tuple]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["layer", "weights", "sparsity", "now", "why"]).set_index("layer")


def replaced(layer: nn.Linear | nn.Conv2d) -> tuple[nn.Module, str, str]:
    """What is fastest of this layer, in words too: itself, a smaller one, compressed rows, or both."""
    size, least = layer.weight.numel(), CONV_WEIGHTS if isinstance(layer, nn.Conv2d) else LINEAR_WEIGHTS
    if size < least:
        return layer, "as it was", f"{size:,} weights are too few: it can pay from {least:,}"
    if isinstance(layer, nn.Conv2d) and layer.groups != 1:
        return layer, "as it was", "its channels are in groups"
    rows, columns = (_used(layer.weight, axis) for axis in (0, 1))
    outputs, inputs = layer.weight.shape[:2]
    if len(rows) * len(columns) > SHRUNK_SHARE * outputs * inputs:
        return _compressed(layer)
    inner, now, why = _compressed(_block(layer, rows, columns))
    what = f"shrunk to {len(rows)} of {outputs} outputs and {len(columns)} of {inputs} inputs"
    also = "" if now == "as it was" else f", {now}"
    return Shrunk(inner, layer, rows, columns), what + also, "the other channels are zero" + (also and f"; {why}")


def _sparsity(layer: nn.Module) -> float:
    return 1 - layer.weight.count_nonzero().item() / max(layer.weight.numel(), 1)


def _used(weight: Tensor, axis: int) -> Tensor:
    """The channels of this axis that are not zero throughout; one at least."""
    used = weight.transpose(0, axis).flatten(1).any(1)
    used[0] |= not used.any()
    return used.nonzero()[:, 0]


def _block(layer: nn.Linear | nn.Conv2d, rows: Tensor, columns: Tensor) -> nn.Module:
    """The layer of these outputs and inputs alone."""
    inner = copy.copy(layer)
    inner._parameters = {"weight": nn.Parameter(layer.weight[rows][:, columns].contiguous(), requires_grad=False)}
    bias = None if layer.bias is None else nn.Parameter(layer.bias[rows], requires_grad=False)
    inner.register_parameter("bias", bias)
    if isinstance(layer, nn.Linear):
        inner.in_features, inner.out_features = len(columns), len(rows)
    else:
        inner.in_channels, inner.out_channels = len(columns), len(rows)
    return inner


def _compressed(layer: nn.Linear | nn.Conv2d) -> tuple[nn.Module, str, str]:
    """The layer with compressed rows, if that pays."""
    conv, zeros = isinstance(layer, nn.Conv2d), _sparsity(layer)
    limit = CONV_SPARSITY if conv else LINEAR_SPARSITY
    if zeros < limit:
        return layer, "as it was", f"{zeros:.1%} zeros are too few: compressed rows pay from {limit:.0%}"
    if conv and (layer.padding_mode != "zeros" or max(layer.dilation) > 1):
        return layer, "as it was", "it is dilated, or does not pad with zeros"
    if conv:
        return Conv2dCSR(layer), "CSR for single images", "of several images at once the dense layer is faster"
    return LinearCSR(layer), "CSR", f"{zeros:.1%} of its weights are zero"


class Shrunk(nn.Module):
    """A smaller layer between the channels that it uses: the other outputs are their biases."""

    def __init__(self, inner: nn.Module, layer: nn.Linear | nn.Conv2d, rows: Tensor, columns: Tensor):
        super().__init__()
        self.inner, self.dim = inner, -1 if isinstance(layer, nn.Linear) else -3
        outputs, inputs = layer.weight.shape[:2]
        rest = layer.weight.new_zeros(outputs) if layer.bias is None else layer.bias.detach()
        self.register_buffer("rest", rest.view(-1, *[1] * (-1 - self.dim)))
        self.register_buffer("rows", rows if len(rows) < outputs else None)
        self.register_buffer("columns", columns if len(columns) < inputs else None)

    def forward(self, x):
        y = self.inner(x if self.columns is None else x.index_select(self.dim, self.columns))
        if self.rows is None:
            return y
        shape = list(y.shape)
        shape[self.dim] = len(self.rest)
        return self.rest.expand(shape).clone().index_copy_(self.dim, self.rows, y)


def compressed_rows(weight: Tensor) -> Tensor:
    """The matrix as CSR, with 32-bit positions: with others PyTorch would convert them in every product."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        csr = weight.detach().to_sparse_csr()
        positions = csr.crow_indices().int(), csr.col_indices().int()
        return torch.sparse_csr_tensor(*positions, csr.values(), csr.shape, check_invariants=False)


class LinearCSR(nn.Module):
    """y = W x + b over the kept weights."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.register_buffer("weight", compressed_rows(layer.weight))
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach())

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        # The product with a vector is several times faster than that with a matrix of one column.
        y = torch.mv(self.weight, rows[0])[None] if len(rows) == 1 else (self.weight @ rows.t()).t()
        y = y if self.bias is None else y + self.bias
        return y.reshape(*x.shape[:-1], len(self.weight))


class Conv2dCSR(nn.Module):
    """Of a single image, a product of compressed rows with its patches; of several, the dense convolution."""

    def __init__(self, layer: nn.Conv2d):
        super().__init__()
        self.dense = layer
        self.register_buffer("weight", compressed_rows(layer.weight.flatten(1)))

    def forward(self, x):
        if x.ndim != 4 or len(x) > 1:
            return self.dense(x)
        conv = self.dense
        x = F.pad(x[0], conv._reversed_padding_repeated_twice)
        for axis, size, step in zip((1, 2), conv.kernel_size, conv.stride, strict=True):
            x = x.unfold(axis, size, step)
        height, width = x.shape[1:3]
        y = self.weight @ x.permute(0, 3, 4, 1, 2).reshape(-1, height * width)
        y = y if conv.bias is None else y + conv.bias[:, None]
        return y.view(1, -1, height, width)
