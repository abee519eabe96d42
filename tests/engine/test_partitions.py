import numpy as np
import pytest
import torch

from feddip_core.engine import partitions


def labels(per_class, classes=10):
    return torch.arange(classes).repeat(per_class)


@pytest.mark.parametrize("rule", ["iid", "pathological", "shards", "dirichlet(0.3)", "dirichlet(0.001)"])
def test_partitions_are_disjoint_complete_and_seeded(rule):
    y = labels(120)
    parts = partitions.partition(y, rule, 20, seed=3)
    assert len(parts) == 20
    assert min(len(p) for p in parts) >= 1
    assert torch.cat(parts).sort().values.tolist() == list(range(1200))
    again, other = partitions.partition(y, rule, 20, seed=3), partitions.partition(y, rule, 20, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(parts, other, strict=True))


def test_iid_is_stratified_at_the_papers_scale():
    parts = partitions.iid(labels(6000), 50, seed=0)
    assert {tuple(labels(6000)[p].bincount().tolist()) for p in parts} == {(120,) * 10}


def test_pathological_is_the_split_of_the_released_code():
    y = labels(6000)
    parts = partitions.pathological(y, 50, seed=0)
    held = [y[p].bincount(minlength=10) for p in parts]
    assert [h.nonzero().flatten().tolist() for h in held[::10]] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert [len(p) for p in parts[:10]] == [1198] * 9 + [1218]
    assert held[49].tolist() == [0] * 8 + [609, 609]
    parts = partitions.pathological(labels(5000), 50, seed=0)
    assert [len(p) for p in parts[:10]] == [998] * 9 + [1018]
    y = labels(500, classes=100)
    parts = partitions.pathological(y, 50, seed=0)
    assert y[parts[7]].unique().tolist() == [14, 15]
    assert {len(p) for p in parts} == {1000}


def test_shards_give_few_classes_each():
    y = labels(6000)
    parts = partitions.shards(y, 50, seed=0)
    assert {len(p) for p in parts} == {1200}
    assert max(len(y[p].unique()) for p in parts) <= 2


def test_dirichlet_goes_from_even_to_non_iid():
    y = labels(600)
    share = {
        a: np.mean([y[p].bincount().max() / len(p) for p in partitions.dirichlet(y, 10, a, seed=0)])
        for a in (1000, 0.1)
    }
    assert share[1000] < 0.12
    assert share[0.1] > 0.4


def test_too_many_clients_are_refused():
    with pytest.raises(ValueError, match="clients: 31 is not allowed; 60 training samples allow at most 30"):
        partitions.partition(labels(6), "iid", 31, seed=0)
    with pytest.raises(ValueError, match=r"clients: 7 is not allowed; the pathological partition"):
        partitions.partition(labels(60), "pathological", 7, seed=0)


def test_data_that_are_given_stay_with_their_owner():
    owner = torch.tensor([2, 0, 0, 2])
    parts = partitions.partition(torch.tensor([0, 1, 0, 1]), "given", 4, seed=0, owner=owner)
    assert [p.tolist() for p in parts] == [[1, 2], [], [0, 3], []]


def test_a_class_that_nobody_has_is_dealt_like_the_others():
    parts = partitions.shards(torch.tensor([0, 3, 3, 0, 3, 3]), 1, seed=0)
    assert parts[0].sort().values.tolist() == [0, 1, 2, 3, 4, 5]
    assert [len(c) for c in partitions._classes(torch.tensor([0, 3, 3, 0, 3, 3]), 0)] == [2, 0, 0, 4]
