"""What *Reproduction* says of CIFAR with narrow networks: Table II, but an eighth of the channels.

Tables and sentences are made from the records that are there, and name the runs that are not.
"""

import math
from collections.abc import Callable, Collection
from pathlib import Path

import pandas as pd

from ..presets import CLASSES
from .reproduction import RUNS
from .summary import label
from .tables import final_zeros, find, layout, of_runs, over_seeds, shown, worth
from .verdicts import NONE, bullets, counted, pairs, range_of, sentence
from .wanted import LONGER, Wanted, of_paper, reduced, scale, wanted

PRESET = "narrow"
HEADLINE = ("fedavg", "feddip", "fedgmp")  # what README shows
SHORTER = "fedavg, pathological"
ABOVE_GUESSING = 2  # a run has left its starting plateau when its tests stay above twice the accuracy of guessing


class Cifar:
    """The runs of one data set that are there, and what they say."""

    def __init__(self, folder: str | Path, dataset: str, preset: str = PRESET):
        self.folder, self.dataset = folder, dataset
        self.wanted: Wanted = wanted("cifar", preset, dataset)
        self.rounds, self.states = find(self.wanted, folder)
        self.runs = of_runs(self.rounds)
        self.guessing = 100 / CLASSES[dataset]

    def table(self) -> pd.DataFrame:
        """One row per run: accuracy, when it left the plateau, zeros, and how many pruned weights returned."""
        size = layout(self.wanted["feddip"][0]).prunable_size
        mean = {
            "last five": self.runs["last five"], "highest five": self.runs["highest five"],
            "since": self.by_run(self.since), "zeros": final_zeros(self.rounds) / size,
            "returned": self.by_run(lambda own: own["regrown"].sum()),
        }  # fmt: skip
        table = pd.DataFrame({k: v.groupby("label").mean() for k, v in mean.items()}).reindex(list(self.wanted))
        return table.assign(n=over_seeds(self.runs["last five"], self.wanted)["n"])

    def by_run(self, of: Callable[[pd.DataFrame], float]) -> pd.Series:
        """A number per run, from its rounds."""
        found = {key: of(own) for key, own in self.rounds.groupby(["label", "seed"], sort=False)}
        index = pd.MultiIndex.from_tuples(found, names=["label", "seed"]) if found else self.runs.index
        return pd.Series(list(found.values()), index=index, dtype=float)

    def since(self, own: pd.DataFrame) -> float:
        """The first test from which on all are above twice guessing; NaN if the last one is not."""
        tested = own.dropna(subset="test_accuracy")
        low = tested[100 * tested["test_accuracy"] <= ABOVE_GUESSING * self.guessing]["round"].max()
        return tested["round"].min() if pd.isna(low) else tested.loc[tested["round"] > low, "round"].min()

    def off_target(self) -> pd.Series:
        """The zeros of each run that has another number of them than its target says; empty if all is well."""
        size, zeros = layout(self.wanted["feddip"][0]).prunable_size, final_zeros(self.rounds)
        free = ("feddst", "prunetrain")  # one rounds per layer, the other has no target
        target = {run: round(getattr(exps[0], "sparsity_target", 0.0) * size) for run, exps in self.wanted.items()}
        return zeros[[run not in free and count != target[run] for (run, _), count in zeros.items()]]

    def shown(self) -> str:
        """The table in Markdown, under a line that says how the runs are reduced."""
        above = f"above {ABOVE_GUESSING * self.guessing:g} % from round"
        lines = [
            f"*{scale(self.wanted)}*\n",
            f"| run | last five | highest five | n | {above} | zeros | weights that returned | paper, full size |",
            "|---|---|---|---|---|---|---|---|",
        ]
        iid, non_iid = (of_paper(table, self.dataset) for table in ("accuracy_iid", "accuracy_non_iid"))
        for run, row in self.table().iterrows():
            paper = non_iid.get(str(run).removesuffix(", pathological")) if "path" in str(run) else iid.get(run)
            cells = [named(str(run)), shown(row["last five"]), shown(row["highest five"]), f"{row['n']:.0f}"]
            cells += ["never" if row["n"] and pd.isna(row["since"]) else _whole(row["since"])]
            cells += [shown(row["zeros"]), _whole(row["returned"]), shown(*paper) if paper else "–"]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def answers(self) -> str:
        """The questions of this section, with what the records say to each."""
        told = [self.order(), self.returns(), self.gradual()]
        if self.dataset == "cifar10":
            told = [told[0], self.first_mask(), self.penalty(), *told[1:], self.plateau()]
        return bullets(told, scale(self.wanted))

    def order(self) -> str:
        """How many pairs of methods stand in the paper's order, and which do not."""
        paper = pd.Series({m: v[0] for m, v in of_paper("accuracy_iid", self.dataset).items() if m in self.wanted})
        values = self.runs["last five"].unstack("seed").reindex(paper.index)
        judged = pairs(values, paper)
        there = judged[judged["verdict"] != NONE]
        said = ["**Does the order of the methods hold?**"]
        if len(there):
            other = pairs(values, -paper).loc[[(b, a) for a, b in there[there["mean"] < 0].index]]
            n = f"{counted(there.iloc[0])}{', so no verdict' * bool((there['n'] == 1).all())}"
            said.append(f"{len(there) - len(other)} of {len(there)} pairs stand in the paper's order ({n}).")
            turned = [f"{named(b)} over {named(a)} {range_of(row)}" for (b, a), row in other.iterrows()]
            said += [f"In the opposite order: {'; '.join(turned)}."] if turned else []
        return " ".join([*said, *_missing(values.index[values.isna().all(axis=1)])])

    def first_mask(self) -> str:
        """What it is worth to choose by magnitude after one round, and to start dense, here and on Fashion-MNIST."""
        said = ["**Does the random first mask cost as much as on Fashion-MNIST?**"]
        said += self.against("feddip, released", "feddip")
        said += self.on_fashion("paper_vs_code", "all four: released", "the paper's rules")
        said += ["DPF is FedDP with a dense first model.", *self.against("dpf", "feddp")]
        said += self.on_fashion("paper_vs_code", "DPF: FedDP, dense at first", "FedDP, the paper's rules")
        return " ".join(said)

    def penalty(self) -> str:
        """FedDIP against FedDP, which is FedDIP without the penalty, here and on Fashion-MNIST."""
        said = ["**Does the penalty do anything?**", *self.against("feddip", "feddp")]
        return " ".join([*said, *self.on_fashion("accuracy", "feddip", "feddp")])

    def gradual(self) -> str:
        """FedDIP against gradual magnitude pruning."""
        said = ["**Is FedDIP better than gradual magnitude pruning?** FedGMP starts dense and sends only kept weights."]
        for far in (far for far in ("", " at 0.99") if f"fedgmp{far}" in self.wanted):
            said += self.against(f"feddip{far}", f"fedgmp{far}")
        return " ".join(said)

    def returns(self) -> str:
        """How many pruned weights came back, and when the last one did."""
        asked = [run for run in ("feddip", "feddip at 0.99", "feddip_prox, pathological") if run in self.wanted]
        size = layout(self.wanted["feddip"][0]).prunable_size
        said = [f"**Does anything pruned return?** {size:,} weights can be pruned."]
        for (run, seed), own in self.rounds.groupby(["label", "seed"], sort=False):
            if run in asked:
                back = own[own["regrown"] > 0]
                when = f", the last in round {back['round'].max()} of {len(own):,}" if len(back) else ""
                said.append(f"{named(run)}, seed {seed}: {own['regrown'].sum():,.0f} return{when}.")
        return " ".join([*said, *self.absent(asked)])

    def plateau(self) -> str:
        """Whether FedAvg and the proximal methods leave the level of guessing on the pathological split."""
        said = [f"**Does FedAvg leave the plateau on the pathological split?** Guessing gives {self.guessing:g} %."]
        asked, above = (
            [run for run in self.wanted if run.endswith("pathological")],
            f"{ABOVE_GUESSING * self.guessing:g} %",
        )
        for run, row in self.table().loc[asked].iterrows():
            if row["n"]:
                left = f"stays above {above} from round {row['since']:.0f} on"
                left = f"does not stay above {above}" if pd.isna(row["since"]) else left
                ends = f"last five {row['last five']:.1f} %, highest five {row['highest five']:.1f} %"
                said.append(f"{named(run.partition(',')[0])} {left}: {ends} (n = {row['n']:.0f}).")
        return " ".join([*said, *self.local_steps(), *self.absent(asked)])

    def local_steps(self) -> list[str]:
        """What a client learns in one round's steps on its two classes, and in five times as many."""
        if missing := self.absent([SHORTER, LONGER]):
            return missing
        coin, table = math.log(2), self.table()
        losses = [self.by_run(lambda own: own["train_loss"].tail(5).mean())[run].mean() for run in (SHORTER, LONGER)]
        short, long = (f"{loss:.2f}, {'above' if loss > coin else 'below'} it" for loss in losses)
        return [
            f"A client that tosses a coin between its two classes has a loss of {coin:.2f}. Over one round's steps its "
            f"mean loss is {short}. With five times the epochs in a fifth of the rounds, so as many steps, it is "
            f"{long}, and the model ends at {table.loc[LONGER, 'last five']:.1f} %."
        ]

    def absent(self, asked: list[str]) -> list[str]:
        """Which of these runs are missing, as a sentence, or none."""
        return _missing([run for run in asked if run not in set(self.rounds["label"])])

    def against(self, a: str, b: str) -> list[str]:
        """One run against another, in a sentence; or which of them is missing."""
        row = worth(self.runs["last five"], {a: b}).loc[a]
        return [sentence(named(a), named(b), row)] if row["n"] else self.absent([a, b])

    def on_fashion(self, result: str, a: str, b: str) -> list[str]:
        """The same comparison on Fashion-MNIST, at the paper's size."""
        both = {k: v for k, v in wanted(result, "paper", "fashion_mnist").items() if k in (a, b)}
        row = worth(of_runs(find(both, self.folder)[0])["last five"], {a: b}).loc[a]
        said = f"{range_of(row)} points ({counted(row)})" if row["n"] else "not run yet"
        return [f"{RUNS['fashion_mnist']}, at full size: {said}."]


def headline(folder: str | Path) -> str:
    """README's table: a row per data set that has a record."""
    lines = [f"| narrow network | {' | '.join(map(label, HEADLINE))} | n |", f"|{'---|' * (len(HEADLINE) + 2)}"]
    for dataset in ("cifar10", "cifar100"):
        own = Cifar(folder, dataset)
        found = own.table().loc[list(HEADLINE)]
        if found["n"].any():
            cells = [f"{RUNS[dataset]}; {reduced(own.wanted)}", *map(shown, found["last five"])]
            lines.append(f"| {' | '.join(cells)} | {found['n'].max():.0f} |")
    return "\n".join(lines)


def named(run: str) -> str:
    """A run's name for readers."""
    method, _, rest = run.replace(", ", " ").partition(" ")
    for short, long in (("released", "by the released rules"), ("pathological", "on the pathological split")):
        rest = rest.replace(short, long)
    return f"{label(method)} {rest}".strip()


def _missing(runs: Collection[str]) -> list[str]:
    return [f"Not run yet: {', '.join(map(named, runs))}."] if len(runs) else []


def _whole(value: float) -> str:
    return "–" if pd.isna(value) else f"{value:,.0f}"
