import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from feddip_core import masks, models
from feddip_core.layout import Layout

LENET_ERK_50 = [0, 0.4753968254, 0.5737599206, 0.2037273243, 0]
ALEXNET_ERK_50 = [0, 0, 0.3314196488, 0.4434240891, 0.3305580762, 0.0695015731, 0.6278006292, 0]


def shapes_of(name, classes):
    return Layout.of(models.build(name, classes)).prunable_shapes


@pytest.fixture(scope="module")
def lenet():
    return shapes_of("lenet5", 10)


@pytest.fixture(scope="module")
def alexnet():
    return shapes_of("alexnet", 10)


@pytest.fixture(scope="module")
def resnet():
    return shapes_of("resnet18", 100)


def test_erk_of_lenet_at_a_half(lenet):
    s = masks.erk_sparsities(lenet, 0.5)
    assert list(s.values()) == pytest.approx(LENET_ERK_50, abs=1e-10)
    m = masks.random_mask(lenet, s, torch.Generator().manual_seed(0))
    assert [int(v.sum()) for v in m.values()] == [150, 1259, 20459, 8026, 840]


@pytest.mark.slow
def test_erk_of_alexnet_at_a_half(alexnet):
    s = masks.erk_sparsities(alexnet, 0.5)
    assert list(s.values()) == pytest.approx(ALEXNET_ERK_50, abs=1e-10)
    m = masks.random_mask(alexnet, s, torch.Generator().manual_seed(0))
    assert [int(v.sum()) for v in m.values()] == [1728, 110592, 443637, 492422, 394852, 3902793, 6244469, 40960]


def test_erk_of_resnet_is_nearly_inert_at_its_small_sparsity(resnet):
    s = masks.erk_sparsities(resnet, 0.05)
    pruned = {k: v for k, v in s.items() if v}
    assert list(pruned) == ["layer4.0.conv2.weight", "layer4.1.conv1.weight", "layer4.1.conv2.weight"]
    assert list(pruned.values()) == pytest.approx([0.0779780635] * 3, abs=1e-10)
    m = masks.random_mask({k: resnet[k] for k in pruned}, pruned, torch.Generator().manual_seed(0))
    assert [int(v.sum()) for v in m.values()] == [2175322] * 3


def test_erk_at_the_targets(lenet, alexnet, resnet):
    s = masks.erk_sparsities(lenet, 0.9)
    assert list(s.values()) == pytest.approx(
        [0.1964705882, 0.9054671280, 0.9231920415, 0.8565126050, 0.2065991102], abs=1e-10
    )
    s = masks.erk_sparsities(alexnet, 0.9)
    expected = [0, 0.6468660626, 0.8692595728, 0.8911619639, 0.8690910929, 0.8180416735, 0.9272166694, 0]
    assert list(s.values()) == pytest.approx(expected, abs=1e-10)
    s = masks.erk_sparsities(resnet, 0.8)
    first = [f"layer1.{block}.conv{i}.weight" for block in (0, 1) for i in (1, 2)]
    assert [k for k, v in s.items() if v == 0] == ["conv1.weight", *first, "linear.weight"]
    expected = [0.2063180948, *[0.4748872243] * 3, 0.6091717891, *[0.7404499830] * 3, 0.8060890800, *[0.8709765842] * 3]
    assert [v for v in s.values() if v] == pytest.approx(expected, abs=1e-10)


def test_erk_without_sparsity_is_dense(lenet):
    assert set(masks.erk_sparsities(lenet, 0.0).values()) == {0.0}
    with pytest.raises(ValueError, match=r"sparsity: 1\.0 is not allowed; it must be a number in \[0, 1\)"):
        masks.erk_sparsities(lenet, 1.0)


