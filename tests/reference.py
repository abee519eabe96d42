"""Algorithm 1 of the paper, transcribed line by line: deep copies, plain loops, autograd on modules.

An oracle for the fast code, of which it imports nothing. What is random (the first mask, who is
selected, the batches) is handed in, so that both see the same draws.
"""

import copy
import functools
import math

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


def local_update(start, mask, names, batches, eta, lam, weight_decay, feedback=True):
    """Eq. 10 on the objective of Eq. 8, one batch at a time; without feedback Eq. 7."""
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
        if not feedback:
            prune_(net, mask)
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


def fedgmp(net, names, select, batches_of, size_of, *, T, R, b, e, s_p, lamp, swap_at, eta_0, decay, weight_decay):
    """Gradual pruning from a dense start; returns the global model and every mask on the way.

    `swap_at` has the share of the kept weights that is replaced after some of the rounds, in which there is feedback.
    """
    model, history = copy.deepcopy(net), []
    parameters = dict(net.named_parameters())
    mask = {name: torch.ones_like(parameters[name], dtype=torch.bool) for name in names}
    total = sum(parameters[name].numel() for name in names)
    for tau in range(1, T + 1):
        t, local, sizes, feedback = tau - 1, [], [], tau in swap_at
        for n in select(t):
            eta = eta_0 * decay**t
            local.append(local_update(model, mask, names, batches_of(t, n), eta, 0.0, weight_decay, feedback))
            sizes.append(size_of(n))
        model = average(local, sizes)
        if tau % R == 0 and tau > b:
            p = 1.0 if tau >= e else (tau - b) / (e - b)
            s = s_p - s_p * (1 - p) ** 3
            weights = [dict(model.named_parameters())[name].flatten().tolist() for name in names]
            old = [mask[name].flatten().tolist() for name in names]
            prune_(model, mask)
            new = gradual_mask(weights, old, total - round(s * total), lamp, swap_at.get(tau, 0))
            shapes = [parameters[name].shape for name in names]
            mask = {k: torch.tensor(v).view(shape) for k, v, shape in zip(names, new, shapes, strict=True)}
        prune_(model, mask)
        history.append(mask)
    return model, history


def adjusting(
    net, mask, names, select, batches_of, batch_of, size_of, rule, *, T, R, until, alpha, eta_0, decay, weight_decay,
    local=None,
):  # fmt: skip
    """Masked rounds whose mask a rule chooses, from lists of numbers; returns the global model and every mask.

    The rule is given the share to replace, the clients' weights, their gradients if this round adjusts the mask (else
    None), the average, the clients' shares of the samples, and the mask. `local` replaces the clients' steps in rounds
    that adjust the mask, and is given the share first.
    """
    model, history = copy.deepcopy(net), []
    prune_(model, mask)
    for tau in range(1, T + 1):
        t, nets, gradients = tau - 1, [], []
        share = alpha / 2 * (1 + math.cos(math.pi * tau / until)) if tau < until else 0.0
        adjusts = tau % R == 0 and share > 0
        update = functools.partial(local, share) if local and adjusts else local_update
        for n in select(t):
            nets.append(
                update(model, mask, names, batches_of(t, n), eta_0 * decay**t, 0.0, weight_decay, feedback=False)
            )
            nets[-1].zero_grad()
            x, y = batch_of(t, n)
            F.cross_entropy(nets[-1](x), y).backward()
            gradients.append([dict(nets[-1].named_parameters())[name].grad.flatten().tolist() for name in names])
        sizes = [size_of(n) for n in select(t)]
        model = average(nets, sizes)
        new = rule(
            share, [layers_of(each, names) for each in nets], gradients if adjusts else None, layers_of(model, names),
            [size / sum(sizes) for size in sizes], [mask[name].flatten().tolist() for name in names],
        )  # fmt: skip
        mask = {name: torch.tensor(on).view(mask[name].shape) for name, on in zip(names, new, strict=True)}
        prune_(model, mask)
        history.append(mask)
    return model, history


