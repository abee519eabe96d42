"""Networks with random sparse weights, samples for them, and trained LeNet-5: what every form is tested with."""

import torch
from torch import nn

from feddip_core import Experiment, models
from feddip_core.deploy.graph import Samples, graph_of
from feddip_core.deploy.source import finished
from feddip_core.engine.records import OWN_RECORDS, folder_of


class Own(nn.Module):
    """What the paper's networks do not have: dilation, groups, uneven strides and pools, padding on one axis."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(2, 4, (3, 5), stride=(1, 2), padding=(2, 1), dilation=(2, 1))
        self.b = nn.Conv2d(4, 6, 3, padding="same", groups=2)
        self.norm = nn.BatchNorm2d(6)
        self.c = nn.Conv2d(4, 6, 1, bias=False)
        self.pools = nn.Sequential(
            nn.MaxPool2d(3, 2, padding=1), nn.ReLU(inplace=True), nn.AvgPool2d((2, 1), padding=(1, 0))
        )
        self.rows = nn.BatchNorm1d(36, affine=False)
        self.out = nn.Linear(36, 5)

    def forward(self, x):
        x = self.a(x)
        x = torch.add(self.norm(self.b(x)), self.c(x)).relu_()
        x = nn.functional.adaptive_avg_pool2d(self.pools(x), (2, 3))
        return self.out(nn.functional.dropout(self.rows(x.view(x.size(0), -1)), 0.3, self.training))


CASES = {
    "lenet5": (lambda: models.build("lenet5", 10), (1, 28, 28), 0.9),
    "alexnet": (lambda: models.build("alexnet", 10, 0.125), (3, 32, 32), 0.9),
    "resnet18": (lambda: models.build("resnet18", 100, 0.125), (3, 32, 32), 0.8),
    "own": (Own, (2, 9, 13), 0.5),
}
MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)


def pruned(net, sparsity):
    """The network with random statistics, and without this share of its weights, the smallest of all layers."""
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
    weights = [p for p in net.parameters() if p.ndim > 1]
    for w in weights:
        threshold = w.detach().abs().flatten().kthvalue(max(1, int(sparsity * w.numel()))).values
        w.data[w.abs() <= threshold] = 0
        # He's variance for what is left: else signals fade with depth, and no form could differ from another.
        w.data *= (2 / w[0].numel()) ** 0.5 / w.detach().square().mean().sqrt()
    return net.eval()


def case(name, samples=6):
    """A graph, and raw samples for it."""
    make, shape, sparsity = CASES[name]
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        net = pruned(make(), sparsity)
        channels = shape[0]
        of = Samples(shape) if name == "own" else Samples(shape, 255.0, MEAN[:channels], STD[:channels])
        x = torch.randn(samples, *shape) if name == "own" else torch.randint(0, 256, (samples, *shape)).to(torch.uint8)
    return graph_of(net, of), x


def recorded(sparsity):
    """LeNet-5 as a committed run of the paper's settings left it, with weights of 16 bits."""
    return finished(folder_of(Experiment.preset("paper", sparsity_target=sparsity), OWN_RECORDS)).graph.rounded(16)
