"""Partition training samples across clients: IID, the paper's two classes per client, shards, Dirichlet, or given."""

import numpy as np
import torch
from torch import Tensor

from ..streams import stream, stream_seed


def partition(labels: Tensor, rule: str, clients: int, seed: int, owner: Tensor | None = None) -> list[Tensor]:
    """The indices that each client holds: every sample at exactly one client, every client with at least one.

    With the rule `given`, each client holds what it brought. A client in another process holds nothing here.
    """
    if rule == "given" and owner is not None:
        return [torch.nonzero(owner.cpu() == n).flatten() for n in range(clients)]
    labels = labels.cpu()
    if len(labels) < 2 * clients:
        most = len(labels) // 2
        raise ValueError(f"clients: {clients} is not allowed; {len(labels)} training samples allow at most {most}")
    if rule.startswith("dirichlet("):
        return dirichlet(labels, clients, float(rule[10:-1]), seed)
    return {"iid": iid, "pathological": pathological, "shards": shards}[rule](labels, clients, seed)


def _classes(labels: Tensor, seed: int) -> list[Tensor]:
    """The indices of each class, shuffled."""
    generator = stream(seed, "partition")
    members = labels.argsort(stable=True).split(labels.bincount().tolist())
    return [i[torch.randperm(len(i), generator=generator)] for i in members]


def iid(labels: Tensor, clients: int, seed: int) -> list[Tensor]:
    """Stratified: each class is shuffled and dealt out one by one."""
    order = torch.cat(_classes(labels, seed))
    return [order[n::clients] for n in range(clients)]


def pathological(labels: Tensor, clients: int, seed: int) -> list[Tensor]:
    """Two classes per client: clients form groups, and group g shares classes 2g and 2g + 1."""
    members = _classes(labels, seed)
    groups = len(members) // 2
    if len(members) % 2 or clients % groups:
        raise ValueError(
            f"clients: {clients} is not allowed; the pathological partition needs an even number of classes "
            f"(here {len(members)}) and clients in multiples of half that number"
        )
    # Differs from the paper, whose text names McMahan's shards: this is exactly the split of the released code.
    sharers = clients // groups
    parts = []
    for g in range(groups):
        pair = [_short_shares(members[c], sharers) for c in (2 * g, 2 * g + 1)]
        parts += [torch.cat(both) for both in zip(*pair, strict=True)]
    return parts


def _short_shares(indices: Tensor, sharers: int) -> list[Tensor]:
    """Equal shares minus one sample each; the last share takes the rest."""
    share = len(indices) // sharers - 1
    if share < 1:
        raise ValueError(f"clients: {sharers} of them share a class of {len(indices)} samples; each needs at least one")
    return list(indices.split([share] * (sharers - 1) + [len(indices) - share * (sharers - 1)]))


def shards(labels: Tensor, clients: int, seed: int) -> list[Tensor]:
    """McMahan's shards: samples sorted by label and cut into 2N pieces, two per client."""
    pieces = torch.cat(_classes(labels, seed)).tensor_split(2 * clients)
    order = torch.randperm(2 * clients, generator=stream(seed, "shards")).tolist()
    return [torch.cat([pieces[order[2 * n]], pieces[order[2 * n + 1]]]) for n in range(clients)]


def dirichlet(labels: Tensor, clients: int, alpha: float, seed: int) -> list[Tensor]:
    """Split each class in proportions drawn from Dir(α): the smaller α, the fewer classes per client."""
    rng = np.random.default_rng(stream_seed(seed, "dirichlet"))
    parts: list[list[Tensor]] = [[] for _ in range(clients)]
    for members in _classes(labels, seed):
        shares = rng.dirichlet([alpha] * clients)
        cuts = (shares.cumsum()[:-1] * len(members)).astype(int).tolist()
        for part, piece in zip(parts, members.tensor_split(cuts), strict=True):
            part.append(piece)
    dealt = [torch.cat(part) for part in parts]
    # A client without data could not train: it gets one sample from the largest client.
    while min(len(part) for part in dealt) == 0:
        poor = min(range(clients), key=lambda n: len(dealt[n]))
        rich = max(range(clients), key=lambda n: len(dealt[n]))
        dealt[poor], dealt[rich] = dealt[rich][-1:], dealt[rich][:-1]
    return dealt
