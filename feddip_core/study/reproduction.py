"""What reproduced, in words: each number of the paper against our interval, each pair against the paper's order.

Every sentence that compares is made here from a verdict, for README and the result notebooks. If a record changes a
verdict, the sentence changes too.
"""

from itertools import product
from pathlib import Path

import pandas as pd

from ..experiment import Experiment
from .summary import TABLES, label, moves, seeds_of
from .tables import find, layer_sparsities, layers, of_runs, over_seeds, shown
from .verdicts import ABOVE, BELOW, EVEN, NONE, ONE, counted, judged, pairs, range_of, sentence
from .wanted import FOUND, PAPER, RELEASED, VERSION_OF, as_released, wanted

WIDE = 2.0  # points: an interval that reaches further to either side decides nothing in these tables
REPRODUCED, BY_CODE, NOT, OPEN = "reproduced", "only by the released code", "not reproduced", "undecided"
COLLAPSED = 15.0  # percent: hardly more than guessing among ten classes
STAR = r" \*"  # beside a method whose penalty was searched
RUNS = {
    "fashion_mnist": "LeNet-5 on Fashion-MNIST",
    "cifar10": "AlexNet on CIFAR-10",
    "cifar100": "ResNet-18 on CIFAR-100",
}
NO_RETURNS = pd.MultiIndex.from_arrays([[], []], names=["rules", "seed"])
SIDES = {"": "the paper's rules", "released_": "the released code"}


# Each number against the paper's.


def against(table: pd.DataFrame, side: str = "") -> pd.DataFrame:
    """ours − paper for each number of `compared`, judged. EVEN: the paper's value is inside our interval."""
    gaps = seeds_of(table, side).sub(table["paper"], axis=0)
    return pd.DataFrame({key: judged(row) for key, row in gaps.iterrows()}).T  # also without a single seed


def place(row: pd.Series) -> str:
    """Where the paper's value lies: inside our interval, or outside it. A wide interval leaves it undecided."""
    inside = f"{'inside' if _known(row) else OPEN}, ± {row['high'] - row['mean']:.1f}"
    words = {EVEN: inside, ABOVE: "outside, ours is above", BELOW: "outside, ours is below"}
    return words.get(row["verdict"], row["verdict"])


def _known(row: pd.Series) -> bool:
    """Whether the interval decides: a value outside it always does, a value inside only if the interval is narrow."""
    return row["n"] > 1 and (row["verdict"] != EVEN or row["high"] - row["mean"] <= WIDE)


def status(method: str, ours: pd.Series, released: pd.Series) -> str:
    """Whether a number of the paper reproduced. One seed or a wide interval leaves it undecided."""
    if not _known(ours):
        return OPEN
    if ours["verdict"] == EVEN:
        return REPRODUCED
    if method not in RELEASED:
        return NOT
    return OPEN if not _known(released) else BY_CODE if released["verdict"] == EVEN else NOT


def statuses(table: pd.DataFrame) -> pd.Series:
    """The status of each number of `compared`."""
    ours, released = against(table), against(table, "released_")
    return pd.Series({key: status(key[1], ours.loc[key], released.loc[key]) for key in table.index}).rename("status")


def numbers(table: pd.DataFrame) -> pd.DataFrame:
    """One row per number of the paper: its distance from ours and from the released code's, and the status."""
    rows = pd.DataFrame({"paper": table["paper"].map("{:.2f}".format)})
    for (side, rules), n in zip(SIDES.items(), ("n", "n, released"), strict=True):
        own = against(table, side)
        here = pd.Series([not side or method in RELEASED for _, method in table.index], index=table.index)
        rows[f"{rules} − paper"], rows[n] = own.apply(range_of, axis=1).where(here, ""), own["n"].where(here, "")
    rows = rows.assign(status=statuses(table)).rename(index=label, level=1)
    return rows.rename_axis(columns=table.attrs.get("reduced"))


def by_table(table: pd.DataFrame) -> pd.DataFrame:
    """How many numbers of each table reproduced."""
    found = statuses(table)
    counts = found.groupby(level=0, sort=False).value_counts().unstack(fill_value=0)
    return counts.reindex(columns=[REPRODUCED, BY_CODE, NOT, OPEN], fill_value=0).rename_axis(columns=None)


def tally(table: pd.DataFrame) -> str:
    """How many numbers have each status, in a sentence."""
    counts = by_table(table).sum()
    parts = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f"Of the paper's {counts.sum()} numbers on Fashion-MNIST: {parts}."


def misses(table: pd.DataFrame) -> list[str]:
    """Which numbers did not reproduce, and which runs ended at guessing, in sentences."""
    found = statuses(table)
    named = ", ".join(f"{label(method)} in {name}" for name, method in found.index[found == NOT])
    return [f"Not reproduced: {named or 'nothing'}.", *filter(None, (_dead(row) for _, row in table.iterrows()))]


