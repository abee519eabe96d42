"""The explorer's controls: their names and ranges, presets that move several, and what a move means in words."""

from collections.abc import Mapping
from typing import Any

import ipywidgets as widgets
import pandas as pd

from ..experiment import Experiment
from ..method import METHODS
from .page import control

SETTINGS = {  # of the controls: what a reader sees beside each
    "method": "Method", "partition": "Partition", "seed": "Seed",
    "rounds": "Rounds T", "reconfigure_every": "New mask every R", "sparsity_initial": "First sparsity s_0",
    "sparsity_target": "Target sparsity s_p", "lambda_max": "Penalty λ_max", "lambda_steps": "Penalty steps Q",
    "sparse_uplink": "Sparse uplink",
}  # fmt: skip
PARTITIONS = ("iid", "pathological", "shards", "dirichlet(0.1)", "dirichlet(0.5)", "dirichlet(5)")
PENALTIES = (0.0, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3)

# The paper's schedules in 40 rounds instead of 1,000; the other presets change what they are named after.
PAPER: dict[str, Any] = dict(
    method="feddip", partition="iid", rounds=40, reconfigure_every=5, sparsity_initial=0.5, sparsity_target=0.9,
    lambda_max=1e-3, lambda_steps=10, sparse_uplink=False,
)  # fmt: skip
PRESETS: dict[str, tuple[dict[str, Any], str]] = {
    "The paper": (PAPER, "The paper's schedules, in 40 rounds instead of 1,000."),
    "Prune too fast": (
        PAPER | dict(rounds=10, reconfigure_every=1, sparsity_target=0.98),
        "From 50 % to 98 % zeros in ten rounds. Can the network keep up?",
    ),
    "Never reconfigure": (
        PAPER | dict(reconfigure_every=50), "R is more than T: the random first mask stays to the end."
    ),
    "Kill the network": (
        PAPER | dict(lambda_max=0.3, lambda_steps=20), "A penalty 300 times the paper's. Watch when the accuracy falls."
    ),
    "Sparse both ways": (
        PAPER | dict(sparse_uplink=True),
        "Pruned weights travel back only when a new mask is due. Compare with The paper.",
    ),
}  # fmt: skip


def controls(base: Experiment) -> dict[str, widgets.Widget]:
    """One control per setting, at the base's value; a setting that the base lacks waits for a method that has it."""
    values = {**Experiment.preset("smoke").to_dict(), **base.to_dict()}
    kinds: dict[str, tuple[type, dict[str, Any]]] = {}
    kinds["method"] = (widgets.Dropdown, dict(options=[(cls.label, name) for name, cls in METHODS.items()]))
    kinds["partition"] = (widgets.Combobox, dict(options=PARTITIONS))
    kinds["seed"] = (widgets.IntText, {})
    kinds["rounds"] = (widgets.IntSlider, dict(min=1, max=max(200, values["rounds"])))
    kinds["reconfigure_every"] = (widgets.IntSlider, dict(min=1, max=max(50, values["reconfigure_every"])))
    share = dict(min=0, max=max(0.99, values["sparsity_target"]), step=0.01, readout_format=".2f")
    kinds["sparsity_initial"] = kinds["sparsity_target"] = (widgets.FloatSlider, share)
    penalties = [(f"{value:g}", value) for value in sorted({*PENALTIES, values["lambda_max"]})]
    kinds["lambda_max"] = (widgets.SelectionSlider, dict(options=penalties))
    kinds["lambda_steps"] = (widgets.IntSlider, dict(min=1, max=max(20, values["lambda_steps"])))
    kinds["sparse_uplink"] = (widgets.Checkbox, dict(indent=True))
    return {k: control(kinds[k][0], text, value=values[k], **kinds[k][1]) for k, text in SETTINGS.items()}


def value_of(widget: widgets.Widget) -> Any:
    """What a control is at; a slider's steps of 0.01 add up to 0.44000000000000006."""
    return round(widget.value, 6) if isinstance(widget, widgets.FloatSlider) else widget.value


def mistake(error: Exception, values: Mapping[str, Any], moved: str) -> tuple[str, str]:
    """Beside which control an error belongs, and its text in the controls' words."""
    s_0, s_p = (values.get(name) for name in ("sparsity_initial", "sparsity_target"))
    if s_0 is not None and s_p is not None and s_0 > s_p:
        place = moved if moved == "sparsity_target" else "sparsity_initial"
        return place, f"First sparsity {s_0:g} must not exceed the target {s_p:g}"
    field, colon, rest = str(error).partition(": ")
    if not colon or not field.isidentifier():
        return moved, str(error)
    return field if field in SETTINGS else moved, f"{SETTINGS.get(field, field)} {rest}"


def remarks(exp: Experiment, planned: pd.DataFrame) -> dict[str, str]:
    """Effects that are allowed but hardly intended, by the control that could change each."""
    found, has = {}, exp.to_dict()
    T, R, Q, end = exp.rounds, has.get("reconfigure_every"), has.get("lambda_steps"), planned["sparsity"].iloc[-1]
    if exp.rules == "paper" and R and R > T:
        found["reconfigure_every"] = f"R {R} is more than T {T}: no new mask. The run ends at sparsity {end:.3g}."
    elif R and T % R and has.get("sparsity_target", end) > end + 5e-4:
        last = f"The last new mask comes after round {T - T % R} of {T}"
        found["reconfigure_every"] = f"{last}: the run ends at sparsity {end:.3g}, not at the target."
    if Q and has["lambda_max"] == 0:
        found["lambda_steps"] = "No effect: the penalty is 0."
    elif Q == 1:
        found["lambda_steps"] = "One step means no penalty: Eq. 9 starts at 0."
    elif Q and Q > T:
        found["lambda_steps"] = f"Q {Q} is more than T {T}: some steps are skipped."
    if "sparsity_initial" in has and 0 < has["sparsity_initial"] == has["sparsity_target"]:
        found["sparsity_target"] = "Equal to the first sparsity: masks change, their size does not."
    if has.get("sparse_uplink") and R == 1:
        found["sparse_uplink"] = "Saves nothing at R 1: every round reads the pruned weights."
    return found
