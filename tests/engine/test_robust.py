"""Averages for a federation in which some clients may lie. Flower gives the same bits: tests/flower."""

import pytest
import torch

from feddip_core.engine import robust
from feddip_core.engine.assembly import assemble


def uploads(*rows):
    return [{"w": torch.tensor(row), "loss": torch.tensor(row[0])} for row in rows]


def test_a_trimmed_mean_and_a_median_by_hand():
    five = uploads([1.0, 9.0], [2.0, 8.0], [3.0, 7.0], [6.0, 1e9], [1e30, -1e9])
    got = robust.trimmed_mean(five, [1] * 5)  # without one at either end
    assert got["w"].tolist() == pytest.approx([(2 + 3 + 6) / 3, (7 + 8 + 9) / 3])
    assert got["loss"].shape == () and got["loss"].item() == got["w"][0].item()
    assert robust.median(five, [1] * 5)["w"].tolist() == [3.0, 8.0]
    assert robust.median(five[:4], [1] * 4)["w"].tolist() == [2.5, 8.5]  # the mean of the two in the middle
    # Of ten a fifth goes at either end; of the two answers that may be left of a round, none.
    ten = uploads(*[[float(v)] for v in (0, 0, 3, 4, 5, 6, 7, 8, 99, 99)])
    assert robust.trimmed_mean(ten, [1] * 10)["w"].tolist() == [5.5]
    assert robust.trimmed_mean(ten[2:4], [1, 1])["w"].tolist() == robust.median(ten[2:4], [1, 1])["w"].tolist() == [3.5]


def test_vectors_are_sorted_part_by_part(monkeypatch):
    monkeypatch.setattr(robust, "PART", 2)
    assert robust.median(uploads([1.0, 6, 3], [4, 5, 9], [7, 2, 0]), [1] * 3)["w"].tolist() == [4, 5, 3]


def test_a_long_update_is_shortened_and_a_short_one_left_alone(tiny, mini):
    exp = tiny("feddip", clients=20, clip_norm=0.01)
    fed, plain = assemble(exp, mini), assemble(exp.replace(clip_norm=0.0), mini)
    state = fed.start()
    clipped, whole = (next(iter(s.collect(state, [3]).uploads)).values["w"] - state.w for s in (fed, plain))
    assert float(whole.norm()) > 0.02 and float(clipped.norm()) == pytest.approx(0.01, rel=1e-4)
    assert torch.allclose(clipped, whole * (0.01 / whole.norm()), atol=1e-6)
    loose = assemble(exp.replace(clip_norm=100.0), mini)
    assert torch.equal(next(iter(loose.collect(state, [3]).uploads)).values["w"] - state.w, whole)


@pytest.mark.parametrize("settings", [dict(aggregation="trimmed_mean"), dict(aggregation="median"), dict(clip_norm=1)])
def test_one_liar_does_not_ruin_a_model(tiny, mini, settings):
    """Its weights are the honest ones times 1,000; the mean of that would be no model."""
    fed = assemble(tiny("feddip", clients=20, clients_per_round=3, **settings), mini)
    honest, state = fed.train_client, fed.start()
    liar = fed.select(0)[0]

    def train(state, n):
        upload = honest(state, n)
        return upload.plus(w=1000 * upload.values["w"]) if n == liar else upload

    fed.train_client = train
    assert float(fed.round(state)[0].w.norm()) < 1.2 * float(state.w.norm())


@pytest.mark.parametrize("rules", ["paper", "released"])
def test_methods_whose_clients_upload_different_weights_are_refused(tiny, mini, rules):
    methods = {"paper": ["feddst"], "released": ["feddst", "prunetrain"]}[rules]
    for method in methods:
        exp = tiny(method, rules=rules, clients_per_round=3)
        for change in (dict(aggregation="median"), dict(clip_norm=1.0)):
            ((name, value),) = change.items()
            with pytest.raises(
                ValueError, match=f"{name}: {value!r} is not allowed; the clients of {method} upload diff"
            ):
                assemble(exp.replace(**change), mini)


def test_a_median_of_two_is_refused(tiny, mini):
    with pytest.raises(ValueError, match="clients_per_round: 2 is not allowed; median needs at least 3"):
        assemble(tiny(aggregation="median"), mini)
