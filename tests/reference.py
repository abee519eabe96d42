"""Algorithm 1 of the paper, transcribed line by line: deep copies, plain loops, autograd on modules.

An oracle for the fast code, of which it imports nothing. What is random (the first mask, who is
selected, the batches) is handed in, so that both see the same draws.
"""

import copy

import torch
import torch.nn.functional as F


def prune_(net, mask):
    for name, p in net.named_parameters():
        if name in mask:
            for i, keep in enumerate(mask[name].flatten().tolist()):
                if not keep:
                    p.data.view(-1)[i] = 0.0


def global_magnitude_mask(net, names, zeros):
    """Sort every prunable weight of the network by magnitude and strike out the first `zeros`."""
    entries = []
    for z, name in enumerate(names):
        for i, value in enumerate(dict(net.named_parameters())[name].detach().flatten().tolist()):
            entries.append((abs(value), z, i))
    mask = {name: torch.ones_like(dict(net.named_parameters())[name], dtype=torch.bool) for name in names}
    for _, z, i in sorted(entries)[:zeros]:
        mask[names[z]].view(-1)[i] = False
    return mask


def local_update(start, mask, names, batches, eta, lam, weight_decay):
    """Eq. 10 on the objective of Eq. 8, one batch at a time."""
    net = copy.deepcopy(start)
    for x, y in batches:
        pruned = copy.deepcopy(net)
        prune_(pruned, mask)
        pruned.train()
        pruned.zero_grad()
        loss = F.cross_entropy(pruned(x), y)
        for name, p in pruned.named_parameters():
            if lam and name in names and p.detach().abs().sum() > 0:
                loss = loss + lam * (p**2).sum() ** 0.5
        loss.backward()
        for p, q in zip(net.parameters(), pruned.parameters(), strict=True):
            p.data -= eta * (q.grad + weight_decay * p.data)
        for b, c in zip(net.buffers(), pruned.buffers(), strict=True):
            b.data.copy_(c)
    return net


def average(nets, sizes):
    mean = copy.deepcopy(nets[0])
    for key, value in mean.state_dict().items():
        value.zero_()
        for net, size in zip(nets, sizes, strict=True):
            value += (net.state_dict()[key] * (size / sum(sizes))).to(value.dtype)
    return mean


def feddip(net, mask, names, select, batches_of, size_of, *, T, R, s_0, s_p, lambda_max, Q, eta_0, decay, weight_decay):
    """Algorithm 1; returns the pruned global model, its mask, and every mask on the way."""
    total = sum(p.numel() for name, p in net.named_parameters() if name in names)
    pruned_global = copy.deepcopy(net)
    prune_(pruned_global, mask)
    history = []
    for tau in range(1, T + 1):
        t = tau - 1
        step = 0
        while step < Q - 1 and t >= (step + 1) * T / Q:
            step += 1
        lam = lambda_max * step / Q
        local, sizes = [], []
        for n in select(t):
            local.append(
                local_update(pruned_global, mask, names, batches_of(t, n), eta_0 * decay**t, lam, weight_decay)
            )
            sizes.append(size_of(n))
        dense_global = average(local, sizes)
        if tau % R == 0:
            s = s_p + (s_0 - s_p) * (1 - tau / T) ** 3
            mask = global_magnitude_mask(dense_global, names, round(s * total))
        pruned_global = copy.deepcopy(dense_global)
        prune_(pruned_global, mask)
        history.append(mask)
    return pruned_global, mask, history
