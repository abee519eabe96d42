import base64
from types import SimpleNamespace

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch

from feddip_core import METHODS, Experiment, Method
from feddip_core.experiment import is_hook
from feddip_core.study import figures


@pytest.fixture
def runs():
    columns = {
        "round": [1, 2, 3, 4],
        "test_accuracy": [0.1, 0.4, 0.5, 0.6],
        "sparsity": [0.5, 0.7, 0.7, 0.9],
        "lambda_": [0, 0, 1e-4, 1e-4],
        "test_loss": [2.3, 1.5, 1.2, 1.0],
        "train_loss": [2.3, 1.4, 1.1, 0.9],
        "delta": [0.01, 0.2, 0.02, 0.1],
        "dropped": [0, 5, 0, 5],
        "regrown": [0, 1, 0, 0],
        "downlink_bits": [80_000] * 4,
        "uplink_bits": [160_000] * 4,
    }
    metrics = pd.DataFrame(columns)
    return {"fedavg": metrics.assign(downlink_bits=160_000), "feddip": metrics}


def test_the_quickstart_figure_shows_the_runs(runs):
    figure = figures.quickstart(runs, clients_per_round=2)
    accuracy, schedule, delta, download = figure.axes[:4]
    assert [line.get_label() for line in accuracy.lines] == ["FedAvg", "FedDIP"]
    assert download.lines[0].get_ydata().tolist() == [10.0] * 4  # 160,000 bits to two clients are 10 kB each
    assert delta.lines[1].get_xdata().tolist() == [2, 4]  # dots at the new masks
    assert all(ax.get_xlabel() == "round" and ax.get_ylabel() for ax in (accuracy, schedule, delta, download))
    plt.close(figure)


def test_a_run_that_diverged_is_shown_as_such(runs):
    diverged = runs["feddip"].assign(test_loss=[2.3, 1.5, np.inf, np.nan])
    assert figures.diverged_at(runs["feddip"]) is None
    assert figures.diverged_at(diverged) == 3
    figure, ax = plt.subplots()
    figures.accuracy(ax, {"feddip": diverged})
    assert ax.lines[0].get_label() == "FedDIP (diverged in round 3)"
    assert (ax.lines[1].get_marker(), ax.lines[1].get_xdata().tolist()) == ("X", [2])
    plt.close(figure)


def test_every_method_has_its_own_colour_name_and_line():
    ours = [method for method in METHODS if not is_hook(method)]
    assert (
        len({figures.colour(method) for method in ours}) == len({figures.label(method) for method in ours}) == len(ours)
    )
    assert all(figures.line(method) in figures.OWN_LINES for method in ours)
    assert not {figures.colour(method) for method in ours} & set(figures.OWN_COLOURS)


def test_a_method_of_ones_own_has_a_look_whether_it_is_here_or_not(runs):
    class Mine(Method):
        pass

    class Loud(Method):
        label, colour, line = "Loud", "#123456", ":"

    here, loud = (Experiment.preset("smoke", method=cls).method for cls in (Mine, Loud))
    away = "yours:Theirs"
    assert [figures.label(method) for method in (here, loud, away)] == ["Mine", "Loud", "Theirs"]
    assert (figures.colour(loud), figures.line(loud)) == ("#123456", ":")
    for method in (here, away):
        assert figures.colour(method) in figures.OWN_COLOURS and figures.line(method) in figures.OWN_LINES
    figure = figures.quickstart(runs | {here: runs["feddip"], away: runs["feddip"]}, clients_per_round=2, pruned=here)
    assert [line.get_label() for line in figure.axes[0].lines] == ["FedAvg", "FedDIP", "Mine", "Theirs"]
    plt.close(figure)


def test_a_shown_figure_is_a_picture_with_words_and_is_closed(runs, tmp_path):
    before = plt.get_fignums()
    picture = figures.show(figures.quickstart(runs, clients_per_round=2), "four panels", tmp_path, "figure")
    data, metadata = picture._repr_mimebundle_()
    assert data["text/plain"] == metadata["image/png"]["alt"] == "four panels"
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert plt.get_fignums() == before
    assert sorted(p.name for p in (tmp_path / "figures").iterdir()) == ["figure.png", "figure.svg"]


def test_a_figure_describes_itself_or_is_refused(runs):
    figure = figures.described(figures.quickstart(runs, clients_per_round=2), "four panels")
    assert figures.show(figure, note="a toy").alt == "four panels (a toy)"
    with pytest.raises(ValueError, match="alt: '' is not allowed"):
        figures.show(figures.quickstart(runs, clients_per_round=2))


