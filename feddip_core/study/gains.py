"""Beyond the paper, from records: what ours reach and send, what each ingredient is worth, and which goals are met."""

import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from ..engine import records
from .beyond import SEEDS, TARGETS, candidates, chosen, said
from .choosing import SEED, experiment
from .findings import uplinks
from .standings import row_of
from .tables import BITS, find, of_runs, shown
from .verdicts import ABOVE, BELOW, judged, range_of, sentence
from .wanted import Wanted, of_paper, wanted

LOOKED_AT = 0  # the seed that was looked at while the methods were made; it stands in where no other has a record
MET, MISSED, SOME, OPEN = "met", "missed", "not all seeds yet", "not run yet"
BENCHMARK = records.OWN_RECORDS.parent / "benchmarks" / "networks.csv"


def read(folder: str | Path) -> tuple[Wanted, pd.DataFrame, pd.DataFrame]:
    """The runs that are reported, the rounds of those that are there (seed 0 too), and the state of each."""
    runs = wanted("beyond", "paper", "fashion_mnist", folder=folder)
    first = {label: [exps[0].replace(seed=LOOKED_AT)] for label, exps in runs.items()}
    rounds, states = find(runs, folder)
    looked_at, _ = find(first, folder)
    return runs, pd.concat([own for own in (rounds, looked_at) if len(own)] or [rounds], ignore_index=True), states


def values_of(rounds: pd.DataFrame) -> pd.DataFrame:
    """One row per label, one column per seed: the last five rounds; on the pathological split the highest five."""
    runs = of_runs(rounds)
    uneven = runs.index.get_level_values("label").str.contains("pathological")
    values = runs["last five"].where(~uneven, runs["highest five"])
    return values.unstack("seed").reindex(columns=[LOOKED_AT, *SEEDS])


def table_of(runs: Wanted, rounds: pd.DataFrame) -> pd.DataFrame:
    """One row per label: accuracy over the reported seeds, cost, n. Where none is there, seed 0's with n = 0."""
    rows = {}
    for label, exps in runs.items():
        own = rounds[rounds["label"] == label]
        told = own[own["seed"] != LOOKED_AT]
        rows[label] = row_of(label, exps, told if len(told) else own) | {"n": told["seed"].nunique()}
    table = pd.DataFrame(rows).T.astype(float)
    values = values_of(rounds).reindex(table.index)
    few = values[list(SEEDS)]  # by the statistic of their split, unlike `row_of`
    own = {"accuracy": few.mean(axis=1).fillna(values[LOOKED_AT]), "std": few.std(axis=1)}
    own |= {"seed 0": values[LOOKED_AT], "MB": table["MB down"] + table["MB up"], "n": table["n"].astype(int)}
    return table.assign(**own)


def on_figure(table: pd.DataFrame) -> pd.DataFrame:
    """What can be compared at one glance: the IID split, without the single ingredients."""
    return table.loc[[not label.endswith(("pathological", " alone")) for label in table.index]]


def papers() -> dict[str, float]:
    """The paper's accuracies, under the labels whose bytes they have here."""
    printed = of_paper("accuracy_iid", "fashion_mnist")
    return {"FedAvg": printed["fedavg"][0], "FedDIP, 90%": printed["feddip"][0]}


def as_shown(table: pd.DataFrame) -> pd.DataFrame:
    """The table for readers."""
    looked_at = (table["n"] == 0) & table["accuracy"].notna()
    numbers = zip(table["accuracy"], table["std"], looked_at, strict=True)
    accuracy = [f"{shown(mean, std)}{' †' if only else ''}" for mean, std, only in numbers]
    columns = {"accuracy (%)": accuracy, "n": table["n"]} | {k: table[k].map(_whole) for k in ("MB down", "MB up")}
    return pd.DataFrame(columns | {"kept": table["kept"].map(_whole)}, index=table.index)


def _whole(value: float) -> str:
    return "–" if pd.isna(value) else f"{value:,.0f}"


# What is a difference.


def steps_at(runs: Wanted, s: float) -> str:
    """The end of the labels that share our best's step size at this target."""
    return said(runs[f"best, {s:.0%}"][0])


