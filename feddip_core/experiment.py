"""One experiment: every setting that affects a result, checked, hashable, and nothing else.

Settings that every run has are declared here, those of a method in its class. The words of this file are the words of
tables and parameter cells; the paper's letters stand in the notes.
"""

import dataclasses
import hashlib
import importlib
import inspect
import json
import math
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from .presets import CLASSES, MODEL_OF, TABLE_II, preset
from .settings import Setting, choice, flag, matching, real, whole

# Raised whenever a change of the code changes the bits of a result, so that no old record passes for a new one.
REVISION = 2

METHODS: dict[str, type] = {}  # by name; `feddip_core.methods` fills it, and a class of your own joins it when used
MODELS = ("lenet5", "alexnet", "resnet18")
HOOK = r"[A-Za-z_][\w.]*:[A-Za-z_][\w.<>]*"  # something of your own, as package.module:name
# How a result is computed, not what: another order of the same sums.
EXECUTION_SETTINGS = ("device", "gradient", "threads", "channels_last", "torch_compile", "stacked")

COMMON: dict[str, Setting] = dict(
    method=matching("feddip", r".+", "a known method, a subclass of Method, or its name as package.module:Class",
                    "how the clients' work and the mask are combined"),
    dataset=matching(
        "fashion_mnist", rf"{'|'.join(CLASSES)}|.+\.npz|{HOOK}",
        f"one of {', '.join(CLASSES)}, the path of an .npz file, or a function as package.module:samples",
        "a known data set, your own x_train, y_train, x_test, y_test, or samples(client) -> (x, y)",
    ),
    model=matching(
        None, rf"{'|'.join(MODELS)}|{HOOK}", f"one of {', '.join(MODELS)}, or a function as package.module:network",
        "a known network, by default the data set's own, or network() -> nn.Module",
    ),
    width=real(1.0, 0, 8, "factor on the network's channels; 1 is the paper's", open_low=True),
    norm=choice("batch", ("batch", "group"), "of ResNet-18; the paper's is batch norm"),
    batch_norm=choice("average", ("average", "local", "frozen"),
                      "averaged, each client's own, or as the first round left it"),
    partition=matching(
        "iid", r"iid|pathological|shards|given|dirichlet\((\d+\.?\d*|\.\d+)(e-?\d+)?\)",
        "one of iid, pathological, shards, dirichlet(alpha) with a positive alpha, such as dirichlet(0.5), or given",
        "how the training data are dealt to the clients; given: samples(client) says what each has",
    ),
    clients=whole(50, 1, "N, all clients"),
    clients_per_round=whole(5, 1, "K, clients drawn per round"),
    rounds=whole(1000, 1, "T, global rounds"),
    local_epochs=whole(5, 1, "E, passes of a client over its data per round"),
    batch_size=whole(None, 1, "B, samples in a local step"),
    learning_rate=real(None, 0, math.inf, "η_0, in the first round", open_low=True),
    learning_rate_decay=real(0.998, 0, 1, "factor on η from one round to the next", open_low=True),
    momentum=real(0.0, 0, 1, "of the local SGD, started anew in each round", open_high=True),
    weight_decay=real(5e-4, 0, math.inf, "of the local SGD, on the dense weights"),
    aggregation=choice("mean", ("mean", "trimmed_mean", "median"), "of the uploads, per weight; Eq. 12 is the mean"),
    clip_norm=real(0.0, 0, math.inf, "the longest update of a client; a longer one is shortened. 0: no limit"),
    rules=choice("paper", ("paper", "released"), "the paper's text, or the code released in the FedDIP repository"),
    normalisation=choice("standard", ("standard", "released"), "released: CIFAR-100 divided by 255 twice"),
    seed=whole(0, 0, "of every random stream"),
    device=matching("cpu", r"cpu|cuda(:\d+)?", "one of cpu, cuda, cuda:<number>", "where tensors live"),
    gradient=choice("auto", ("auto", "eager", "native"), "PyTorch's, or the compiled one of LeNet-5"),
    precision=choice("float32", ("float32", "bfloat16"), "of a client's forward pass; weights stay in float32"),
    value_bits=whole(32, 16, "16 or 32, of a weight that travels; biases and statistics always take 32"),
    tf32=flag(False, "let a GPU round the factors of its products to ten bits"),
    channels_last=flag(False, "images in memory by pixel, as a GPU's convolutions like them"),
    torch_compile=flag(False, "a client's forward and backward pass through torch.compile"),
    stacked=flag(False, "the clients of a round as one computation, for small networks on a GPU"),
    threads=whole(1, 1, "CPU threads; small convolutions only lose with more than one"),
)  # fmt: skip


