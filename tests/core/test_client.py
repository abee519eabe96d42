import dataclasses

import pytest
import torch
from helpers import on_meta

from feddip_core import client, models
from feddip_core.engine.assembly import assemble
from feddip_core.engine.computing import forward_of
from feddip_core.layout import Layout


def quadratic(u, x, y):
    """½‖u − y‖², whose gradient is u − y."""
    return (u - y).square().sum() / 2, u - y


def test_one_step_by_hand():
    w, m = torch.tensor([2.0, 3.0]), torch.tensor([1.0, 0.0])
    loss = client.error_feedback_step_(w, m, quadratic, None, torch.tensor([0.0, 10.0]), eta=0.1)
    # at u = (2, 0) the gradient is (2, −10), and the pruned weight moves as well
    assert w.tolist() == pytest.approx([1.8, 4.0])
    assert float(loss) == pytest.approx(52.0)


def test_weight_decay_acts_on_the_dense_weights():
    w, m = torch.tensor([2.0, 3.0]), torch.tensor([1.0, 0.0])
    client.error_feedback_step_(w, m, quadratic, None, torch.tensor([2.0, 0.0]), eta=0.1, weight_decay=0.5)
    assert w.tolist() == pytest.approx([1.9, 2.85])


def test_momentum_is_pytorchs():
    w, target = torch.tensor([2.0, 3.0]), torch.tensor([1.0, -1.0])
    other = torch.nn.Parameter(w.clone())
    sgd = torch.optim.SGD([other], lr=0.1, momentum=0.9, weight_decay=0.01)
    batches = [(None, target)] * 5
    for _, y in batches:
        other.grad = other.detach() - y
        sgd.step()
    client.train_(w, None, quadratic, batches, eta=0.1, momentum=0.9, weight_decay=0.01)
    assert w.tolist() == pytest.approx(other.tolist(), rel=1e-6)


def test_group_penalty_by_hand():
    u, layers = torch.tensor([3.0, 4.0, 7.0, 0.0, 0.0]), [slice(0, 2), slice(3, 5)]
    assert float(client.group_penalty(u, layers)) == 5.0
    g = torch.zeros(5)
    client.add_group_penalty_(g, u, layers, lam=0.5)
    assert g.tolist() == pytest.approx([0.3, 0.4, 0.0, 0.0, 0.0])  # none on the bias, none at a layer of zeros


def test_the_penalty_leaves_masked_weights_alone_while_the_loss_does_not():
    net = models.build("lenet5", 10)
    layout = Layout.of(net)
    w = layout.flat(dict(net.named_parameters()))
    m = (torch.rand(layout.size, generator=torch.Generator().manual_seed(0)) < 0.5).float()
    x, y = torch.rand(32, 1, 28, 28, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 10
    _, g = client.eager_gradient(forward_of(net, layout), {})(w * m, x, y)
    assert int((g[m == 0] != 0).sum()) > 1000
    penalty = torch.zeros_like(w)
    client.add_group_penalty_(penalty, w * m, layout.layers, lam=1.0)
    assert not penalty[m == 0].any()
    assert penalty[layout.layers[0]].norm() == pytest.approx(1.0)


def test_the_gradient_is_autograds():
    net = models.build("lenet5", 10)
    layout = Layout.of(net)
    x, y = torch.rand(17, 1, 28, 28), torch.arange(17) % 10
    loss, g = client.eager_gradient(forward_of(net, layout), {})(layout.flat(dict(net.named_parameters())), x, y)
    expected = torch.nn.functional.cross_entropy(net(x), y)
    expected.backward()
    assert float(loss) == float(expected.detach())
    assert torch.equal(g, torch.cat([p.grad.flatten() for p in net.parameters()]))


def test_mean_loss_weighs_batches_by_their_samples():
    w = torch.zeros(1)
    batches = [(None, torch.full((3,), 2.0)), (None, torch.full((1,), 4.0))]

    def still(u, x, y):
        return y[0], torch.zeros_like(u)

    assert float(client.train_(w, None, still, batches, eta=0.1)) == pytest.approx((3 * 2 + 1 * 4) / 4)


@pytest.mark.parametrize("settings", [
    dict(model="lenet5"), dict(model="alexnet"), dict(model="resnet18"), dict(model="resnet18", batch_norm="local"),
    dict(model="resnet18", norm="group"), dict(model="lenet5", stacked=True), dict(model="alexnet", channels_last=True),
    dict(method="feddip_prox", prox_mu=0.1), dict(method="prunetrain", rules="paper"),
    dict(method="prunefl", rules="paper"), dict(method="prunetrain"), dict(method="prunefl"),
], ids=lambda s: "-".join(map(str, s.values())))  # fmt: skip
def test_local_training_mixes_no_devices_and_never_waits(tiny, mini, settings):
    """On the meta device a tensor has no values: whatever asks for one, or meets one of another device, fails."""
    exp = tiny(**(dict(width=0.05, rules="released", momentum=0.9, gradient="eager") | settings))
    normal = dict(crop_padding="zeros", mean=torch.zeros(1, 1, 1), std=torch.ones(1, 1, 1))
    dataset = dataclasses.replace(mini, **normal)
    federation = assemble(exp, dataset)
    state = on_meta(federation, t=5)
    assert federation.method.terms(5, state.w)
    (upload,) = federation.train(state, [0])
    values = upload.values
    assert {"w", "statistics", "loss"} <= values.keys() and {v.device.type for v in values.values()} == {"meta"}
    assert values["w"].shape == state.w.shape
    with pytest.raises(RuntimeError):
        values["loss"].item()