def test_a_note_stands_above_the_figure_and_in_its_words(runs):
    figure = figures.quickstart(runs, clients_per_round=2)
    picture = figures.show(figure, "four panels", note="reduced: E = 1 for 5")
    assert figure.get_suptitle() == "reduced: E = 1 for 5"
    assert picture.alt == "four panels (reduced: E = 1 for 5)"


def test_figures_of_many_methods(runs):
    history = {name: np.array([[True, True, False], [True, False, True]]) for name in ("snip", "feddst", "feddip")}
    for figure in (
        figures.side_by_side(runs),
        figures.mask_history(history),
        figures.final_weights({"snip": np.array([0, 0.1])}),
    ):
        assert figure.axes
        plt.close(figure)
    figure = figures.mask_history(history)
    assert figure.axes[0].images[0].get_array().tolist() == [[1, 1, 0], [1, 0, 2]]
    plt.close(figure)


@pytest.mark.slow
def test_a_saved_figure_has_the_same_bytes_twice(runs, tmp_path):
    for name in ("a", "b"):
        figure = figures.quickstart(runs, clients_per_round=2)
        figures.save(figure, tmp_path / name, "figure")
        plt.close(figure)
    for ending in ("png", "svg"):
        assert (tmp_path / f"a/figure.{ending}").read_bytes() == (tmp_path / f"b/figure.{ending}").read_bytes()


def test_a_panel_gives_a_method_its_colour_and_bridges_gaps():
    table = pd.DataFrame({"FedDIP": [0.1, None, 0.3], "anything": [1.0, 2.0, 3.0]}, index=[1, 2, 3])
    figure = figures.panels({"left": table, "right": table[["anything"]]}, "round", "accuracy", ylim=(0, 4))
    left, right = figure.axes
    assert [line.get_color() for line in left.lines] == [figures.colour("feddip"), figures.SPARE[0]]
    assert left.lines[0].get_xdata().tolist() == [1, 3]
    assert (left.get_ylabel(), right.get_title("left"), right.get_ylim()) == ("accuracy", "right", (0, 4))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["FedDIP", "anything"]
    plt.close(figure)


def test_a_picture_of_weights_leaves_out_what_is_pruned():
    w = torch.arange(16.0).view(2, 2, 2, 2)
    figure = figures.matrices({"pruned": (w, w != 5), "whole": w, "dense": (w, None)}, numbers=True)
    pruned, *others = ([text.get_text() for text in ax.texts] for ax in figure.axes)
    # Output channels below each other, input channels beside each other, each a 2 × 2 kernel.
    assert pruned == ["0", "1", "4", "×", "2", "3", "6", "7", "8", "9", "12", "13", "10", "11", "14", "15"]
    assert [t if t != "×" else "5" for t in pruned] == others[0] == others[1]
    plt.close(figure)


def test_what_clients_hold_is_counted_and_shown():
    x = torch.arange(4, dtype=torch.uint8).view(4, 1, 1, 1).expand(4, 1, 2, 2)
    dataset = SimpleNamespace(x_train=x, y_train=torch.tensor([0, 0, 1, 1]))
    parts = [torch.tensor([0, 1]), torch.tensor([2, 3])]
    assert figures.mosaic(x, parts, images=2).tolist() == [[0, 0, 1, 1]] * 2 + [[2, 2, 3, 3]] * 2
    figure = figures.holdings(dataset, {"split": parts}, images=2)
    assert [text.get_text() for text in figure.axes[1].texts] == ["2", "2"]
    plt.close(figure)


def test_a_trajectory_has_a_point_per_step_and_falls_at_the_end_of_a_round():
    paths = {"paper": [0, 0.1, 0.2, 0, 0.1, 0.2], "dense_memory": [0, 0.1, 0.2, 0.2, 0.3, 0.4]}
    figure = figures.trajectories(paths, steps=2, threshold=0.3)
    assert figure.axes[0].lines[0].get_xdata().tolist() == [0, 1, 2, 2, 3, 4]
    plt.close(figure)


