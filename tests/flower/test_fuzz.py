"""Whatever a client sends is used or rejected: thousands of made-up uploads, by every kind of payload."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from feddip_core import Experiment, masks
from feddip_core.engine.assembly import assemble
from feddip_core.flower import belief, wire
from feddip_core.flower.belief import Rejected
from feddip_core.state import Replies, Upload

DTYPES = ["float32", "float64", "float16", "uint8", "int8", "int64", "bool", "complex64"]
NUMBERS = [0.0, -0.0, 1.0, -1.0, 255.0, 1e-45, 3e38, -3e38, np.inf, -np.inf, np.nan]
NAMES = ["w", "statistics", "mask", "g2", "loss", "own/mask", "own/", "", "x_train"]
LOSSES = [0.5, -1.0, 3e38, 1e300, np.inf, np.nan, None, 3, True, "nan", [1.0], []]
METHODS = {
    "a mask beside them": dict(method="feddst", reconfigure_every=1),
    "batch norms": dict(method="feddip", model="test_hospitals:with_norms"),
    "kept weights": dict(method="snip"),
    "a mask of its own": dict(method="feddst", reconfigure_every=1, rules="released"),
    "squared gradients": dict(method="prunefl"),
    "a mask and no biases": dict(method="feddst", reconfigure_every=1, model="unusual_methods:without_biases"),
}
QUICK = list(METHODS)[:2]


@pytest.fixture(scope="module", params=[k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in METHODS])
def honest(request):
    """A fed, its first state, and the arrays that an honest client would send."""
    own = METHODS[request.param]
    here = "feddip_core.lab.hospitals"
    common = dict(dataset=f"{here}:samples", model=f"{here}:network", partition="given")
    if own.get("model") == "unusual_methods:without_biases":
        common = dict(dataset="fashion_mini")
    size = dict(clients=4, clients_per_round=2, rounds=2, local_epochs=1, batch_size=64, learning_rate=0.05)
    fed = assemble(Experiment(**(common | size | own)))
    state = fed.start()
    return fed, state, wire.upload(fed, state, 0, fed.train_client(state, 0))


KINDS = ["gone", "filled", "one number", "another type", "another shape", "bytes"]
CHANGES = st.tuples(st.integers(0, 99), st.sampled_from(KINDS), st.integers(0, 10**6), st.binary(max_size=8))


def changed(arrays, changes):
    """An honest upload with some of its arrays changed, gone, or joined by others."""
    sent = {k: v.numpy() for k, v in arrays.items()}
    for which, kind, i, raw in changes:
        name = [*sent, *sent, *NAMES][which % (2 * len(sent) + len(NAMES))]
        like = sent.get(name, np.zeros(3, np.float32))
        if kind == "gone":
            sent.pop(name, None)
        elif kind == "filled":
            sent[name] = with_number(like, slice(None), NUMBERS[i % len(NUMBERS)])
        elif kind == "one number":
            place = i % max(1, like.size)
            sent[name] = with_number(like, slice(place, place + 1), NUMBERS[i % len(NUMBERS)])
        elif kind == "another type":
            sent[name] = like.real.astype(DTYPES[i % len(DTYPES)])
        elif kind == "another shape":
            shapes = [(0,), (), (1,), (1, like.size), (like.size + 1,), (max(0, like.size - 1),)]
            sent[name] = np.resize(like, shapes[i % len(shapes)]).astype(like.dtype)
        else:
            sent[name] = np.frombuffer(raw, np.uint8)
    return sent


def with_number(like, where, number):
    flat = like.reshape(-1).copy()
    with np.errstate(all="ignore"):
        flat[where] = np.array([number]).astype(like.dtype)
    return flat.reshape(like.shape)


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning", "ignore:.*:UserWarning")
@settings(max_examples=400, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(changes=st.lists(CHANGES, min_size=1, max_size=3), loss=st.sampled_from(LOSSES))
def test_any_upload_is_used_or_rejected(honest, changes, loss):
    fed, state, arrays = honest
    sent = changed(arrays, changes)
    try:
        upload = wire.unpack_upload(fed, state, 0, {k: torch.from_numpy(v.copy()) for k, v in sent.items()}, loss)
        belief.check_finite(upload.values | upload.own)
        belief.check_model(fed, state, upload)
    except Rejected as reason:
        assert 0 < len(str(reason)) <= 301
        return
    assert isinstance(upload, Upload) and upload.values.keys() >= {"w", "statistics", "loss"}
    assert all(v.isfinite().all() for v in upload.values.values())
    assert upload.values["w"].shape == state.w.shape and upload.values["w"].dtype == state.w.dtype
    # The rest of the round takes it too.
    w, m, _ = fed.method.next(fed.averaged(Replies([0], [1], [upload])), state)
    assert w.isfinite().all() and (m is None or masks.kept(m) <= fed.clients.layout.prunable_size)
