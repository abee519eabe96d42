"""Local training of one client, ours against a bare loop in eager PyTorch, on the same samples in the same run.

Only ratios mean anything: machines differ, and other work disturbs both sides alike. Each repetition measures
every side once, in CPU time; the table shows the median over the repetitions.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

from feddip_core import Experiment, data
from feddip_core.federation import Federation
from feddip_core.records import provenance
from feddip_core.streams import stream

GOALS = {"fedavg": 1.10, "feddip": 1.25}


def bare_loop(net, x, y, order, batch_size, eta, weight_decay):
    """What one would write by hand: a module, an optimiser, a loop. The data are normalised beforehand."""
    sgd = torch.optim.SGD(net.parameters(), lr=eta, weight_decay=weight_decay)
    net.train()
    for epoch in order:
        for batch in epoch.split(batch_size):
            sgd.zero_grad()
            loss = F.cross_entropy(net(x[batch]), y[batch])
            loss.backward()
            sgd.step()
    return loss


def cpu_seconds(work) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=21, help="repetitions")
    repeat = parser.parse_args().repeat
    torch.set_num_threads(1)
    # The paper's client: 1,200 samples, 5 epochs, batches of 64; λ > 0, as from a tenth of the run on.
    dataset = data.load("fashion_mini")
    settings = dict(dataset="fashion_mini", clients=5, rounds=20, seed=0)
    ours = {m: Federation(Experiment(method=m, **settings), dataset) for m in GOALS}
    states = {m: f.start() for m, f in ours.items()}
    late = {m: type(s)(**(vars(s) | {"t": 10})) for m, s in states.items()}

    federation, exp = ours["fedavg"], ours["fedavg"].exp
    part = federation.parts[0]
    x, y = dataset.normalise(dataset.x_train[part]), dataset.y_train[part]
    generator = stream(0, "benchmark")
    order = [torch.randperm(len(x), generator=generator) for _ in range(exp.local_epochs)]

    def bare():
        bare_loop(federation.net, x, y, order, exp.batch_size, exp.learning_rate, exp.weight_decay)

    sides = {"bare loop": bare} | {m: lambda m=m: ours[m].train_client(late[m], 0) for m in GOALS}
    for work in sides.values():
        work()
    times = [{name: cpu_seconds(work) for name, work in sides.items()} for _ in range(repeat)]
    ratios = {m: statistics.median(t[m] / t["bare loop"] for t in times) for m in GOALS}

    machine = provenance(exp)
    print(
        f"LeNet-5, {len(x)} samples, {exp.local_epochs} epochs, batches of {exp.batch_size}; one thread; n = {repeat}"
    )
    print(f"{machine['cpu']}; torch {machine['packages']['torch']}\n")
    print(f"{'local training of a client':<28}{'seconds':>9}{'ratio':>8}{'goal':>8}")
    for name in sides:
        seconds = statistics.median(t[name] for t in times)
        goal = f"≤ {GOALS[name]:.2f}" if name in GOALS else ""
        goal += " missed" if name in GOALS and ratios[name] > GOALS[name] else ""
        print(f"{name:<28}{seconds:>9.2f}{ratios.get(name, 1):>8.2f}{goal:>8}")


if __name__ == "__main__":
    main()
