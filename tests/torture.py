"""Ten minutes of bad luck, and what held: make torture

Random kills, damaged files, hostile clients and random experiments take turns until the time is over. Attempt number n
is made from the seed and n alone, so that one that broke a promise can be repeated:
make torture OPTIONS='--seed S --attempt n'.
"""

import argparse
import logging
import math
import multiprocessing
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
from grid import LocalGrid, run_on
from helpers import same
from test_checkpoints import killed_at
from test_flower import LIES, spoil

from feddip_core import METHODS, Experiment, run
from feddip_core.engine.records import folder_of
from feddip_core.experiment import COMMON, settings_of

JUNK = (None, -1, 0, -0.0, 0.5, 1e39, 10**400, math.nan, math.inf, "", "x", True, [], {}, (1, 2), b"x")


def small(draw: random.Random, **settings) -> Experiment:
    """A run of a second, of any method and many settings."""
    method = draw.choice([name for name in METHODS if ":" not in name])
    free = dict(
        rules=draw.choice(["paper", "released"]), partition=draw.choice(["iid", "shards", "pathological"]),
        clients=draw.choice([20, 40, 60]), clients_per_round=draw.randint(1, 4), rounds=draw.randint(2, 5),
        width=draw.choice([0.2, 0.5]), batch_size=draw.choice([7, 32, 64]), learning_rate=10 ** draw.uniform(-3, 0.5),
        reconfigure_every=draw.randint(1, 3), sparsity_target=draw.uniform(0.5, 0.99), local_epochs=1,
        momentum=draw.choice([0.0, 0.9]), seed=draw.randrange(1000),
    )  # fmt: skip
    free["swap_every"] = 2 * free["reconfigure_every"]
    free["momentum"] *= method != "sparsyfed"  # whose steps have none
    read = {"rules", *settings_of(method, free["rules"]), *COMMON}
    known = {k: v for k, v in (free | settings).items() if k in read}
    return Experiment.preset("smoke", method=method, **known)


def a_killed_run_resumes_to_the_same_bits(draw: random.Random, folder: Path) -> None:
    exp = small(draw)
    whole = run(exp)
    for _ in range(draw.randint(1, 5)):
        # From here, or every kill would wait for another import of PyTorch.
        process = multiprocessing.get_context("fork").Process(target=killed_at, args=(draw.randint(1, 40), exp, folder))
        process.start()
        process.join()
    assert same(run(exp, out=folder), whole)


def a_damaged_file_gives_the_same_bits_or_an_error_that_names_it(draw: random.Random, folder: Path) -> None:
    exp = small(draw)
    whole = run(exp)
    run(exp, out=folder, until=draw.randint(1, exp.rounds))
    file = draw.choice(sorted(p for p in folder_of(exp, folder).iterdir() if p.is_file() and p.name != ".lock"))
    content = bytearray(file.read_bytes())
    match draw.choice(["flip", "cut", "empty", "noise", "gone"]):
        case "flip":
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            file.write_bytes(content)
        case "cut":
            file.write_bytes(content[: draw.randrange(len(content))])
        case "empty":
            file.write_bytes(b"")
        case "noise":
            file.write_bytes(draw.randbytes(len(content)))
        case "gone":
            file.unlink()
    try:
        again = run(exp, out=folder)
    except (ValueError, OSError) as error:
        assert str(folder_of(exp, folder)) in str(error), f"{file.name}: {error!r} does not say where"
    else:
        assert same(again, whole), f"{file.name}: other bits"


def hostile_clients_neither_stop_nor_ruin_a_run(draw: random.Random, folder: Path) -> None:
    """Two of five hospitals answer anything, also numbers that are finite."""
    method = draw.choice(["fedavg", "feddip", "prunefl", "feddst"])
    hospitals = "feddip_core.lab.hospitals"
    exp = Experiment(
        method=method, dataset=f"{hospitals}:samples", model=f"{hospitals}:network", partition="given", clients=5,
        clients_per_round=5, rounds=4, local_epochs=1, batch_size=16, learning_rate=0.05, seed=draw.randrange(1000),
    )  # fmt: skip
    liars = draw.sample(range(5), 2)

    def finite(reply):
        w = torch.from_numpy(reply.content["arrays"]["w"].numpy().copy())
        return spoil(reply, arrays={"w": (w * 10 ** draw.uniform(-3, 7)).numpy()})

    def lie(n, message, reply):
        if n not in liars or message.metadata.message_type != "train" or not reply.has_content():
            return reply
        told = draw.choice([lambda reply: None, finite, *(lie for lie, _ in LIES.values())])
        return told(reply) if "w" in reply.content.array_records.get("arrays", {}) else reply

    result = run_on(LocalGrid(5, fault=lie), exp, folder)
    assert len(result.metrics) == 4 and result.metrics["test_loss"].map(math.isfinite).all()
    assert {fault["client"] for fault in result.provenance.get("faults", [])} <= set(liars)
    honest = run(exp).metrics["test_loss"].iloc[-1]
    assert result.metrics["test_loss"].iloc[-1] < max(3.0, 3 * honest), "the liars have ruined the model"


def settings_train_and_resume_to_the_same_bits_or_are_refused_by_name(draw: random.Random, folder: Path) -> None:
    exp = small(draw)
    field, value = draw.choice(sorted(exp.to_dict())), draw.choice(JUNK)
    try:
        exp = exp.replace(**{field: value})
    except ValueError as error:
        assert field in str(error), f"{field}={value!r:.50}: {error!r:.200} does not name it"
        return
    if exp.rounds * exp.clients_per_round * exp.local_epochs > 100 or exp.width > 1:
        return  # allowed, and too much for a minute
    whole = run(exp)
    assert whole.diverged or whole.metrics["test_loss"].map(math.isfinite).all()
    run(exp, out=folder, until=1)
    assert same(run(exp, out=folder), whole), f"{field}={value!r}"


PROMISES = (
    a_killed_run_resumes_to_the_same_bits,
    a_damaged_file_gives_the_same_bits_or_an_error_that_names_it,
    hostile_clients_neither_stop_nor_ruin_a_run,
    settings_train_and_resume_to_the_same_bits_or_are_refused_by_name,
)


def attempt(seed: int, n: int) -> None:
    """One attempt on the promise whose turn it is."""
    with tempfile.TemporaryDirectory(prefix="torture-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a file that is set aside is warned about
        PROMISES[n % len(PROMISES)](random.Random(f"{seed}/{n}"), Path(folder))


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--minutes", type=float, default=10.0)
    words.add_argument("--seed", type=int, default=random.randrange(10**6))
    words.add_argument("--attempt", type=int, help="repeat this one alone, with its traceback")
    options = words.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # the server says of every lie that it has heard it
    if options.attempt is not None:
        attempt(options.seed, options.attempt)
        return 0
    made, broken, end, n = Counter(), Counter(), time.monotonic() + 60 * options.minutes, 0
    while time.monotonic() < end:
        promise = PROMISES[n % len(PROMISES)].__name__
        made[promise] += 1
        try:
            attempt(options.seed, n)
        except Exception as error:
            broken[promise] += 1
            reason = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
            print(f"BROKEN --seed {options.seed} --attempt {n}: {reason}", flush=True)
        n += 1
    print(f"\n{'promise':68} attempts  held")
    for promise in made:
        print(f"{promise.replace('_', ' '):68} {made[promise]:8} {made[promise] - broken[promise]:5}")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