def fedmef_update(share, start, mask, names, batches, eta, lam, weight_decay, feedback, *, eta_0, strength):
    """FedMef's steps in a round that ends with a swap: the smallest active weights are squeezed, at another rate."""
    low = {}
    for name, w in zip(names, layers_of(start, names), strict=True):
        active, inactive = places(mask[name].flatten().tolist())
        low[name] = ranked(w, active)[: min(int(share * len(active)), len(inactive))]
    net, batches = copy.deepcopy(start), list(batches)
    for b, (x, y) in enumerate(batches):
        net.zero_grad()
        squares = sum(p.view(-1)[low[name]].square().sum() for name, p in net.named_parameters() if name in low)
        norm = float(squares.detach()) ** 0.5
        (F.cross_entropy(net(x), y) + strength * squares).backward()
        p = (2 * len(batches) - 2 * b) / (2 * len(batches) - b)
        rate = max(eta, p * (2 / (1 + math.exp(-norm)) - 1) * eta_0)
        for w in net.parameters():
            w.data -= rate * (w.grad + weight_decay * w.data)
        prune_(net, mask)
    return net


def layers_of(net, names):
    return [dict(net.named_parameters())[name].detach().flatten().tolist() for name in names]


# The mask rules of the other methods, on lists of lists of numbers: one inner list a layer.


def layer_counts_mask(weights, counts, votes):
    """Keep the so many largest magnitudes of each layer, equal ones by their votes."""
    mask = []
    for layer, count, vote in zip(weights, counts, votes, strict=True):
        ranked = sorted(range(len(layer)), key=lambda i: (abs(layer[i]), vote[i], i))
        kept = set(ranked[len(layer) - count :])
        mask.append([i in kept for i in range(len(layer))])
    return mask