def opponents(runs: Wanted, s: float) -> list[str]:
    """FedDIP at this target with our best's step sizes, by both rules; none while the best is not chosen."""
    best = f"best, {s:.0%}"
    return [f"{name}, {s:.0%}{steps_at(runs, s)}" for name in ("FedDIP", "FedDIP, released")] if best in runs else []


def without_steps(label: str) -> str:
    """The label of the same runs with Table II's steps."""
    return re.sub(r", steps of [^,]+, decay [^,]+", "", label)


def pairs(runs: Wanted) -> dict[str, list[tuple[str, str]]]:
    """Which runs are compared, by question; only pairs that are wanted."""
    targets = [f"{s:.0%}" for s in (0.9, 0.99)]
    ends = {s: steps_at(runs, s) for s in (0.9, 0.99) if f"best, {s:.0%}" in runs}
    asked = {
        "ours": [(f"FedGMP, {s}", f"{other}, {s}") for s in targets for other in ("FedDIP", "FedDIP, released")]
        + [("FedGMP, 90%", "FedAvg")]
        + [(f"best, {s:.0%}", other) for s in (0.9, 0.99) for other in opponents(runs, s)]
        + [(f"best, {s:.0%}", f"FedAvg{end}") for s, end in ends.items()]
        + [(f"best, {s}", f"FedGMP, {s}") for s in ("90%", "95%", "99%")],
        "ingredients": [(label, "FedGMP, 99%") for label in runs if label.endswith(" alone")],
        "the steps": [(label, without_steps(label)) for label in runs if ", steps of" in label],
        "sixteen bits": [(label, label.removesuffix(", 16 bits")) for label in runs if label.endswith("16 bits")],
        "pathological": [("FedGMP, 90%, pathological", "FedAvg, pathological")]
        + [(f"best, {s:.0%}, pathological", f"FedAvg{end}, pathological") for s, end in ends.items()],
    }
    return {name: [(a, b) for a, b in own if a in runs and b in runs] for name, own in asked.items()}


def compared(values: pd.DataFrame, asked: Sequence[tuple[str, str]]) -> pd.DataFrame:
    """a − b for each pair, judged over the reported seeds that both have."""
    told = values[list(SEEDS)].reindex(sorted({label for pair in asked for label in pair}))
    return pd.DataFrame({(a, b): judged(told.loc[a] - told.loc[b]) for a, b in asked}).T


def as_worth(compared: pd.DataFrame) -> pd.DataFrame:
    """The differences for readers."""
    columns = {"points": [range_of(row) for _, row in compared.iterrows()]}
    columns |= {k: list(compared[k]) if len(compared) else [] for k in ("n", "verdict")}
    index = pd.MultiIndex.from_tuples(compared.index, names=["", "against"]) if len(compared) else None
    return pd.DataFrame(columns, index=index)


def told(values: pd.DataFrame, asked: dict[str, list[tuple[str, str]]]) -> list[str]:
    """Each difference that the seeds can tell from nothing, in a sentence."""
    rows = compared(values, [pair for own in asked.values() for pair in own])
    return [sentence(a, b, row) for (a, b), row in rows.iterrows() if row["verdict"] in (ABOVE, BELOW)]


# How the choice was made.


def tried(s: float, folder: str | Path) -> pd.DataFrame:
    """Each candidate at this target: accuracy and cost with the seed of the choice, and its gap to the first one."""
    runs = {name: [experiment("fashion_mnist", own, SEED)] for name, own in candidates(s).items()}
    rounds, _ = find(runs, folder)
    accuracy = of_runs(rounds)["last five"].droplevel("seed").reindex(list(runs))
    sent = (rounds.groupby("label")[BITS].sum().sum(axis=1) / 8e6).reindex(list(runs))
    gap = accuracy - accuracy.iloc[0]
    told = {"accuracy (%)": accuracy.map(shown), "points": gap.map(lambda g: "–" if pd.isna(g) else f"{g:+.2f}")}
    return pd.DataFrame(told | {"MB": sent.map(_whole)})


def all_tried(folder: str | Path) -> pd.DataFrame:
    """The candidates of every target."""
    return pd.concat([tried(s, folder) for s in TARGETS])


