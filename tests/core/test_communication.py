import itertools
import re

import pytest
import torch
from helpers import one_round
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from feddip_core.communication import DENSE, KEPT, MASK, STATISTICS, Form, Payload
from feddip_core.engine import files
from feddip_core.engine.assembly import assemble
from feddip_core.layout import Layout
from feddip_core.methods.prunefl import PRUNABLE


def layout_of(sizes, biases, norms=False):
    """Of a made-up network: linear layers of these sizes, with or without biases and a batch norm."""
    layers = [nn.Linear(a, b, bias=biases) for a, b in itertools.pairwise(sizes)]
    return Layout.of(nn.Sequential(*layers, *([nn.BatchNorm1d(sizes[-1])] if norms else [])))


@st.composite
def messages(draw):
    """A layout, a mask (dense, empty or any between), and a vector."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=2, max_size=4))
    layout = layout_of(sizes, draw(st.booleans()), draw(st.booleans()))
    numbers = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    share = draw(st.sampled_from([None, 0.0, 0.3, 0.7, 1.0]))
    m = None
    if share is not None:
        m = {k: torch.rand(shape, generator=numbers) < share for k, shape in layout.prunable_shapes.items()}
    return layout, m, torch.randn(layout.size, generator=numbers)


def kept(m):
    return None if m is None else sum(int(v.sum()) for v in m.values())


@settings(deadline=None, max_examples=100)
@given(messages())
def test_the_kept_weights_come_back_and_zeros_where_the_mask_has_none(message):
    layout, m, v = message
    payload = Payload({"w": KEPT}, kept(m))
    arrays = payload.pack(layout, {"w": v}, m)
    assert torch.equal(payload.unpack(layout, arrays, m)["w"], layout.prune(v, m))
    numbers = sum(a.numel() for a in arrays.values())
    assert payload.bits(layout) == 32 * numbers


@settings(deadline=None, max_examples=100)
@given(messages())
def test_a_dense_vector_comes_back_whatever_the_mask(message):
    layout, m, v = message
    payload = Payload({"w": DENSE}, kept(m))
    arrays = payload.pack(layout, {"w": v}, m)
    assert torch.equal(payload.unpack(layout, arrays, m)["w"], v)
    assert payload.bits(layout) == 32 * layout.size


@settings(deadline=None, max_examples=100)
@given(messages())
def test_prunable_numbers_come_back_and_the_others_are_zero(message):
    layout, m, v = message
    payload = Payload({"g2": PRUNABLE}, kept(m))
    arrays = payload.pack(layout, {"g2": v}, m)
    nothing = {k: torch.zeros(shape, dtype=torch.bool) for k, shape in layout.prunable_shapes.items()}
    assert torch.equal(payload.unpack(layout, arrays, m)["g2"], v - layout.prune(v, nothing))
    assert payload.bits(layout) == 32 * layout.prunable_size == 32 * arrays["g2"].numel()


@settings(deadline=None, max_examples=100)
@given(messages())
def test_a_mask_comes_back_as_one_bit_per_prunable_weight(message):
    layout, m, v = message
    flat = layout.flat_mask(layout.full_mask(m), like=v)
    payload = Payload({"mask": MASK})
    arrays = payload.pack(layout, {"mask": flat}, None)
    assert torch.equal(payload.unpack(layout, arrays, None)["mask"], flat)
    assert arrays["mask"].dtype == torch.uint8 and len(arrays["mask"]) == -(-layout.prunable_size // 8)
    assert payload.bits(layout) == layout.prunable_size


@settings(deadline=None, max_examples=100)
@given(messages())
def test_values_that_travel_with_a_mask_are_those_of_that_mask(message):
    """Whatever mask the receiver held before."""
    layout, m, v = message
    m = layout.full_mask(m)
    before = {k: ~keep for k, keep in m.items()}
    payload = Payload({"w": KEPT, "statistics": STATISTICS, "mask": MASK}, kept(m))
    sent = {"w": v, "statistics": torch.ones(layout.statistics.size), "mask": layout.flat_mask(m, like=v)}
    arrays = payload.pack(layout, sent, before)
    back = payload.unpack(layout, arrays, before)
    assert list(back) == ["w", "statistics", "mask"]
    assert torch.equal(back["w"], layout.prune(v, m))
    assert torch.equal(back["mask"], sent["mask"])
    assert back["statistics"].tolist() == [1.0] * layout.statistics.size


def test_a_mask_that_keeps_nothing_of_a_network_without_biases_sends_nothing():
    layout = layout_of([3, 2], biases=False)
    m = {"0.weight": torch.zeros(2, 3, dtype=torch.bool)}
    payload = Payload({"w": KEPT, "statistics": STATISTICS}, 0)
    arrays = payload.pack(layout, {"w": torch.randn(6), "statistics": torch.empty(0)}, m)
    assert arrays == {} and payload.bits(layout) == 0
    assert payload.unpack(layout, arrays, m)["w"].tolist() == [0.0] * 6


def test_a_payload_by_hand():
    layout = layout_of(
        [4, 3, 2], biases=True, norms=True
    )  # 12 + 3 + 6 + 2 parameters, a norm of 2 + 2; 2 + 2 of statistics
    assert (layout.size, layout.prunable_size, layout.statistics.size) == (27, 18, 4)
    assert Payload({"w": KEPT}, 5).bits(layout) == 32 * (5 + 9)
    assert Payload({"w": KEPT}).bits(layout) == 32 * 27
    assert Payload({"w": DENSE}, 5).bits(layout) == 32 * 27
    assert Payload({"g2": PRUNABLE}, 5).bits(layout) == 32 * 18
    assert Payload({"mask": MASK}, 5).bits(layout) == 18
    whole = Payload({"w": KEPT, "statistics": STATISTICS}, 5).plus({"mask": MASK})
    assert whole.bits(layout) == 32 * (5 + 9 + 4) + 18
    assert whole.plus({"w": DENSE}).bits(layout) == 32 * (27 + 4) + 18


@pytest.mark.parametrize(("part", "wrong", "message"), [
    ("w", torch.zeros(7, dtype=torch.float64),
     "w is torch.float64 of shape (7,); it must be torch.float32 of shape (7,)"),
    ("w", torch.zeros(7, dtype=torch.int32), "w is torch.int32 "),
    ("w", torch.zeros(6), "w is torch.float32 of shape (6,); it must be torch.float32 of shape (7,)"),
    ("w", torch.zeros(1, 7), "w is torch.float32 of shape (1, 7)"),
    ("g2", torch.zeros(9), "g2 is torch.float32 of shape (9,); it must be torch.float32 of shape (6,)"),
    ("mask", torch.zeros(1), "mask is torch.float32 of shape (1,); it must be torch.uint8 of shape (1,)"),
    ("mask", torch.zeros(2, dtype=torch.uint8), "mask is torch.uint8 of shape (2,)"),
    ("dense", torch.zeros(8), "dense is torch.float32 of shape (8,); it must be torch.float32 of shape (9,)"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_by_the_name_of_its_part(part, wrong, message):
    layout = layout_of([2, 3], biases=True)
    m = {"0.weight": torch.tensor([[True, True], [True, True], [False, False]])}
    payload = Payload({"w": KEPT, "g2": PRUNABLE, "mask": MASK, "dense": DENSE}, 4)
    sent = {k: torch.ones(9) for k in payload.parts} | {"mask": layout.flat_mask(m, like=torch.empty(9))}
    arrays = payload.pack(layout, sent, None)
    payload.unpack(layout, arrays, None)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        payload.unpack(layout, arrays | {part: wrong}, None)


def test_values_for_another_number_of_kept_weights_than_the_masks_are_refused():
    layout, ones = layout_of([2, 3], biases=True), torch.ones(9)
    payload = Payload({"w": KEPT, "mask": MASK}, 4)
    arrays = payload.pack(layout, {"w": ones, "mask": ones}, None)
    arrays["mask"] = torch.zeros(1, dtype=torch.uint8)  # now it keeps none of the six
    with pytest.raises(
        ValueError, match=r"^w is torch.float32 of shape \(9,\); it must be torch.float32 of shape \(3,\)"
    ):
        payload.unpack(layout, arrays, None)


@pytest.mark.parametrize("change", [{"w": None}, {"more": torch.zeros(1)}])
def test_a_part_that_is_missing_or_unknown_is_named(change):
    layout = layout_of([2, 3], biases=True)
    arrays = {k: v for k, v in ({"w": torch.zeros(9), "g2": torch.zeros(6)} | change).items() if v is not None}
    with pytest.raises(ValueError, match=rf"it holds {re.escape(str(sorted(arrays)))}, not \['g2', 'w'\]"):
        Payload({"w": KEPT, "g2": PRUNABLE}).unpack(layout, arrays, None)


def test_a_form_of_ones_own_is_counted_and_packed_like_the_others():
    class Half(Form):
        bits_each = 16

        def pack(self, layout, v, m):
            return v[::2]

        def count(self, layout, kept):
            return -(-layout.size // 2)

    layout = layout_of([2, 3], biases=True)
    payload = Payload({"w": Half()})
    assert payload.bits(layout) == 16 * 5
    assert len(payload.pack(layout, {"w": torch.zeros(9)}, None)["w"]) == 5


@pytest.mark.parametrize("method", ["feddip", "prunefl", "snip", "feddst", "prunetrain"])
@pytest.mark.parametrize("rules", ["paper", "released"])
def test_what_is_counted_is_what_is_packed(tiny, mini, method, rules):
    """The bits of a download and an upload are those of the arrays that would really travel."""
    own = {"prunetrain": dict(lambda_max=0.1, prunetrain_threshold=0.02)} if rules == "paper" else {}
    reconfigures = {} if method in ("snip", "prunetrain") else dict(reconfigure_every=2)
    federation = assemble(tiny(method, rules=rules, rounds=4, clients=60, **reconfigures, **own.get(method, {})), mini)
    layout, state = federation.clients.layout, federation.start()
    for _ in range(4):
        n = federation.select(state.t)[0]
        down, up = federation.method.download(state, n), federation.method.upload(state, n)
        flat = layout.flat_mask(layout.full_mask(state.m), like=state.w)
        sent = {**state.memory, "w": state.w, "statistics": state.statistics, "mask": flat}
        upload = federation.train_client(state, n)
        told = upload.values | {f"own/{k}": v for k, v in upload.own.items()}
        mine = federation.method.client_mask(state, n)
        for payload, tensors, m in ((down, sent, state.m), (up, told, None if up.kept is None else mine)):
            arrays = payload.pack(layout, tensors, m)
            assert set(arrays) == {k for k in payload.parts if k != "statistics"}
            bits = {k: payload.parts[k].bits_each * payload.parts[k].count(layout, payload.kept) for k in arrays}
            for k, array in arrays.items():
                expected = -(-bits[k] // 8) if array.dtype == torch.uint8 else bits[k] // 32
                assert array.numel() == expected
            assert sum(bits.values()) == payload.bits(layout)
            back = payload.unpack(layout, arrays, m)
            assert torch.equal(back["w"], tensors["w"])
        state, _ = one_round(federation, state)


# A sparse model as a file


def test_a_packed_model_holds_the_mask_and_the_kept_values_alone():
    layout = layout_of([3, 2], biases=True)
    w = layout.flat({"0.weight": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), "0.bias": torch.tensor([0.5, 0.25])})
    m = {"0.weight": torch.tensor([[True, False, False], [False, False, True]])}
    file = files.pack(w, m, layout)
    assert len(file) < 17 + 300  # one byte of mask, four numbers, and a header
    back = layout.views(files.unpack(file, layout))
    assert back["0.weight"].tolist() == [[1, 0, 0], [0, 0, 6]]
    assert back["0.bias"].tolist() == [0.5, 0.25]


def test_a_file_grows_as_the_count_says():
    layout = layout_of([10, 1000], biases=False)
    w = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    sizes = {}
    for kept in (1000, 5000):
        m = {"0.weight": (torch.arange(10_000) < kept).view(1000, 10)}
        counted = Payload({"w": KEPT, "mask": MASK}, kept).bits(layout)
        assert counted == 32 * kept + 10_000
        sizes[kept] = len(files.pack(w, m, layout)) - counted / 8
    assert abs(sizes[1000] - sizes[5000]) <= 8 and 0 < sizes[1000] < 300