def _dead(row: pd.Series) -> str:
    """How many of one number's runs ended at guessing, on both sides; empty if none did."""
    name, method = row.name
    if name not in ("Table III", "Table V"):  # the others have no accuracies, or those of the same runs
        return ""
    own = {rules: row.filter(regex=f"^{side}seed ").dropna() < COLLAPSED for side, rules in SIDES.items()}
    said = [f"{dead.sum()} of {len(dead)} runs by {rules}" for rules, dead in own.items() if dead.any()]
    return f"{label(method)}: {' and '.join(said)} end at guessing." if said else ""


def from_dense(folder: str | Path, dataset: str = "fashion_mnist", preset: str = "paper") -> str:
    """Figure 6's drop by the other reading: from dense FedAvg, not from FedDIP at the first target."""
    *_, last = wanted("extreme_sparsity", preset, dataset).values()
    rounds, _ = find({"dense": wanted("accuracy", preset, dataset)["fedavg"], "last": last}, folder)
    ends = of_runs(rounds)["last five"].unstack("seed").reindex(["last", "dense"])
    printed = PAPER["extreme_sparsity"]["largest_accuracy_drop_points"][dataset]
    row = judged(ends.loc["last"] - ends.loc["dense"] + printed)
    return (
        f"Figure 6's drop counted from dense FedAvg instead, ours − the paper's: {range_of(row)} points, {place(row)}."
    )


