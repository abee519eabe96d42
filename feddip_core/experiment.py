"""One experiment: every setting that affects a result, checked and hashable, and nothing else.

This file declares the settings of every run; each method's class declares its own. Tables and parameter cells use the
same names. The notes give the paper's symbols.
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

# Increased whenever a code change alters the bits of a result, so that no old record is mistaken for a new one.
REVISION = 2

METHODS: dict[str, type] = {}  # by name; `feddip_core.methods` fills it, and your own class is added when used
MODELS = ("lenet5", "alexnet", "resnet18")
HOOK = r"[A-Za-z_][\w.]*:[A-Za-z_][\w.<>]*"  # your own class or function, as package.module:name
# How a result is computed, not what: these only reorder the same sums.
EXECUTION_SETTINGS = ("device", "gradient", "threads", "channels_last", "torch_compile", "stacked")

COMMON: dict[str, Setting] = dict(
    method=matching("feddip", r".+", "a known method, a subclass of Method, or its name as package.module:Class",
                    "what clients train, how the server combines it, how the mask is chosen"),
    dataset=matching(
        "fashion_mnist", rf"{'|'.join(CLASSES)}|.+\.npz|{HOOK}",
        f"one of {', '.join(CLASSES)}, the path of an .npz file, or a function as package.module:samples",
        "a known data set, a file with x_train, y_train, x_test, y_test, or samples(client) -> (x, y)",
    ),
    model=matching(
        None, rf"{'|'.join(MODELS)}|{HOOK}", f"one of {', '.join(MODELS)}, or a function as package.module:network",
        "a known network, or network() -> nn.Module; default: the paper's for the data set",
    ),
    width=real(1.0, 0, 8, "factor on the network's channels; 1 is the paper's", open_low=True),
    norm=choice("batch", ("batch", "group"), "norm layers of ResNet-18; the paper's is batch norm"),
    batch_norm=choice("average", ("average", "local", "frozen"),
                      "batch norms: averaged, kept per client, or frozen after the first round"),
    partition=matching(
        "iid", r"iid|pathological|shards|given|dirichlet\((\d+\.?\d*|\.\d+)(e-?\d+)?\)",
        "one of iid, pathological, shards, dirichlet(alpha) with a positive alpha, such as dirichlet(0.5), or given",
        "how the training data are split among clients; given: samples(client) returns each client's",
    ),
    clients=whole(50, 1, "N, clients in total"),
    clients_per_round=whole(5, 1, "K, clients drawn per round"),
    rounds=whole(1000, 1, "T, global rounds"),
    evaluate_every=whole(1, 1, "rounds from one test of the model to the next; the last five are always tested"),
    local_epochs=whole(5, 1, "E, passes of a client over its data per round"),
    batch_size=whole(None, 1, "B, samples per local step"),
    learning_rate=real(None, 0, math.inf, "η_0, learning rate of the first round", open_low=True),
    learning_rate_decay=real(0.998, 0, 1, "factor on η after every round", open_low=True),
    momentum=real(0.0, 0, 1, "momentum of local SGD, reset every round", open_high=True),
    weight_decay=real(5e-4, 0, math.inf, "weight decay of local SGD, on the dense weights"),
    aggregation=choice("mean", ("mean", "trimmed_mean", "median"), "over the uploads, per weight; Eq. 12: mean"),
    clip_norm=real(0.0, 0, math.inf, "longest update of a client; longer ones are scaled down. 0: no limit"),
    rules=choice("paper", ("paper", "released"), "follow the paper's text, or the code in the FedDIP repository"),
    normalisation=choice("standard", ("standard", "released"), "released: CIFAR-100 is divided by 255 twice"),
    seed=whole(0, 0, "seed of every random stream"),
    device=matching("cpu", r"cpu|cuda(:\d+)?", "one of cpu, cuda, cuda:<number>", "where tensors live"),
    gradient=choice("auto", ("auto", "eager", "native"), "PyTorch's, or the compiled one of LeNet-5 or AlexNet"),
    precision=choice("float32", ("float32", "bfloat16"), "of a client's forward pass; weights stay in float32"),
    value_bits=whole(32, 16, "16 or 32 bits per weight sent; biases and statistics always take 32"),
    tf32=flag(False, "let a GPU round the factors of its products to ten bits"),
    channels_last=flag(False, "store images pixel by pixel, which GPU convolutions prefer"),
    torch_compile=flag(False, "compile a client's forward and backward pass with torch.compile"),
    stacked=flag(False, "train a round's clients as one computation; for small networks on a GPU"),
    threads=whole(1, 1, "CPU threads; more than one slows small convolutions"),
)  # fmt: skip


def is_hook(name: str) -> bool:
    """Whether this names the user's own class or function, as package.module:name."""
    return re.fullmatch(HOOK, name) is not None


