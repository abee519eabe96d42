"""One experiment: every setting that affects a result, validated, hashable, and nothing else.

The words of this class are the words of tables and parameter cells; the paper's letters stand
in the comments. `paper` presets are Table II of the paper.
"""

import dataclasses
import hashlib
import importlib
import json
import math
import numbers
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

# Raised whenever a change of the code changes the bits of a result, so that no old record
# passes for a new one.
REVISION = 2

CLASSES = {"fashion_mnist": 10, "fashion_mini": 10, "cifar10": 10, "cifar100": 100}
MODELS = ("lenet5", "alexnet", "resnet18")
HOOK = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"  # a function of your own, as package.module:function
MODEL_OF = {"fashion_mnist": "lenet5", "fashion_mini": "lenet5", "cifar10": "alexnet", "cifar100": "resnet18"}

# What makes a method itself: a setting fixed here may not be given another value.
DENSE = dict(sparsity_initial=0.0, sparsity_target=0.0)
FIXED = {
    "fedavg": DENSE | dict(lambda_max=0.0, prox_mu=0.0),
    "fedprox": DENSE | dict(lambda_max=0.0),
    "feddp": dict(lambda_max=0.0, prox_mu=0.0),
    "dpf": dict(sparsity_initial=0.0, lambda_max=0.0, prox_mu=0.0),
    "feddip": dict(prox_mu=0.0),
    "feddip_prox": {},
    "prunefl": dict(lambda_max=0.0, prox_mu=0.0),
    "snip": dict(lambda_max=0.0, prox_mu=0.0),
    "prunetrain": DENSE | dict(prox_mu=0.0),  # its sparsity is not controlled, but comes from its threshold
    "feddst": dict(lambda_max=0.0, prox_mu=0.0),
}
ONE_SPARSITY = ("snip", "feddst")  # sparse from the first round on: s_0 = s_p
AUTHORS_VARIANT = ("prunefl", "snip", "prunetrain", "feddst")
# Section VI-A of the paper; it searches the penalties of PruneTrain and FedProx on a grid of 1e-1 … 1e-5.
OWN = {
    "fedprox": dict(prox_mu=0.01),
    "feddip_prox": dict(prox_mu=0.01),
    "prunefl": dict(reconfigure_every=20),
    "prunetrain": dict(reconfigure_every=1, lambda_max=1e-4),  # 1e-2 in the authors' code
    "feddst": dict(reconfigure_every=20),
}
# Where the paper's text and its authors' released code differ.
RULES = {
    "paper": dict(initial_mask="erk", regrowth="paper", reconfigure_at="paper", lambda_schedule="paper"),
    "authors": dict(initial_mask="authors", regrowth="authors", reconfigure_at="authors", lambda_schedule="authors20"),
}
# Table II of the paper, one row a data set; s_p stands in its Section VI-B.
TABLE_II = {
    "fashion_mnist": dict(
        learning_rate=0.01, batch_size=64, sparsity_initial=0.5, sparsity_target=0.9, lambda_max=1e-3
    ),
    "cifar10": dict(
        learning_rate=0.1, batch_size=128, sparsity_initial=0.5, sparsity_target=0.9, lambda_max=1e-3
    ),
    "cifar100": dict(
        learning_rate=0.1, batch_size=128, sparsity_initial=0.05, sparsity_target=0.8, lambda_max=5e-3
    ),
}  # fmt: skip
PAPER = dict(clients=50, clients_per_round=5, rounds=1000, lambda_steps=10, local_epochs=5)
# Real data, fewer rounds, and for the two large models fewer channels. Steps, not channels, end the plateau on which
# AlexNet begins, so that only ResNet-18 takes fewer of them in a round.
LAPTOP = {
    "fashion_mnist": dict(rounds=80),
    "cifar10": dict(rounds=160, width=0.125),
    "cifar100": dict(rounds=40, width=0.125, local_epochs=2),
}
SMOKE = dict(
    clients=10, clients_per_round=3, rounds=16, lambda_steps=4, local_epochs=2, batch_size=32, learning_rate=0.2,
)  # fmt: skip
SMOKE_RECONFIGURE_EVERY = {"prunefl": 4, "feddst": 4, "prunetrain": 1}  # of the others: 2
PRESETS = ("paper", "laptop", "smoke")
# How a result is computed, not what: another order of the same sums.
HOW = ("device", "gradient", "threads", "channels_last", "torch_compile", "stacked")