def unhelpful(folder: str | Path) -> list[str]:
    """Per target, the candidates that did not end above the first one; one seed, so no verdicts."""
    lines = []
    for s in TARGETS:
        (_, first), *points = tried(s, folder)["points"].items()
        worse = [f"{name.partition(', ')[2]} ({gap})" for name, gap in points if gap.startswith(("-", "+0.00"))]
        there = sum(gap != "–" for _, gap in points)
        found = "" if first == "–" else f" Not above the first candidate: {', '.join(worse) or 'none of them'}."
        lines += [f"{s:.0%} zeros, seed {SEED}: {there} of {len(points)} changes can be judged yet.{found}"]
    return lines


def time_of_a_client() -> pd.DataFrame:
    """CPU seconds of a client's training of LeNet-5, and their ratio to a dense model's; empty if unmeasured."""
    if not BENCHMARK.exists():
        return pd.DataFrame()
    table = pd.read_csv(BENCHMARK)
    return table[(table["model"] == "lenet5") & (table["gradient"] == "native") & (table["work"] == "training")]


def as_times(table: pd.DataFrame) -> pd.DataFrame:
    """The same for readers: a row per share of zeros."""
    if table.empty:
        return table
    told = [f"{ratio:.2f} × ({seconds:.3f} s)" for ratio, seconds in zip(table["ratio"], table["seconds"], strict=True)]
    how = table["feedback"].map({True: "with feedback", False: "without feedback"})
    wide = table.assign(told=told, how=how).pivot(index="sparsity", columns="how", values="told").fillna("")
    return wide.rename(index="{:.0%}".format).rename_axis(index="zeros", columns=None)


def choice(s: float, folder: str | Path) -> str:
    """Which candidate was chosen at this target, or how many records the choice still waits for."""
    own, found = candidates(s), chosen(s, folder=folder)
    if found is None:
        there = (tried(s, folder)["accuracy (%)"] != "–").sum()
        return f"{s:.0%} zeros: not chosen yet; {there} of {len(own)} candidates have a record."
    return f"Chosen: {next(name for name, changes in own.items() if changes == found)}."


# README's rows.

SHOWN = ("FedGMP, 90%", "best, 90%", "best, 95%", "best, 99%")


def headline(folder: str | Path) -> str:
    """README's rows of our own methods, over the reported seeds, as Markdown; a run without a record has a dash."""
    runs, rounds, _ = read(folder)
    table = table_of(runs, rounds)
    dense, table = table.loc["FedAvg", "MB"], table.reindex(SHOWN)
    lines = ["| method, zeros | accuracy | MB, both ways | of FedAvg's | n |", "|---|---|---|---|---|"]
    for label, row in table.iterrows():
        cells = ["–", "–", "–", "0"]
        if row["n"] > 0:  # seed 0 was looked at: it does not stand in here
            share = f"{row['MB'] / dense:.0%}"
            cells = [shown(row["accuracy"], row["std"]), _whole(row["MB"]), share, f"{row['n']:.0f}"]
        lines.append(f"| {' | '.join([str(label).replace('best', 'our best'), *cells])} |")
    return "\n".join(lines)


# The goals.


def goals(runs: Wanted, rounds: pd.DataFrame, folder: str | Path) -> pd.DataFrame:
    """Each goal, what was found, and whether it is met; open until all reported seeds of all its runs are there."""
    table, values, paper = table_of(runs, rounds), values_of(rounds), papers()
    mean, MB = table["accuracy"], table["MB"]
    rows = []

    def add(zeros: float, goal: str, labels: list[str], found: str, met: bool) -> None:
        there = min((int(table["n"].get(label, 0)) for label in labels), default=0)
        rows.append(_goal(zeros, goal, found, there, len(SEEDS), met))

    def accuracy(s: float, goal: float, words: str) -> None:
        best = f"best, {s:.0%}"
        own = mean.get(best, float("nan"))
        add(s, f"{words} {goal:.2f} %", [best], f"{own:.2f} %", own >= goal)

    accuracy(0.99, 87.0, "at least")
    best, others = "best, 99%", opponents(runs, 0.99)
    # Large steps may harm FedDIP: the gap is that to its best run, with ours or with Table II's.
    others += [f"{name}, 99%" for name in ("FedDIP", "FedDIP, released") if others]
    needs = [best, *others] if others else []
    strongest = max(others, key=lambda label: mean.fillna(0)[label], default=None)
    goal = "2 points above the best FedDIP, with the same steps or Table II's"
    gap = compared(values, [(best, strongest)]).iloc[0]["mean"] if strongest else float("nan")
    share = MB[best] / MB[strongest] if strongest else float("nan")
    add(0.99, goal, needs, f"{gap:+.2f} points", gap >= 2)
    add(0.99, "at most a third of that FedDIP's bytes", needs, f"{share:.1%}", share <= 1 / 3)
    accuracy(0.95, paper["FedDIP, 90%"], "at least the paper's FedDIP at 90%:")
    accuracy(0.9, paper["FedAvg"], "at least the paper's FedAvg:")
    best = "best, 90%"
    share = MB.get(best, float("nan")) / MB["FedAvg"]
    add(0.9, "at most 30% of FedAvg's bytes", [best, "FedAvg"], f"{share:.1%}", share <= 0.3)
    fedavg = f"FedAvg{steps_at(runs, 0.9)}" if best in runs else "FedAvg"
    verdict = compared(values, [(best, fedavg)]).iloc[0]
    words = f"{range_of(verdict)} points, {verdict['verdict']}"
    add(0.9, "not below our FedAvg with the same steps", [best, fedavg], words, verdict["verdict"] != BELOW)
    return pd.DataFrame([*rows, *(_same_model(folder, s) for s in (0.9, 0.99)), *_faster()]).set_index("zeros")