def imported(hook: str, setting: str) -> Any:
    """Import what a setting names as package.module:name."""
    module, _, name = hook.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        advice = "put it in a module, such as yours.py, and name it as yours:name"
        raise ValueError(f"{setting}: {hook!r} is not allowed; it cannot be imported ({error}); {advice}") from error


def name_of(method: type) -> str:
    """A method's name in settings and records: package.module:Class for your own."""
    if METHODS.get(name := getattr(method, "name", "")) is method:
        return name
    own = f"{method.__module__}:{method.__qualname__}"
    METHODS[own] = method  # so that this process finds it again, even if a notebook cell defines it
    return own


def class_of(method: str, rules: str = "paper") -> Any:
    """The class of a named method, under these rules."""
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
    """Method and rules, checked first: they decide which other settings exist."""
    given = {"method": name_of(method) if isinstance(method, type) else method, "rules": rules}
    return {k: COMMON[k].checked(k, COMMON[k].default if v is None else v) for k, v in given.items()}


class Experiment:
    """One federated training run. Defaults are the paper's Table II for the data set and the method.

    Takes the settings of `COMMON` and those of its method, by name. A setting left at None takes its value from the
    data set, method or rules; read back, it is never None. Your own data set gets the defaults of Fashion-MNIST.
    T must be a multiple of R to end exactly at the target sparsity, as in the paper.
    """

    def __init__(self, **given: Any):
        chosen = _chosen(given.get("method"), given.get("rules"))
        given, known = given | chosen, settings_of(**chosen)
        for name in given.keys() - known.keys():
            own = ", ".join(k for k in known if k not in COMMON) or "none"
            has = f"{chosen['method']} has no such setting; its own are {own}; those of every experiment are"
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
        """The method's class, under these rules; it stays even if a notebook redefines a class of that name."""
        return class_of(self.method, self.rules)

    def _defaults(self, known: Mapping[str, Setting]) -> dict[str, Any]:
        """The values that the data set, the rules and the method give to settings left at None."""
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
        """A hash of the code of your own method; None for ours, whose code the commit identifies."""
        return source_hash(self.method_class) if is_hook(self.method) else None

    @cached_property
    def run_id(self) -> str:
        """A short hash of everything that affects the result; for a data file its content counts, not its path."""
        cls = self.method_class
        # A setting at its plain default is left out, so that adding a setting does not change the ids of old records.
        settings = self.changed()
        idle = {k for k, (_, values) in cls.switches.items() if settings[k] == next(iter(values))}
        idle |= {"rules"} if cls.released is None else set()  # the switches, if any, already say it
        settings = {k: v for k, v in settings.items() if k not in idle}
        settings |= {"revision": REVISION, "method": self.method, "source": self.source_sha256}
        if self.dataset.endswith(".npz"):
            settings["dataset"] = hashlib.sha256(Path(self.dataset).read_bytes()).hexdigest()
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        """Every setting with its value."""
        return {k: self.__dict__[k] for k in self.settings}

    def changed(self) -> dict[str, Any]:
        """The settings that differ from their own default: enough to recreate the experiment."""
        return {k: self.__dict__[k] for k, s in self.settings.items() if self.__dict__[k] != s.default}

    def replace(self, **changes: Any) -> "Experiment":
        """The same experiment with some settings changed.

        Settings at a default stay at a default: a new method, data set or rules bring their own. Settings made by hand
        are kept, unless the new method does not have them.
        """
        defaults = self._defaults(self.settings)
        by_hand = {k: v for k, v in self.to_dict().items() if v != defaults[k]} | {"method": self.method}
        kept = {k: getattr(self, k) if changes.get(k) is None else changes[k] for k in ("method", "rules")}
        known = settings_of(**_chosen(**kept))
        return Experiment(**({k: v for k, v in by_hand.items() if k in known} | changes))

    def on_any_machine(self) -> "Experiment":
        """The same experiment with default execution settings: equal for all records of one result."""
        return self.replace(**{k: COMMON[k].default for k in EXECUTION_SETTINGS})

    def differences_from_paper(self) -> dict[str, Any]:
        """Each setting that differs from the paper's, with the paper's value; empty at the paper's scale."""
        if self.dataset not in TABLE_II:
            return {"dataset": list(TABLE_II)}
        paper = Experiment.preset("paper", dataset=self.dataset, method=self.method)
        # The paper names no seed and uses two partitions.
        free = {"seed", "partition", "evaluate_every", *EXECUTION_SETTINGS}
        free |= set() if self.method_class.released else {"rules"}
        return {k: v for k, v in paper.to_dict().items() if k not in free and self.__dict__.get(k, v) != v}

    @classmethod
    def preset(
        cls, name: str, dataset: str | None = None, method: str | type = "feddip", **overrides: Any
    ) -> "Experiment":
        """`paper`: exactly Table II. `narrow`: CIFAR, an eighth as wide. `smoke`: embedded data in seconds."""
        settings, chosen = preset(name, dataset), _chosen(method, overrides.get("rules"))
        known = settings_of(**chosen)
        if name == "smoke":
            settings |= class_of(chosen["method"]).smoke
        return cls(method=method, **({k: v for k, v in settings.items() if k in known} | overrides))