def _whole(default, low, note):
    def parse(value):
        if isinstance(value, numbers.Integral) and not isinstance(value, bool) and value >= low:
            return int(value)

    return field(default=default, metadata=dict(parse=parse, allowed=f"a whole number of at least {low}", note=note))


def _real(default, low, high, note, open_low=False, open_high=False):
    def parse(value):
        if not isinstance(value, numbers.Real) or isinstance(value, bool) or not math.isfinite(value):
            return None
        above = value > low if open_low else value >= low
        below = value < high if open_high else value <= high
        return float(value) if above and below else None

    left = f"{'(' if open_low else '['}{low:g}"
    right = "∞)" if high == math.inf else f"{high:g}{')' if open_high else ']'}"
    return field(default=default, metadata=dict(parse=parse, allowed=f"a number in {left}, {right}", note=note))


def _flag(default, note):
    def parse(value):
        return value if isinstance(value, bool) else None

    return field(default=default, metadata=dict(parse=parse, allowed="True or False", note=note))


def _choice(default, options, note):
    def parse(value):
        return value if value in tuple(options) else None

    return field(default=default, metadata=dict(parse=parse, allowed="one of " + ", ".join(options), note=note))


def _matching(default, pattern, allowed, note):
    def parse(value):
        if isinstance(value, os.PathLike):
            value = str(Path(value).expanduser())
        return value if isinstance(value, str) and re.fullmatch(pattern, value) else None

    return field(default=default, metadata=dict(parse=parse, allowed=allowed, note=note))


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One federated training run. Defaults are the paper's Table II for the data set and the method.

    A setting left at None takes the value of its data set, method or rules; read back, it is never None. With a data
    set of your own the defaults are those of Fashion-MNIST. The target s_p is met if R divides T, as in the paper.
    """

    method: str = _choice("feddip", FIXED, "how the clients' work and the mask are combined")
    dataset: str = _matching(
        "fashion_mnist", rf"{'|'.join(CLASSES)}|.+\.npz|{HOOK}",
        f"one of {', '.join(CLASSES)}, the path of an .npz file, or a function as package.module:samples",
        "a known data set, your own x_train, y_train, x_test, y_test, or samples(client) -> (x, y)",
    )  # fmt: skip
    model: str = _matching(
        None, rf"{'|'.join(MODELS)}|{HOOK}",
        f"one of {', '.join(MODELS)}, or a function as package.module:network",
        "a known network, by default the data set's own, or network() -> nn.Module",
    )  # fmt: skip
    width: float = _real(1.0, 0, 8, "factor on the network's channels; 1 is the paper's", open_low=True)
    norm: str = _choice("batch", ("batch", "group"), "of ResNet-18; the paper's is batch norm")
    batch_norm: str = _choice(
        "average",
        ("average", "local", "frozen"),
        "averaged, each client's own, or as the first round left it",
    )
    partition: str = _matching(
        "iid", r"iid|pathological|shards|given|dirichlet\((\d+\.?\d*|\.\d+)(e-?\d+)?\)",
        "one of iid, pathological, shards, dirichlet(alpha) with a positive alpha, such as dirichlet(0.5), or given",
        "how the training data are dealt to the clients; given: samples(client) says what each has",
    )  # fmt: skip
    clients: int = _whole(50, 1, "N, all clients")
    clients_per_round: int = _whole(5, 1, "K, clients drawn in a round")
    rounds: int = _whole(1000, 1, "T, global rounds")
    local_epochs: int = _whole(5, 1, "E, passes of a client over its data in a round")
    batch_size: int = _whole(None, 1, "B, samples in a local step")
    learning_rate: float = _real(None, 0, math.inf, "η_0, in the first round", open_low=True)
    learning_rate_decay: float = _real(0.998, 0, 1, "factor on η from one round to the next", open_low=True)
    momentum: float = _real(0.0, 0, 1, "of the local SGD, started anew in each round", open_high=True)
    weight_decay: float = _real(5e-4, 0, math.inf, "of the local SGD, on the dense weights")
    sparsity_initial: float = _real(None, 0, 1, "s_0, fraction of zeros in the first mask", open_high=True)
    sparsity_target: float = _real(None, 0, 1, "s_p, fraction of zeros at the end", open_high=True)
    reconfigure_every: int = _whole(None, 1, "R, rounds from one mask to the next")
    lambda_max: float = _real(None, 0, math.inf, "λ_max, of the group penalty; of PruneTrain, the constant penalty")
    lambda_steps: int = _whole(10, 1, "Q, steps in which the penalty grows")
    prox_mu: float = _real(None, 0, math.inf, "μ, of the proximal term")
    prunetrain_threshold: float = _real(1e-4, 0, math.inf, "largest |w| below which PruneTrain removes a channel")
    feddst_alpha: float = _real(0.5, 0, 1, "α, share of the weights that FedDST replaces at first")
    variant: str = _choice("original", ("original", "authors"), "a baseline as published, or as in the authors' code")
    rules: str = _choice("paper", RULES, "sets the four switches below: the paper's text or its authors' code")
    initial_mask: str = _choice(None, ("erk", "authors"), "one ERK mask of the server, or each first client's own")
    regrowth: str = _choice(None, ("paper", "authors", "dense_memory"), "what of a pruned weight the next mask sees")
    reconfigure_at: str = _choice(None, ("paper", "authors"), "after rounds R, 2R, … or after rounds 1, R+1, …")
    lambda_schedule: str = _choice(None, ("paper", "authors20"), "Eq. 9, or the 20 steps of the authors' code")
    normalisation: str = _choice("standard", ("standard", "authors"), "authors: CIFAR-100 divided by 255 twice")
    seed: int = _whole(0, 0, "of every random stream")
    device: str = _matching("cpu", r"cpu|cuda(:\d+)?", "one of cpu, cuda, cuda:<number>", "where tensors live")
    gradient: str = _choice("auto", ("auto", "eager", "native"), "PyTorch's, or the compiled one of LeNet-5")
    precision: str = _choice("float32", ("float32", "bfloat16"), "of a client's forward pass; weights stay in float32")
    tf32: bool = _flag(False, "let a GPU round the factors of its products to ten bits")
    channels_last: bool = _flag(
        False, "images in memory by pixel, as a GPU's convolutions like them; on a CPU cropped ones always are"
    )
    torch_compile: bool = _flag(False, "a client's forward and backward pass through torch.compile")
    stacked: bool = _flag(False, "the clients of a round as one computation, for small networks on a GPU")
    threads: int = _whole(1, 1, "CPU threads; small convolutions only lose by more than one")

    def __post_init__(self):
        self._parse()
        self._fill_in()
        self._check_together()

    def _parse(self):
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if value is None and f.default is None:
                continue
            parsed = f.metadata["parse"](value)
            if parsed is None:
                raise ValueError(f"{f.name}: {value!r} is not allowed; it must be {f.metadata['allowed']}")
            self._set(f.name, parsed)

    def _fill_in(self):
        for name, value in self._defaults().items():
            if getattr(self, name) is None:
                self._set(name, value)

    def _defaults(self) -> dict:
        """What the data set, the rules and the method give to a setting that is left open."""
        defaults = {
            "model": MODEL_OF.get(self.dataset), "prox_mu": 0.0, "reconfigure_every": 5,
            **TABLE_II.get(self.dataset, TABLE_II["fashion_mnist"]),
            **RULES[self.rules], **OWN.get(self.method, {}), **self._fixed(),
        }  # fmt: skip
        if self.method == "snip" and (self.model or defaults["model"]) == "alexnet":
            defaults["sparsity_target"] = 0.8  # at 0.9 it diverges, says the paper
        if self.method == "prunetrain" and self.variant == "authors":
            defaults["lambda_max"] = 0.01
        if self.method in ONE_SPARSITY:
            target = defaults["sparsity_target"] if self.sparsity_target is None else self.sparsity_target
            defaults["sparsity_initial"] = target
        return defaults

    def _fixed(self) -> dict:
        controlled = self.method == "prunetrain" and self.variant == "authors"
        return {k: v for k, v in FIXED[self.method].items() if not (controlled and k in DENSE)}

    def _check_together(self):
        def refuse(name, allowed):
            raise ValueError(f"{name}: {getattr(self, name)!r} is not allowed; {allowed}")

        for name, value in self._fixed().items():
            if getattr(self, name) != value:
                refuse(name, f"the method {self.method} has it at {value:g}")
        if self.method in ONE_SPARSITY and self.sparsity_initial != self.sparsity_target:
            refuse("sparsity_initial", f"the method {self.method} has it at sparsity_target, {self.sparsity_target}")
        if self.variant == "authors" and self.method not in AUTHORS_VARIANT:
            refuse("variant", f"only {', '.join(AUTHORS_VARIANT)} have this variant; {self.method} follows `rules`")
        if self.regrowth == "dense_memory" and self.method in AUTHORS_VARIANT:
            refuse("regrowth", f"{self.method} masks every step, so that nothing pruned is left to remember")
        if self.model is None:
            refuse("model", f"a data set of your own ({self.dataset}) needs one of {', '.join(MODELS)}, or your own")
        if is_hook(self.dataset) and not is_hook(self.model):
            refuse("model", f"{self.dataset} needs a network of your own, as package.module:network")
        if self.dataset.endswith(".npz") and not Path(self.dataset).is_file():
            refuse("dataset", "there is no such file")
        if is_hook(self.dataset) != (self.partition == "given"):
            needs = "'given' goes with a function of your own as dataset, samples(client), and with nothing else"
            refuse("partition", needs)
        if self.clients_per_round > self.clients:
            refuse("clients_per_round", f"it must be at most clients, {self.clients}")
        if self.sparsity_initial > self.sparsity_target:
            refuse("sparsity_initial", f"it must be at most sparsity_target, {self.sparsity_target}")
        if self.partition.startswith("dirichlet") and not 0 < self.dirichlet_alpha <= 1e6:
            refuse("partition", "alpha must be a number in (0, 1e+06]")
        if self.norm != "batch" and self.model != "resnet18":
            refuse("norm", f"{self.model} has no norms")
        if is_hook(self.model) and self.width != 1:
            refuse("width", f"{self.model} has the width that it has, 1")
        if self.batch_norm != "average" and self.model in MODELS and (self.model, self.norm) != ("resnet18", "batch"):
            refuse("batch_norm", "only resnet18 has batch norms, and only with norm='batch'")
        if self.stacked and (self.model, self.norm) not in (("lenet5", "batch"), ("resnet18", "group")):
            refuse(
                "stacked", "it needs a network without dropout and batch norms: lenet5, or resnet18 with norm='group'"
            )
        if self.gradient == "native" and (self.stacked or self.torch_compile or self.precision != "float32"):
            refuse("gradient", "stacked, torch_compile and bfloat16 are PyTorch's")
        groups = CLASSES.get(self.dataset, 0) // 2
        if self.partition == "pathological" and groups and self.clients % groups:
            refuse("clients", f"the pathological partition of {self.dataset} needs a multiple of {groups}")

    def _set(self, name, value):
        object.__setattr__(self, name, value)

    @property
    def dirichlet_alpha(self) -> float:
        return float(self.partition.removeprefix("dirichlet(").removesuffix(")"))

    @cached_property
    def run_id(self) -> str:
        """A short hash of all that affects the result; of a data file the content counts, not the path."""
        idle = {"rules"}  # no more than a name for the four switches, which are there
        if self.method in ("fedavg", "fedprox"):  # without a mask and a penalty these change nothing
            idle |= {"reconfigure_every", "lambda_steps", *RULES["paper"]}
        # A setting at its class's default is left out: so a new one leaves the ids of old records as they are.
        settings = {k: v for k, v in self.changed().items() if k not in idle}
        settings["revision"] = REVISION
        if self.dataset.endswith(".npz"):
            settings["dataset"] = hashlib.sha256(Path(self.dataset).read_bytes()).hexdigest()
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)

    def changed(self) -> dict:
        """What is not at the class's own default: enough to make the same experiment again."""
        return {f.name: value for f in dataclasses.fields(self) if (value := getattr(self, f.name)) != f.default}

    def replace(self, **changes) -> "Experiment":
        """The same experiment with some settings changed.

        What is at a default stays at one: a new method, data set or rules bring their own, and what was set by hand
        is kept, unless the new method fixes it.
        """
        open_again = {k: None for k, v in self._defaults().items() if getattr(self, k) == v}
        method = changes.get("method", self.method)
        if method != self.method:
            open_again |= dict.fromkeys(FIXED.get(method, ()))
            if method in ONE_SPARSITY:
                open_again["sparsity_initial"] = None
            if method not in AUTHORS_VARIANT:
                open_again["variant"] = "original"
            elif self.regrowth == "dense_memory":
                open_again["regrowth"] = None
        return dataclasses.replace(self, **(open_again | changes))

    def on_any_machine(self) -> "Experiment":
        """The same experiment with HOW at its defaults: what two records of one result have in common."""
        return self.replace(**{f.name: f.default for f in dataclasses.fields(self) if f.name in HOW})

    def differences_from_paper(self) -> dict:
        """Each setting that is not the paper's, with the paper's value; empty for a run at the paper's scale."""
        if self.dataset not in TABLE_II:
            return {"dataset": list(TABLE_II)}
        paper = Experiment.preset("paper", dataset=self.dataset, method=self.method)
        # The paper names no seed, and uses two partitions.
        free = {"seed", "partition", "rules", *HOW}
        return {k: v for k, v in paper.to_dict().items() if k not in free and getattr(self, k) != v}

    @classmethod
    def preset(cls, name: str, dataset: str | None = None, method: str = "feddip", **overrides) -> "Experiment":
        """`paper`: Table II to the letter. `laptop`: real data in minutes. `smoke`: embedded data in seconds."""
        if name not in PRESETS:
            raise ValueError(f"preset: {name!r} is not allowed; it must be one of {', '.join(PRESETS)}")
        if method not in FIXED:
            raise ValueError(f"method: {method!r} is not allowed; it must be one of {', '.join(FIXED)}")
        dataset = dataset or ("fashion_mini" if name == "smoke" else "fashion_mnist")
        if name != "smoke" and dataset not in TABLE_II:
            raise ValueError(f"dataset: {dataset!r} is not allowed; the {name} preset has {', '.join(TABLE_II)}")
        settings = {"paper": {}, "laptop": LAPTOP.get(dataset), "smoke": SMOKE}[name]
        if name == "smoke":
            settings = settings | dict(reconfigure_every=SMOKE_RECONFIGURE_EVERY.get(method, 2))
        return cls(method=method, dataset=dataset, **(PAPER | settings | overrides))


def is_hook(name: str) -> bool:
    """Whether this names a function of the user's own, package.module:function."""
    return re.fullmatch(HOOK, name) is not None


def function_of(hook: str, setting: str) -> Callable:
    """The function that a setting names."""
    module, _, name = hook.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{setting}: {hook!r} is not allowed; it cannot be imported ({error})") from error
    if not callable(function):
        raise ValueError(f"{setting}: {hook!r} is not allowed; it is not a function")
    return function