def is_hook(name: str) -> bool:
    """Whether this names something of the user's own, package.module:name."""
    return re.fullmatch(HOOK, name) is not None


def imported(hook: str, setting: str) -> Any:
    """What a setting names as package.module:name."""
    module, _, name = hook.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        advice = "write it into a module, such as yours.py, and name it as yours:name"
        raise ValueError(f"{setting}: {hook!r} is not allowed; it cannot be imported ({error}); {advice}") from error


def name_of(method: type) -> str:
    """A method's name in settings and records: package.module:Class for one of your own."""
    if METHODS.get(name := getattr(method, "name", "")) is method:
        return name
    own = f"{method.__module__}:{method.__qualname__}"
    METHODS[own] = method  # so that this process finds it again, also one that stands in a notebook's cell
    return own


def class_of(method: str, rules: str = "paper") -> Any:
    """The class behind a method's name, under these rules."""
    cls: Any = METHODS.get(method) or (imported(method, "method") if is_hook(method) else None)
    if not hasattr(cls, "switches"):
        known = ", ".join(name for name in METHODS if not is_hook(name))
        others = "a subclass of feddip_core.Method, or its name as package.module:Class"
        raise ValueError(f"method: {method!r} is not allowed; it must be one of {known}, {others}")
    METHODS[method] = cls
    return cls.released if rules == "released" and cls.released else cls


def settings_of(method: str, rules: str = "paper") -> dict[str, Setting]:
    """All settings of an experiment with this method."""
    cls = class_of(method, rules)
    if taken := [k for k in cls.settings if k in COMMON]:
        raise ValueError(f"{taken[0]}: {method!r} may not have a setting of that name; every experiment has one")
    switches = {k: choice(None, values, note) for k, (note, values) in cls.switches.items()}
    return COMMON | cls.settings | switches


def _chosen(method: Any, rules: Any) -> dict[str, str]:
    """Method and rules, checked first: they decide which other settings there are."""
    given = {"method": name_of(method) if isinstance(method, type) else method, "rules": rules}
    return {k: COMMON[k].checked(k, COMMON[k].default if v is None else v) for k, v in given.items()}