def test_random_masks_differ_with_their_stream_alone(lenet):
    s = masks.erk_sparsities(lenet, 0.5)
    a, b, c = (masks.random_mask(lenet, s, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not torch.equal(a["fc1.weight"], c["fc1.weight"])


@pytest.mark.parametrize(
    ("s", "size", "keep"), [(0.9, 10, 1), (0.7, 10, 3), (0.9, 100, 10), (0.8, 5, 1), (0.95, 20, 1)]
)
def test_a_random_mask_loses_no_weight_to_rounding(s, size, keep):
    """(1 − 0.9) · 10 is 0.9999999999999998 in floating point, and cut off it would be 0."""
    m = masks.random_mask({"a": (size,)}, {"a": s}, torch.Generator().manual_seed(0))
    assert int(m["a"].sum()) == keep


def test_a_random_mask_rounds_down():
    m = masks.random_mask({"a": (10,), "b": (3, 3)}, {"a": 0.55, "b": 0.5}, torch.Generator().manual_seed(0))
    assert [int(v.sum()) for v in m.values()] == [4, 4]
    assert m["b"].shape == (3, 3)


def test_magnitude_mask_by_hand():
    w = {"a": torch.tensor([[4.0, -1.0], [0.5, 3.0]]), "b": torch.tensor([-2.0, 0.1])}
    m = masks.magnitude_mask(w, 0.5)
    assert m["a"].tolist() == [[True, False], [False, True]]
    assert m["b"].tolist() == [True, False]
    assert masks.layer_sparsities(m) == {"a": 0.5, "b": 0.5}
    # 1 + 0.25 + 0.01 of 16 + 1 + 0.25 + 9 + 4 + 0.01
    assert masks.pruning_error(w, m) == pytest.approx(1.26 / 30.26)
    assert masks.pruning_error(w | {"bias": torch.tensor([2.0])}, m) == pytest.approx(1.26 / 34.26)


def test_among_equal_magnitudes_the_first_go():
    w = {"a": torch.ones(3), "b": -torch.ones(3)}
    m = masks.magnitude_mask(w, 2 / 3)
    assert [v.tolist() for v in m.values()] == [[False, False, False], [False, True, True]]


def test_masks_are_checked():
    w = {"a": torch.ones(2)}
    for wrong in (torch.ones(2), torch.ones(2, dtype=torch.uint8)):
        with pytest.raises(TypeError, match=r"mask a: torch\.\w+ is not allowed; it must be torch\.bool"):
            masks.pruning_error(w, {"a": wrong})
    with pytest.raises(ValueError, match="mask b: there is no tensor of that name"):
        masks.pruning_error(w, {"b": torch.ones(2, dtype=torch.bool)})
    for s in (-0.1, 1.5, 90):
        with pytest.raises(ValueError, match=f"sparsity: {s} is not allowed"):
            masks.magnitude_mask(w, s)


def test_a_mask_within_another_is_nested():
    w, old = {"a": torch.tensor([9.0, 0.0, 3.0, 5.0])}, {"a": torch.tensor([False, True, True, True])}
    assert masks.magnitude_mask(w, 0.5, within=old)["a"].tolist() == [False, False, True, True]
    assert masks.magnitude_mask(w, 0.0, within=old)["a"].tolist() == [False, True, True, True]
    w, old = w | {"b": torch.tensor([1.0])}, {"b": torch.tensor([False])} | old  # layers are known by their names
    assert masks.magnitude_mask(w, 0.6, within=old)["a"].tolist() == [False, False, True, True]


def test_changes_count_both_directions():
    old = {"a": torch.tensor([True, True, False, False])}
    new = {"a": torch.tensor([True, False, True, True])}
    assert masks.changes(old, new) == (2, 1)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 60), st.floats(0, 1), st.integers(0, 2**31), st.booleans())
def test_magnitude_mask_keeps_the_largest_and_counts_exactly(n, s, seed, coarse):
    g = torch.Generator().manual_seed(seed)
    w = {"a": torch.randn(n, generator=g), "b": torch.randn(3, 2, generator=g)}
    if coarse:  # many ties
        w = {k: v.round() for k, v in w.items()}
    m = masks.magnitude_mask(w, s)
    flat, keep = (torch.cat([v.flatten() for v in d.values()]) for d in (w, m))
    assert int((~keep).sum()) == round(s * (n + 6))
    if keep.any() and not keep.all():
        assert flat[keep].abs().min() >= flat[~keep].abs().max()
    assert 0 <= masks.pruning_error(w, m) <= 1
    assert masks.sparsity_of(m) == pytest.approx(round(s * (n + 6)) / (n + 6))


VALUES = st.sampled_from([-1.0, -0.0, 0.0, 0.5, 0.5, 2.0, float("inf"), -float("inf"), float("nan")])


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(VALUES, st.integers(0, 2)), min_size=1, max_size=30), st.integers(0, 30), st.booleans())
def test_the_largest_are_the_last_of_a_stable_sort(pairs, count, with_votes):
    score, votes = torch.tensor([v for v, _ in pairs]), torch.tensor([n for _, n in pairs])
    count = min(count, len(pairs))
    order = torch.argsort(votes, stable=True) if with_votes else torch.arange(len(pairs))
    last = order[torch.argsort(score[order], stable=True)][len(pairs) - count :]
    kept = masks.largest(score, count, votes if with_votes else None).nonzero().flatten()
    assert kept.tolist() == sorted(last.tolist())