def test_the_drawing_of_a_round_names_the_bits_of_every_arrow():
    bits = {n: {"weights": 1000 + n, "mask": 100, "upload": 2000} for n in (3, 7)}
    figure = figures.one_round(bits)
    words = "\n".join(text.get_text() for text in figure.axes[0].texts)
    assert all(word in words for word in ("client 3", "client 7", "1,003 bits", "1,007 bits", "mask 100 bits"))
    assert words.count("2,000 bits") == 2


def test_the_theorems_figure_shows_both_sides_and_every_term():
    terms = {"initial gap": [8.0, 8.0], "pruning": [1.0, 2.0], "χ": [4.0, 4.0], "right side": [13.0, 14.0]}
    columns = {(form, term): values for form in figures.FORMS for term, values in terms.items()}
    columns |= {("left side", "mean"): [1.0, 0.5], ("left side", "μ²"): [2.0, 2.0]}
    figure = figures.theorem(pd.DataFrame(columns, index=[5, 10]))
    left, right = figure.axes
    assert [line.get_ydata().tolist() for line in left.lines[:5]] == [[13, 14]] * 4 + [[1, 0.5]]
    assert [bar.get_height() for bar in right.patches[:3]] == [8, 2, 4]
    assert right.get_title(loc="left").endswith("T = 10")
    plt.close(figure)


def test_the_pruning_figures_show_what_was_observed(runs):
    observed = runs["feddip"].assign(pruned_norm=[1.0, 2.0, 1.0, 3.0])
    figure = figures.pruning_terms({"FedDIP": observed, "not observed": runs["feddip"]})
    delta, norm = figure.axes
    assert [line.get_xdata().tolist() for line in norm.lines] == [[1, 3], [2, 4]]  # dots at the new masks
    assert len(delta.lines) == 4
    plt.close(figure)
    figure = figures.pruning_sums({"FedDIP": observed, "not observed": runs["feddip"]})
    assert figure.axes[1].lines[0].get_ydata().tolist() == [1, 3, 4, 7]
    plt.close(figure)


@pytest.mark.parametrize(("curve", "low"), [([10, 80, 81, 82], 70), ([10, 80, 41, 82], 30), ([50, 60, 10, 10], 0)])
def test_an_axis_of_accuracy_shows_all_of_the_second_half(curve, low):
    figure, ax = plt.subplots()
    ax.plot(curve)
    ax.axhline(85)
    assert figures.percent_axis(ax).get_ylim() == (low, 90)
    plt.close(figure)


def test_runs_that_collapse_do_not_stretch_the_axes():
    """Seeds that end far apart are a line each; those at guessing are named, and their mean is written at the edge."""
    rounds = pd.DataFrame({"round": [1, 2, 3, 4] * 2, "label": "prunetrain", "seed": [0] * 4 + [1] * 4})
    rounds["test_accuracy"] = [0.5, 0.7, 0.8, 0.8, 0.5, 0.1, 0.1, 0.1]
    ours = pd.DataFrame({"mean": [88.0, 45.0], "std": [0.5, 49.5]}, index=["fedavg", "prunetrain"])
    figure = figures.against_paper(rounds, ours, {"prunetrain": 84.0}, "last five")
    left, right = figure.axes
    assert [line.get_ydata()[-1] for line in left.lines[:2]] == [80, 10] and left.get_ylim() == (70, 90)
    assert [text.get_text() for text in left.texts] == ["off the scale: 1 run of PruneTrain"]
    assert [text.get_text() for text in right.texts] == ["◂ 45 ± 50"] and right.get_xlim()[0] > 80
    assert left.get_legend_handles_labels()[1] == ["PruneTrain"]
    plt.close(figure)


def test_a_single_run_at_guessing_stays_on_the_axis():
    """Values of the paper are no runs, and the pale line of every round has no name."""
    rounds = pd.DataFrame({"round": [1, 2, 3, 4], "label": "fedavg", "seed": 0, "test_accuracy": 0.1})
    ours = pd.DataFrame({"mean": [10.0], "std": [float("nan")]}, index=["fedavg"])
    figure = figures.against_paper(rounds, ours, {"fedavg": 80.0}, "last five", raw=True)
    assert figure.axes[0].get_ylim()[0] == 0 and not figure.axes[0].texts
    rounds = pd.concat([rounds, rounds.assign(seed=1, label="feddip", test_accuracy=0.8)])
    figure = figures.against_paper(rounds, ours, {"fedavg": 80.0}, "last five", raw=True)
    assert [text.get_text() for text in figure.axes[0].texts] == ["off the scale: 1 run of FedAvg"]
    plt.close("all")