class Experiment:
    """One federated training run. Defaults are the paper's Table II for the data set and the method.

    Takes the settings of `COMMON` and those of its method, by name. A setting left at None takes the value of its data
    set, method or rules; read back, it is never None. With a data set of your own the defaults are those of
    Fashion-MNIST. T must be a multiple of R to end exactly at the target sparsity, as in the paper.
    """

    def __init__(self, **given: Any):
        chosen = _chosen(given.get("method"), given.get("rules"))
        given, known = given | chosen, settings_of(**chosen)
        for name in given.keys() - known.keys():
            own = ", ".join(k for k in known if k not in COMMON) or "none"
            has = f"{chosen['method']} has no such setting; of its own it has {own}, and like every experiment"
            raise ValueError(f"{name}: {given[name]!r:.200} is not allowed; {has} {', '.join(COMMON)}")
        values = {k: s.checked(k, given[k]) for k, s in known.items() if given.get(k) is not None}
        self.__dict__.update(values)
        self.__dict__.update(self._defaults(known) | values)
        if missing := [k for k in known if getattr(self, k) is None and k != "model"]:
            raise ValueError(f"{missing[0]}: a value is needed; it must be {known[missing[0]].allowed}")
        _check_data(self)
        _check_computation(self)
        self.method_class.check(self)

    @cached_property
    def method_class(self) -> Any:
        """The class of the method, under these rules; it stays, also if a notebook defines another of that name."""
        return class_of(self.method, self.rules)

    def _defaults(self, known: Mapping[str, Setting]) -> dict[str, Any]:
        """What the data set, the rules and the method give to a setting that is left open."""
        plain = {k: s.default for k, s in known.items()}
        given = plain | self.__dict__
        cls, dataset = class_of(given["method"], given["rules"]), given["dataset"]
        of_data = {"model": MODEL_OF.get(dataset), **TABLE_II.get(dataset, TABLE_II["fashion_mnist"])}
        rules = dict.fromkeys(cls.switches, given["rules"])
        rules |= {k: next(iter(values)) for k, (_, values) in cls.switches.items() if rules[k] not in values}
        open_ones = {k: v for k, v in of_data.items() if k in plain and plain[k] is None}
        model = given["model"] or of_data["model"]
        return plain | open_ones | rules | cls.defaults(model=model, dataset=dataset, rounds=given["rounds"])

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self.__dict__.get('method')} has no setting {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise dataclasses.FrozenInstanceError(f"{name}: an experiment cannot be changed; use replace({name}=…)")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Experiment) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(self.run_id)

    def __repr__(self) -> str:
        return f"Experiment({', '.join(f'{k}={v!r}' for k, v in self.changed().items())})"

    @property
    def settings(self) -> dict[str, Setting]:
        return settings_of(self.method, self.rules)

    @cached_property
    def source_sha256(self) -> str | None:
        """Of a method of your own, a hash of its code; None for ours, whose code the commit names."""
        return source_hash(self.method_class) if is_hook(self.method) else None

    @cached_property
    def run_id(self) -> str:
        """A short hash of all that affects the result; of a data file the content counts, not the path."""
        cls = self.method_class
        # A setting at its plain default is left out: so a new one leaves the ids of old records as they are.
        settings = self.changed()
        idle = {k for k, (_, values) in cls.switches.items() if settings[k] == next(iter(values))}
        idle |= {"rules"} if cls.released is None else set()  # the switches, if any, say all that it says
        settings = {k: v for k, v in settings.items() if k not in idle}
        settings |= {"revision": REVISION, "method": self.method, "source": self.source_sha256}
        if self.dataset.endswith(".npz"):
            settings["dataset"] = hashlib.sha256(Path(self.dataset).read_bytes()).hexdigest()
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        """Every setting with its value."""
        return {k: self.__dict__[k] for k in self.settings}

    def changed(self) -> dict[str, Any]:
        """What is not at a setting's own default: enough to make the same experiment again."""
        return {k: self.__dict__[k] for k, s in self.settings.items() if self.__dict__[k] != s.default}

    def replace(self, **changes: Any) -> "Experiment":
        """The same experiment with some settings changed.

        What is at a default stays at one: a new method, data set or rules bring their own, and what was set by hand
        is kept, unless the new method does not read it.
        """
        defaults = self._defaults(self.settings)
        by_hand = {k: v for k, v in self.to_dict().items() if v != defaults[k]} | {"method": self.method}
        kept = {k: getattr(self, k) if changes.get(k) is None else changes[k] for k in ("method", "rules")}
        known = settings_of(**_chosen(**kept))
        return Experiment(**({k: v for k, v in by_hand.items() if k in known} | changes))

    def on_any_machine(self) -> "Experiment":
        """The same experiment with the execution settings at their defaults: what two records of one result share."""
        return self.replace(**{k: COMMON[k].default for k in EXECUTION_SETTINGS})

    def differences_from_paper(self) -> dict[str, Any]:
        """Each setting that is not the paper's, with the paper's value; empty for a run at the paper's scale."""
        if self.dataset not in TABLE_II:
            return {"dataset": list(TABLE_II)}
        paper = Experiment.preset("paper", dataset=self.dataset, method=self.method)
        # The paper names no seed, and uses two partitions.
        free = {"seed", "partition", *EXECUTION_SETTINGS} | (set() if self.method_class.released else {"rules"})
        return {k: v for k, v in paper.to_dict().items() if k not in free and self.__dict__.get(k, v) != v}

    @classmethod
    def preset(
        cls, name: str, dataset: str | None = None, method: str | type = "feddip", **overrides: Any
    ) -> "Experiment":
        """`paper`: Table II to the letter. `laptop`: real data in minutes. `smoke`: embedded data in seconds."""
        settings, chosen = preset(name, dataset), _chosen(method, overrides.get("rules"))
        known = settings_of(**chosen)
        if name == "smoke":
            settings |= class_of(chosen["method"]).smoke
        return cls(method=method, **({k: v for k, v in settings.items() if k in known} | overrides))