def _goal(zeros: float, goal: str, found: str, there: int, of: int, met: bool) -> dict[str, str]:
    state = OPEN if not there else SOME if there < of else MET if met else MISSED
    told = {"found": found if there else "–", "seeds": f"{there} of {of}", "state": state}
    return {"zeros": f"{zeros:.0%}", "goal": goal} | told


def _same_model(folder: str | Path, s: float) -> dict[str, str]:
    both = uplinks(folder, SEEDS, sparsity_target=s)
    goal = "sparse uplink: the same model in every round"
    return _goal(s, goal, f"largest difference {both.gap:.2g}", both.pairs, len(both.seeds), both.gap == 0)


def _faster() -> list[dict[str, str]]:
    """From the benchmark, which needs no seeds."""
    table = time_of_a_client()
    return [
        {"zeros": f"{row['sparsity']:.0%}", "goal": f"without feedback, a client {row['goal']:g} times as fast",
         "found": f"{row['ratio']:.2f} times", "seeds": "", "state": MET if row["ratio"] >= row["goal"] else MISSED}
        for _, row in (table if table.empty else table.dropna(subset="goal")).iterrows()
    ]  # fmt: skip


def answer(runs: Wanted, table: pd.DataFrame, states: pd.DataFrame) -> str:
    """What the records say so far, in a sentence per target; nothing where a side has no record."""
    lines, there = [], table["n"] > 0
    for s in TARGETS:
        best, others = f"best, {s:.0%}", [label for label in opponents(runs, s) if there.get(label)]
        if there.get(best) and not others:  # as at 95 %, where the goal is the paper's number
            paper = papers()["FedDIP, 90%"]
            lines.append(f"At {s:.0%} zeros {_reached(table, best)}; the paper's FedDIP has {paper:.2f} % at 90%.")
            continue
        sides = [(best, others), (f"FedGMP, {s:.0%}", [f"FedDIP, {s:.0%}"])]
        both = [(a, [b for b in others if there.get(b)]) for a, others in sides if there.get(a)]
        if both := [(a, others) for a, others in both if others]:
            ours, others = both[0]
            theirs = max(others, key=lambda label: table.loc[label, "accuracy"])
            lines.append(f"At {s:.0%} zeros {_reached(table, ours)}, and {_reached(table, theirs)}.")
    done = (states["state"] == "finished").sum()
    if not lines:
        lines.append(f"Not known yet: of {len(states)} runs {done} have a record, and none of ours is among them.")
    elif done < len(states):
        lines.append(f"{done} of {len(states)} runs have a record.")
    return "**Answer.** " + " ".join(lines)


def _reached(table: pd.DataFrame, label: str) -> str:
    row = table.loc[label]
    name = "our best" if label.startswith("best") else ", ".join(w for w in label.split(", ") if not w.endswith("%"))
    return f"{name} reaches {shown(row['accuracy'], row['std'])} % for {row['MB']:,.0f} MB (n = {row['n']:.0f})"