def feddst_mask(weights, gradients, mask, fraction):
    """Drop the smallest active weights of a layer one by one, then bring back one by one the largest gradients."""
    new = []
    for w, g, m in zip(weights, gradients, mask, strict=True):
        m = list(m)
        dropped = -int(-fraction * sum(m) // 1)
        for _ in range(dropped):
            i = min((i for i in range(len(w)) if m[i]), key=lambda i: (abs(w[i]), i))
            m[i] = False
        for _ in range(dropped):
            i = max((i for i in range(len(w)) if not m[i]), key=lambda i: (abs(g[i]), i))
            m[i] = True
        new.append(m)
    return new


def prunefl_mask(weights, values, mask, keep, drop):
    """Keep the largest active weights of each layer, then add the weights of largest value one by one."""
    safe = []
    for z, (w, m) in enumerate(zip(weights, mask, strict=True)):
        active = sorted((i for i in range(len(w)) if m[i]), key=lambda i: (abs(w[i]), i))
        safe += [(z, i) for i in active[int(drop * len(active)) :]]
    chosen = set(sorted(safe, key=lambda p: (abs(weights[p[0]][p[1]]), p))[-keep:] if len(safe) > keep else safe)
    others = [(z, i) for z, w in enumerate(weights) for i in range(len(w)) if (z, i) not in chosen]
    while len(chosen) < keep:
        best = max(others, key=lambda p: (values[p[0]][p[1]], p))
        others.remove(best)
        chosen.add(best)
    return [[(z, i) in chosen for i in range(len(w))] for z, w in enumerate(weights)]


def channel_mask(matrices, threshold):
    """Strike out rows, but of the last matrix, and columns, but of the first, without an entry of the threshold."""
    masks = []
    for z, matrix in enumerate(matrices):
        mask = [[True] * len(row) for row in matrix]
        for i, row in enumerate(matrix):
            for j in range(len(row)):
                if z < len(matrices) - 1 and max(abs(v) for v in row) < threshold:
                    mask[i][j] = False
                if z > 0 and max(abs(other[j]) for other in matrix) < threshold:
                    mask[i][j] = False
        masks.append(mask)
    return masks


def snip_mask(weights, gradients, keep):
    """Rank every weight by |g · w| and keep the largest."""
    entries = [
        (abs(w * g), z, i)
        for z, (ws, gs) in enumerate(zip(weights, gradients, strict=True))
        for i, (w, g) in enumerate(zip(ws, gs, strict=True))
    ]
    kept = {(z, i) for _, z, i in sorted(entries)[len(entries) - keep :]}
    return [[(z, i) in kept for i in range(len(w))] for z, w in enumerate(weights)]


def lamp_scores(layer):
    """Of each weight its square, divided by those of the weights that come no earlier in ascending order."""
    ranked = sorted(range(len(layer)), key=lambda i: (layer[i] ** 2, i))
    rest = {i: sum(layer[j] ** 2 for j in ranked[place:]) for place, i in enumerate(ranked)}
    return [layer[i] ** 2 / rest[i] if rest[i] else 0.0 for i in range(len(layer))]


def gradual_mask(weights, mask, keep, lamp, swapped=0):
    """Of the weights that are left, strike out the lowest until `keep` are left; replace a share of these."""
    layers = [[w if on else 0.0 for w, on in zip(*layer, strict=True)] for layer in zip(weights, mask, strict=True)]
    scores = [lamp_scores(layer) if lamp else [abs(w) for w in layer] for layer in layers]
    left = sorted((scores[z][i], z, i) for z, layer in enumerate(mask) for i, on in enumerate(layer) if on)
    gone = sorted((abs(weights[z][i]), z, i) for z, layer in enumerate(mask) for i, on in enumerate(layer) if not on)
    new = min(int(swapped * keep), len(gone))
    kept = {(z, i) for _, z, i in left[max(0, len(left) - keep + new) :] + gone[len(gone) - new :]}
    return [[(z, i) in kept for i in range(len(layer))] for z, layer in enumerate(weights)]


def ranked(values, places):
    """These places, the smallest magnitude first."""
    return sorted(places, key=lambda i: (abs(values[i]), i))


def places(mask):
    """Where a layer's mask is 1, and where it is 0."""
    return [i for i, on in enumerate(mask) if on], [i for i, on in enumerate(mask) if not on]


def fedtiny_mask(share, local, gradients, weights, rho, mask, dense=False):
    """Swap a share of each layer: out go its smallest weights, in come those of the largest mean gradient sent."""
    if gradients is None:
        return mask
    new = []
    for z, (w, m) in enumerate(zip(weights, mask, strict=True)):
        active, inactive = places(m)
        k = min(int(share * len(active)), len(inactive))
        mean = [0.0] * len(w)
        for g, part in zip(gradients, rho, strict=True):
            sent = range(len(w)) if dense else ranked(g[z], inactive)[len(inactive) - k :]
            for i in sent:
                mean[i] += part * g[z][i]
        stays = ranked(w, active)[k:]
        free = [i for i in range(len(w)) if i not in stays] if dense else inactive
        kept = {*stays, *ranked(mean, free)[len(free) - k :]}
        new.append([i in kept for i in range(len(w))])
    return new


class FedRTS:
    """The rule of FedRTS, with a pair of counts for every weight; `draw` is given both and the round."""

    def __init__(self, weights, gamma, strength, draw):
        self.kept, self.gone = ([[1.0] * len(w) for w in weights] for _ in range(2))
        self.gamma, self.strength, self.draw, self.rounds = gamma, strength, draw, 0

    def __call__(self, share, local, gradients, weights, rho, mask):
        self.rounds += 1
        if share == 0:
            return mask
        for z, m in enumerate(mask):
            active, inactive = places(m)
            k = min(int(share * len(active)), len(inactive))
            voted = [set(ranked(w[z], active)[k:]) for w in local]
            server = set(ranked(weights[z], active)[k:])
            for i in active:
                clients = sum(part for part, own in zip(rho, voted, strict=True) if i in own)
                self.count(z, i, self.gamma * (i in server) + (1 - self.gamma) * clients)
            for i in inactive if gradients else []:
                tops = [ranked(g[z], inactive)[len(inactive) - k :] for g in gradients]
                clients = sum(part for part, own in zip(rho, tops, strict=True) if i in own)
                self.count(z, i, self.gamma * 0.5 + (1 - self.gamma) * clients)
        if not gradients:
            return mask
        drawn = self.draw(self.rounds - 1, self.kept, self.gone)
        return layer_counts_mask(drawn, [sum(m) for m in mask], drawn)

    def count(self, z, i, x):
        self.kept[z][i] += self.strength * x
        self.gone[z][i] += self.strength * (1 - x)


def ssfl_mask(weights, gradients, sizes, keep):
    """Average every client's |g · w| by its samples, and keep the largest; `gradients` has one network per client."""
    means = [
        [
            sum(n * abs(g[z][i] * w) for g, n in zip(gradients, sizes, strict=True)) / sum(sizes)
            for i, w in enumerate(ws)
        ]
        for z, ws in enumerate(weights)
    ]
    return snip_mask(means, [[1.0] * len(ws) for ws in weights], keep)


def sparsyfed(net, names, select, batches_of, size_of, *, T, s_p, beta, eta_0, decay, weight_decay):
    """Train θ with weights sign(θ)|θ|^β; returns the global weights and, for every round, which are not zero."""
    theta, history = transformed(net, names, 1 / beta), []
    total = sum(p.numel() for name, p in net.named_parameters() if name in names)
    for t in range(T):
        local, sizes = [], []
        for n in select(t):
            own = copy.deepcopy(theta)
            for x, y in batches_of(t, n):
                used = transformed(own, names, beta)
                F.cross_entropy(used(x), y).backward()
                for (name, p), q in zip(own.named_parameters(), used.parameters(), strict=True):
                    slope = beta * p.data.abs() ** (beta - 1) if name in names else 1.0
                    p.data -= eta_0 * decay**t * (q.grad * slope + weight_decay * p.data)
            prune_(own, global_magnitude_mask(own, names, round(s_p * total)))
            local.append(own)
            sizes.append(size_of(n))
        theta = average(local, sizes)
        history.append({k: dict(theta.named_parameters())[k].detach() != 0 for k in names})
    return transformed(theta, names, beta), history


def transformed(net, names, exponent):
    """A copy whose prunable weights are raised to a power, each with its sign."""
    net = copy.deepcopy(net)
    for name, p in net.named_parameters():
        if name in names:
            for i, v in enumerate(p.detach().flatten().tolist()):
                p.data.view(-1)[i] = math.copysign(abs(v) ** exponent, v)
    return net


def flash_counts(net, mask, names, batches_of, draws_of, *, epochs, drop, eta, weight_decay):
    """What one client of FLASH's first stage finds: how many weights each layer has after so many epochs.

    `draws_of(epoch)` has a number for every weight: the largest ones say where a layer grows.
    """
    for epoch in range(1, epochs + 1):
        net = local_update(net, mask, names, batches_of(epoch), eta, 0.0, weight_decay, feedback=False)
        if epoch == epochs:
            break
        weights, on = layers_of(net, names), [mask[name].flatten().tolist() for name in names]
        dropped, values = 0, []
        for z, w in enumerate(weights):
            active, _ = places(on[z])
            values.append(sum(abs(w[i]) for i in active) / len(active) if active else 0.0)
            out = ranked(w, active)[: math.ceil(drop * (1 - epoch / epochs) * len(active))]
            dropped += len(out)
            on[z] = [here and i not in out for i, here in enumerate(on[z])]
        stays = {name: torch.tensor(v).view(mask[name].shape) for name, v in zip(names, on, strict=True)}
        prune_(net, stays)
        room = [int(0.99 * (len(v) - sum(v))) for v in on]
        for z, count in enumerate(flash_shares(dropped, values, room)):
            _, inactive = places(on[z])
            new = ranked(draws_of(epoch)[z], inactive)[len(inactive) - count :]
            on[z] = [here or i in new for i, here in enumerate(on[z])]
        mask = {name: torch.tensor(v).view(mask[name].shape) for name, v in zip(names, on, strict=True)}
    return [int(mask[name].sum()) for name in names]


def flash_shares(total, values, most):
    """Deal out a total in proportion to values, over and over among those that have room, whole parts first."""
    given = [0] * len(values)
    while sum(given) < total:
        free = [z for z in range(len(values)) if given[z] < most[z] and values[z] > 0]
        left = total - sum(given)
        parts = {z: left * values[z] / sum(values[y] for y in free) for z in free}
        whole = {z: math.floor(part) for z, part in parts.items()}
        rest = left - sum(whole.values())
        for z in sorted(free, key=lambda z: (whole[z] - parts[z], z))[:rest]:
            whole[z] += 1
        for z in free:
            given[z] = min(most[z], given[z] + whole[z])
    return given