def headline(table: pd.DataFrame) -> str:
    """README's table: the paper, ours under its rules and by the released code, and both judged, as Markdown."""
    lines = ["| method | split | paper | ours, the paper's rules | n | paper's value | ours, the released code | n "
             "| paper's value |", "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for (name, method), row in table.loc[["Table III", "Table V"]].iterrows():
        split = "pathological" if name == "Table V" else "IID"
        cells = [label(method) + STAR * searched(method), split, shown(row["paper"], row["paper_std"])]
        for side in ("", "released_") if method in RELEASED else ("",):
            mean, std, n = row[[f"{side}mean", f"{side}std", f"{side}n"]]
            judgement = place(against(table.loc[[(name, method)]], side).iloc[0])
            dead = (seeds_of(table.loc[[(name, method)]], side) < COLLAPSED).to_numpy().sum()
            judgement += f"; {dead} of {n:.0f} runs end at guessing" * bool(dead)
            cells += [shown(mean, std), f"{n:.0f}", judgement]
        lines.append(f"| {' | '.join(cells + [''] * (9 - len(cells)))} |")
    return "\n".join(lines)


def searched(method: str, dataset: str = "fashion_mnist") -> bool:
    """Whether a grid search chose the method's penalty: by test accuracy, with seed 0, which is reported too."""
    return method in FOUND.get(dataset, {})


# Each pair against the paper's order.


def values_of(own: pd.DataFrame, side: str) -> pd.DataFrame:
    """The value of every seed. On the released side, a method without a released version keeps our runs."""
    ours, released = seeds_of(own), seeds_of(own, "released_")
    return pd.DataFrame({m: (released if side and m in RELEASED else ours).loc[m] for m in own.index}).T


def pair_verdicts(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """Every pair of a table, the paper's higher one first: the paper's gap, ours and the released code's, judged."""
    own = table.loc[name]
    columns = {}
    for side, rules in SIDES.items():
        found = pairs(values_of(own, side), own["paper"])
        columns["paper"] = [f"{own['paper'][a] - own['paper'][b]:+.2f}" for a, b in found.index]
        columns |= {
            rules: found.apply(range_of, axis=1),
            f"n, {rules}": found["n"],
            f"verdict, {rules}": found["verdict"],
        }
    rows = pd.DataFrame(columns).rename(index=label).rename_axis(["higher in the paper", "lower"])
    return rows.rename_axis(columns=table.attrs.get("reduced"))


def reversed_pairs(table: pd.DataFrame) -> list[str]:
    """A sentence for each pair that our runs put in the opposite order to the paper's."""
    lines = []
    for name in TABLES:
        own = table.loc[name]
        for side, rules in SIDES.items():
            found = pairs(values_of(own, side), own["paper"])
            for (a, b), row in found[found["verdict"] == BELOW].iterrows():
                lines.append(f"{name}, {rules}: {sentence(label(a), label(b), row)}")
    return lines


def tally_of_pairs(table: pd.DataFrame, side: str = "") -> str:
    """How many pairs of the paper's tables keep its order, reverse it, cannot be told apart, or have one seed."""
    own = [pairs(values_of(table.loc[name], side), table.loc[name, "paper"])["verdict"] for name in TABLES]
    counts = pd.concat(own).value_counts()
    named = {"in the paper's order": ABOVE, "in the opposite order": BELOW, EVEN: EVEN, "with one seed": ONE}
    parts = ", ".join(f"{counts.get(verdict, 0)} {words}" for words, verdict in named.items())
    return f"{sum(map(len, own))} pairs, {SIDES[side]}: {parts}."


def compare(table: pd.DataFrame, name: str, a: str, b: str, side: str = "") -> str:
    """One pair of a table in a sentence."""
    values = values_of(table.loc[name], side)
    names = [label(m) + " by the released code" * (bool(side) and m in RELEASED) for m in (a, b)]
    return sentence(*names, judged(values.loc[a] - values.loc[b]))


# The experiments behind the reasons.


def reasons(folder: str | Path) -> pd.DataFrame:
    """What each single change is worth in points of accuracy, judged, under a readable name."""
    rows = moves(folder)
    return rows.rename(index=_change)


def _change(name: str) -> str:
    if name in VERSION_OF:
        return f"{label(VERSION_OF[name])} by the released code"
    if name.startswith("DPF"):
        return "DPF"
    change = name.removeprefix("FedDP, ")
    whole = {"all four: released": "all four rules of the released code", "dense memory": "a dense memory"}
    own = whole.get(change, f"the released code's {change.removesuffix(': released')}")
    return f"{'FedDIP' if change == name else 'FedDP'} with {own}"


def reason(rows: pd.DataFrame, change: str, base: str = "FedDIP under the paper's rules") -> str:
    """One change in a sentence."""
    return sentence(change, base, rows.loc[change])


def returns(folder: str | Path, dataset: str = "fashion_mnist", preset: str = "paper") -> pd.DataFrame:
    """Per rule and seed: how many weights came back, in how many masks, and the last round that brought any back."""
    rounds, _ = find(wanted("paper_vs_code", preset, dataset), folder)
    rows = {}
    for (rule, seed), own in rounds.groupby(["label", "seed"], sort=False):
        back = own[own["regrown"] > 0]
        rows[rule, seed] = {"returns": own["regrown"].sum(), "masks": len(back), "last round": back["round"].max()}
    index = pd.MultiIndex.from_tuples(list(rows), names=["rules", "seed"]) if rows else NO_RETURNS
    table = pd.DataFrame(list(rows.values()), index=index, columns=["returns", "masks", "last round"])
    return table.fillna(0).astype(int)


def feedback(table: pd.DataFrame, exp: Experiment) -> str:
    """What the records say about weights that return, and on which network."""
    own = table.loc[["the paper's rules"]] if "the paper's rules" in table.index else table.iloc[:0]
    if own.empty:
        return "There is no record of FedDIP under the paper's rules yet."
    counts = ", ".join(f"{row['returns']:,} (seed {seed})" for (_, seed), row in own.iterrows())
    late, seeds = own["last round"].max(), f"{len(own)} seed{'s' * (len(own) != 1)}"
    return (
        f"Seen on one network ({RUNS.get(exp.dataset, exp.dataset)}, IID split, {seeds}): "
        f"pruned weights return {counts} times in {exp.rounds:,} rounds. None returns after round {late}. "
        f"From then on, what error feedback gathers changes no mask."
    )


# How accuracy is read.


def readings(folder: str | Path) -> pd.DataFrame:
    """Highest five − last five of every method, mean over its seeds, under both sets of rules."""
    rows = {}
    for result, side in product(("accuracy", "non_iid"), SIDES):
        own = wanted(result, "paper", "fashion_mnist")
        own = {m: as_released(runs) for m, runs in own.items() if m in RELEASED} if side else own
        runs = of_runs(find(own, folder)[0])
        for method, gap in over_seeds(runs["highest five"] - runs["last five"], own).iterrows():
            cells = {"points": shown(gap["mean"], gap["std"]), "n": int(gap["n"])}
            rows[label(method), own[method][0].partition, SIDES[side]] = cells
    return pd.DataFrame(rows).T.rename_axis(["method", "split", "rules"])


def first_layer(folder: str | Path) -> str:
    """Figure 5's range for the first layer beside ours."""
    own = wanted("layer_sparsity", "paper", "fashion_mnist")["feddip"]
    rounds, _ = find({"feddip": own}, folder)
    size = layers(own[0])["size"]
    values = pd.Series([layer_sparsities(r, size)["feddip"].iloc[0] for _, r in rounds.groupby("seed")], dtype=float)
    low, high = PAPER["layerwise"]["first_layer_sparsity_range"]
    row, under, over = judged(values), judged(values - low)["verdict"], judged(values - high)["verdict"]
    if row["verdict"] == NONE:
        return "There is no record of FedDIP yet."
    ours = f"{row['mean']:.2f}" + (f" [{row['low']:.2f}, {row['high']:.2f}]" if row["n"] > 1 else "")
    where = "inside" if low <= row["mean"] <= high else "below" if row["mean"] < low else "above"
    decided = "one seed gives no verdict" if under == ONE else "our interval reaches into it"
    decided = "and so is our whole interval" if under == BELOW or over == ABOVE else decided
    verdict = f"our mean is {where} this range" + ("" if where == "inside" and under != ONE else f"; {decided}")
    told = f"FedDIP's first layer ends with a fraction of {ours} zeros ({counted(row)})"
    return f"{told}. The paper gives {low} to {high}: {verdict}."