def source_hash(cls: type) -> str:
    """Of the code of a class, but for that of this package: functions by their text, everything else by its repr."""

    def text(name: str, value: Any) -> str:
        function = getattr(value, "__func__", value)
        if inspect.isfunction(function):
            try:
                return inspect.getsource(function)
            except OSError as error:
                where = f"the source of {name} cannot be read; write the class into a cell or a module"
                raise ValueError(f"method: {name_of(cls)!r} is not allowed; {where}") from error
        shown = repr([(k, s.default, s.allowed) for k, s in value.items()] if name == "settings" else value)
        return re.sub(" at 0x[0-9a-f]+", "", shown)  # another process has it elsewhere in memory

    own = [c for c in cls.__mro__ if not c.__module__.startswith("feddip_core.") and c is not object]
    parts = [(k, v) for c in own for k, v in sorted(vars(c).items()) if inspect.isfunction(v) or not k.startswith("__")]
    return hashlib.sha256("\n".join(f"{k}: {text(k, v)}" for k, v in parts).encode()).hexdigest()


def _refuse(exp: Experiment, name: str, allowed: str) -> None:
    raise ValueError(f"{name}: {getattr(exp, name)!r} is not allowed; {allowed}")


def _check_data(exp: Experiment) -> None:
    """Data, network and clients fit together."""
    if exp.model is None:
        _refuse(exp, "model", f"a data set of your own ({exp.dataset}) needs one of {', '.join(MODELS)}, or your own")
    if is_hook(exp.dataset) and not is_hook(exp.model):
        _refuse(exp, "model", f"{exp.dataset} needs a network of your own, as package.module:network")
    if exp.dataset.endswith(".npz") and not Path(exp.dataset).is_file():
        _refuse(exp, "dataset", "there is no such file")
    if is_hook(exp.dataset) != (exp.partition == "given"):
        needs = "'given' goes with a function of your own as dataset, samples(client), and with nothing else"
        _refuse(exp, "partition", needs)
    if exp.clients_per_round > exp.clients:
        _refuse(exp, "clients_per_round", f"it must be at most clients, {exp.clients}")
    if exp.partition.startswith("dirichlet") and not 0 < float(exp.partition[10:-1]) <= 1e6:
        _refuse(exp, "partition", "alpha must be a number in (0, 1e+06]")
    groups = CLASSES.get(exp.dataset, 0) // 2
    if exp.partition == "pathological" and groups and exp.clients % groups:
        _refuse(exp, "clients", f"the pathological partition of {exp.dataset} needs a multiple of {groups}")


def _check_computation(exp: Experiment) -> None:
    """The network can be built and trained as the settings say."""
    if exp.norm != "batch" and exp.model != "resnet18":
        _refuse(exp, "norm", f"{exp.model} has no norms")
    if is_hook(exp.model) and exp.width != 1:
        _refuse(exp, "width", f"{exp.model} has the width that it has, 1")
    if exp.batch_norm != "average" and exp.model in MODELS and (exp.model, exp.norm) != ("resnet18", "batch"):
        _refuse(exp, "batch_norm", "only resnet18 has batch norms, and only with norm='batch'")
    if exp.value_bits not in (16, 32):
        _refuse(exp, "value_bits", "it must be 16 or 32")
    if exp.stacked and (exp.model, exp.norm) not in (("lenet5", "batch"), ("resnet18", "group")):
        needs = "it needs a network without dropout and batch norms: lenet5, or resnet18 with norm='group'"
        _refuse(exp, "stacked", needs)
    if exp.gradient == "native" and (exp.stacked or exp.torch_compile or exp.precision != "float32"):
        _refuse(exp, "gradient", "stacked, torch_compile and bfloat16 are PyTorch's")