def source_hash(cls: type) -> str:
    """A hash of a class's code outside this package: functions by their text, everything else by its repr."""

    def text(name: str, value: Any) -> str:
        function = getattr(value, "__func__", value)
        if inspect.isfunction(function):
            try:
                return inspect.getsource(function)
            except OSError as error:
                where = f"the source of {name} cannot be read; put the class in a cell or a module"
                raise ValueError(f"method: {name_of(cls)!r} is not allowed; {where}") from error
        shown = repr([(k, s.default, s.allowed) for k, s in value.items()] if name == "settings" else value)
        return re.sub(" at 0x[0-9a-f]+", "", shown)  # memory addresses differ between processes

    own = [c for c in cls.__mro__ if not c.__module__.startswith("feddip_core.") and c is not object]
    parts = [(k, v) for c in own for k, v in sorted(vars(c).items()) if inspect.isfunction(v) or not k.startswith("__")]
    return hashlib.sha256("\n".join(f"{k}: {text(k, v)}" for k, v in parts).encode()).hexdigest()


def _refuse(exp: Experiment, name: str, allowed: str) -> None:
    raise ValueError(f"{name}: {getattr(exp, name)!r} is not allowed; {allowed}")


def _check_data(exp: Experiment) -> None:
    """Check that data, network and clients fit together."""
    if exp.model is None:
        _refuse(exp, "model", f"for your own data set ({exp.dataset}) choose one of {', '.join(MODELS)}, or your own")
    if is_hook(exp.dataset) and not is_hook(exp.model):
        _refuse(exp, "model", f"{exp.dataset} needs your own network, as package.module:network")
    if exp.dataset.endswith(".npz") and not Path(exp.dataset).is_file():
        _refuse(exp, "dataset", "there is no such file")
    if is_hook(exp.dataset) != (exp.partition == "given"):
        needs = "use 'given' if dataset is your own function samples(client), and only then"
        _refuse(exp, "partition", needs)
    if exp.clients_per_round > exp.clients:
        _refuse(exp, "clients_per_round", f"it must be at most clients, {exp.clients}")
    if exp.partition.startswith("dirichlet") and not 0 < float(exp.partition[10:-1]) <= 1e6:
        _refuse(exp, "partition", "alpha must be a number in (0, 1e+06]")
    groups = CLASSES.get(exp.dataset, 0) // 2
    if exp.partition == "pathological" and groups and exp.clients % groups:
        _refuse(exp, "clients", f"the pathological partition of {exp.dataset} needs a multiple of {groups}")


def _check_computation(exp: Experiment) -> None:
    """Check that the network can be built and trained as the settings say."""
    if exp.norm != "batch" and exp.model != "resnet18":
        _refuse(exp, "norm", f"{exp.model} has no norms")
    if is_hook(exp.model) and exp.width != 1:
        _refuse(exp, "width", f"{exp.model} cannot be scaled; it must be 1")
    if exp.batch_norm != "average" and exp.model in MODELS and (exp.model, exp.norm) != ("resnet18", "batch"):
        _refuse(exp, "batch_norm", "only resnet18 has batch norms, and only with norm='batch'")
    if exp.value_bits not in (16, 32):
        _refuse(exp, "value_bits", "it must be 16 or 32")
    if exp.stacked and (exp.model, exp.norm) not in (("lenet5", "batch"), ("resnet18", "group")):
        needs = "it needs a network without dropout and batch norms: lenet5, or resnet18 with norm='group'"
        _refuse(exp, "stacked", needs)
    if exp.gradient == "native" and (exp.stacked or exp.torch_compile or exp.precision != "float32"):
        _refuse(exp, "gradient", "stacked, torch_compile and bfloat16 need PyTorch's gradient")
