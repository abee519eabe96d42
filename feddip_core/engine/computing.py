"""How results are computed: threads, devices, GPU options. Repeated runs on one machine give the same bits."""

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from ..client import Forward, Gradient, Term, train_
from ..data import Dataset
from ..experiment import Experiment
from ..layout import Layout
from ..server import Federation
from ..state import State, Upload
from . import native


def check_device(exp: Experiment) -> None:
    """The device is on this machine."""
    here = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if exp.device != "cpu" and exp.device not in (here and ["cuda", *here]):
        raise ValueError(f"device: {exp.device!r} is not allowed; this machine has {', '.join(['cpu', *here])}")


@contextmanager
def computing(exp: Experiment) -> Iterator[None]:
    """Set torch's defaults and the experiment's threads; restore the caller's settings afterwards.

    On a GPU, use deterministic kernels.
    """
    with ambient(exp.device), ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_num_threads(exp.threads)
        torch.set_float32_matmul_precision("high" if exp.tf32 else "highest")
        if exp.device != "cpu":
            # Without this cuBLAS may sum in another order. It reads the variable at its first product.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)  # warns by name if an operation has none
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=exp.tf32):
            yield


@contextmanager
def ambient(device: str = "cpu") -> Iterator[None]:
    """Torch's defaults at start-up: single precision, gradients, oneDNN, no autocast, tensors on the CPU."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.callback(_deterministic, deterministic, warn_only)
        torch.set_default_dtype(torch.float32)
        _deterministic(False, warn_only=False)
        stack.enter_context(torch.backends.mkldnn.flags(enabled=True, allow_tf32=None))
        for kind in {"cpu", torch.device(device).type}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if torch.get_default_device().type != "cpu":  # otherwise useless, and it slows every call
            stack.enter_context(torch.device("cpu"))
        yield


def _deterministic(wanted: bool, warn_only: bool) -> None:
    """Only where it changes something: torch imports its compiler for it, which takes longer than a small run."""
    if wanted != torch.are_deterministic_algorithms_enabled() or (
        warn_only != torch.is_deterministic_algorithms_warn_only_enabled()
    ):
        torch.use_deterministic_algorithms(wanted, warn_only=warn_only)


def numerics() -> dict[str, object]:
    """What kernels may do: a result may depend on this as well as on the settings."""
    cudnn, mkldnn = torch.backends.cudnn, torch.backends.mkldnn
    return {
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "mkldnn": mkldnn.is_available() and mkldnn.enabled,
        "autocast": torch.is_autocast_enabled("cpu"),
        "cudnn_allow_tf32": cudnn.allow_tf32,
        "cudnn_deterministic": cudnn.deterministic,
        "cudnn_benchmark": cudnn.benchmark,
    }


def kernel(exp: Experiment, net: nn.Module, dataset: Dataset) -> native.Kernel | None:
    """The compiled gradient if the experiment asks for it and this machine supports it; None means PyTorch's."""
    if exp.gradient == "eager" or exp.stacked or exp.torch_compile or exp.precision != "float32":
        return None
    try:
        return native.Kernel(net, dataset.image, torch.device(exp.device))
    except native.Unavailable as reason:
        if exp.gradient == "native":
            raise ValueError(f"gradient: 'native' is not available; {reason}") from reason
        if isinstance(reason, native.CannotBuild):
            warnings.warn(f"gradient: using eager, several times slower than native; {reason}", stacklevel=2)
        return None


def forward_of(
    net: nn.Module, layout: Layout, precision: str = "float32", channels_last: bool = False, compiled: bool = False
) -> Forward:
    """(u, statistics, x) -> logits of the network with parameters u; the other arguments are GPU options.

    Batch norms in training mode update `statistics` in place.
    """

    def forward(u, statistics, x):
        if channels_last and x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(x.device.type, torch.bfloat16) if precision == "bfloat16" else nullcontext():
            return functional_call(net, {**layout.views(u), **statistics}, (x,)).to(u.dtype)

    # Without this option a compiled dropout would draw different numbers.
    return torch.compile(forward, options={"fallback_random": True}) if compiled else forward


def stacked(federation: Federation, state: State, chosen: list[int]) -> Iterable[Upload]:
    """The uploads of the chosen clients; clients with equally many samples train as one computation."""
    alike: dict[int, list[int]] = {}
    for n in chosen:
        alike.setdefault(len(federation.clients.parts[n]), []).append(n)
    done = {n: upload for group in alike.values() for n, upload in _side_by_side(federation, state, group)}
    return (done[n] for n in chosen)


def _side_by_side(federation: Federation, state: State, chosen: list[int]) -> Iterator[tuple[int, Upload]]:
    """Train clients with equally many samples as rows of one computation; yield each with its upload."""
    t, clients, method = state.t, federation.clients, federation.method
    ready = [federation.ready(state, n) for n in chosen]
    w, statistics, own_masks, terms = (list(part) for part in zip(*ready, strict=True))
    samples = zip(*(clients.batches(n, t, "batches", federation.exp.local_epochs) for n in chosen), strict=True)
    batches = ([torch.stack(part) for part in zip(*of_all, strict=True)] for of_all in samples)
    rows, m = torch.stack(w), None
    if own_masks[0] is not None:
        m = torch.stack([clients.layout.flat_mask(own, like=w[0]) for own in own_masks])
    how = dict(terms=[row_by_row(terms)], feedback=method.feeds_back(state))
    losses = train_(rows, m, stacked_gradient(clients.forward), batches, **clients.rates(t), **how)
    for i, n in enumerate(chosen):
        upload = Upload({"w": rows[i], "statistics": statistics[i], "loss": losses[i]})
        yield n, method.finish(upload, terms[i], own_masks[i], state, n)


def stacked_gradient(forward: Forward) -> Gradient:
    """The gradient for many clients at once: u, x, y, losses and gradients have one row per client."""
    # Only for networks without statistics: what a batch norm writes would not leave vmap.
    of_all = vmap(grad_and_value(lambda u, x, y: F.cross_entropy(forward(u, {}, x), y)))

    def gradient(u, x, y):
        g, loss = of_all(u, x, y)
        return loss, g

    return gradient


def row_by_row(terms: Sequence[Sequence[Term]]) -> Term:
    """Many clients' terms as one: each client's terms act on its row."""

    def add_(g, u):
        for own, g_n, u_n in zip(terms, g, u, strict=True):
            for term in own:
                term(g_n, u_n)

    return add_
