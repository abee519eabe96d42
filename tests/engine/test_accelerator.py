"""Settings that a GPU may gain by: on a CPU they must give the same, up to a stated rounding."""

import pytest
import torch
from helpers import states
from torch import nn

from feddip_core import models, run
from feddip_core.engine import computing
from feddip_core.engine.assembly import assemble
from feddip_core.layout import Layout


def trained(exp, dataset, clients=(0, 1)):
    """What some clients upload in a round with a mask and a penalty."""
    federation = assemble(exp, dataset)
    state = federation.start().replace(t=exp.rounds - 1)
    assert federation.method.terms(state.t, state.w)
    return [upload.values for upload in federation.train(state, list(clients))]


def differ(a, b):
    """How far two uploads are apart, as a share of the weights."""
    return max(float((x["w"] - y["w"]).norm() / y["w"].norm()) for x, y in zip(a, b, strict=True))


# In double precision the two ways agree to the fifteenth digit; a wrong batch, mask or term would be in the first ones.
@pytest.mark.parametrize("settings", [
    dict(), dict(method="feddip_prox", prox_mu=0.1, momentum=0.9), dict(method="prunetrain", lambda_max=1e-3),
    dict(model="resnet18", norm="group", width=0.05),
], ids=["lenet5", "prox", "prunetrain", "resnet18"])  # fmt: skip
def test_stacked_clients_train_as_they_do_alone(tiny, mini, double_precision, settings):
    exp = tiny(lambda_max=1e-3, gradient="eager") if not settings else tiny(gradient="eager", **settings)
    alone, stacked = (trained(exp.replace(stacked=on), mini, (3, 0, 7)) for on in (False, True))
    assert differ(stacked, alone) < 1e-12
    assert torch.allclose(*(torch.stack([u["loss"] for u in way]) for way in (stacked, alone)))


def test_stacked_clients_of_different_sizes_come_back_in_their_order(tiny, mini, double_precision):
    exp = tiny(partition="dirichlet(0.5)", gradient="eager", clients=10)
    alone, stacked = (trained(exp.replace(stacked=on), mini, (5, 1, 8)) for on in (False, True))
    assert differ(stacked, alone) < 1e-12


def test_a_method_that_ends_a_round_in_its_own_way_can_be_stacked(tiny, hardly_tested, double_precision):
    exp = tiny("feddst", rounds=3, reconfigure_every=2, gradient="eager")
    alone, stacked = ([row for *_, row in states(exp.replace(stacked=on), hardly_tested)][1:] for on in (False, True))
    assert [row["sparsity"] for row in stacked] == [row["sparsity"] for row in alone]
    assert [row["train_loss"] for row in stacked] == pytest.approx([row["train_loss"] for row in alone], rel=1e-9)


@pytest.mark.parametrize("model", ["lenet5", "alexnet", "resnet18"])
def test_the_order_of_pixels_in_memory_changes_no_more_than_rounding(tiny, mini, model):
    exp = tiny(model=model, width=0.1, gradient="eager")
    plain, last = (trained(exp.replace(channels_last=on), mini) for on in (False, True))
    assert differ(last, plain) < 1e-4


def test_images_really_are_channels_last():
    net = models.build("alexnet", 10, 0.05)
    seen = []
    net.conv1.register_forward_hook(lambda _, x, y: seen.append(x[0].is_contiguous(memory_format=torch.channels_last)))
    layout = Layout.of(net)
    u, x = layout.flat(dict(net.named_parameters())), torch.zeros(2, 3, 32, 32)
    for on in (False, True):
        computing.forward_of(net, layout, channels_last=on)(u, {}, x)
    assert seen == [False, True]


def test_bfloat16_is_near_and_weights_stay_in_float32(tiny, mini):
    exp = tiny(gradient="eager", learning_rate=0.01)
    plain, half = (trained(exp.replace(precision=p), mini) for p in ("float32", "bfloat16"))
    assert half[0]["w"].dtype == torch.float32
    assert 1e-7 < differ(half, plain) < 1e-2  # eight bits of every product, in steps that are small beside the weights


@pytest.fixture
def half_compile(monkeypatch):
    """torch.compile without its last stage, which turns the same graph into machine code and takes a minute."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, options: compile(f, backend="aot_eager"))


@pytest.mark.slow
def test_torch_compile_gives_the_same_up_to_rounding(tiny, mini, half_compile):
    exp = tiny(width=0.05, gradient="eager", clients=60)
    plain, compiled = (trained(exp.replace(torch_compile=on), mini, (0,)) for on in (False, True))
    assert differ(compiled, plain) < 1e-5


@pytest.mark.slow
def test_a_compiled_batch_norm_keeps_its_statistics(half_compile):
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(27, 2))
    layout, statistics = Layout.of(net), Layout.of(net).statistics
    u, x = layout.flat(dict(net.named_parameters())), torch.randn(8, 1, 5, 5)
    flat = [statistics.flat(dict(net.named_buffers())) for _ in range(2)]
    logits = [computing.forward_of(net, layout, compiled=on)(u, statistics.views(flat[on]), x) for on in (False, True)]
    torch.testing.assert_close(*logits)
    torch.testing.assert_close(*flat)
    assert not torch.equal(flat[1], statistics.flat(dict(net.named_buffers())))


def test_what_was_allowed_is_set_recorded_and_put_back(tiny):
    before = computing.numerics()
    strict, loose = (run(tiny(rounds=1, tf32=on)).provenance["numerics"] for on in (False, True))
    assert strict == {
        "default_dtype": "float32", "mkldnn": True, "autocast": False,
        "float32_matmul_precision": "highest", "deterministic_algorithms": False, "cudnn_allow_tf32": False,
        "cudnn_deterministic": True, "cudnn_benchmark": False,
    }  # fmt: skip
    assert loose == strict | {"float32_matmul_precision": "high", "cudnn_allow_tf32": True}
    assert computing.numerics() == before


@pytest.mark.parametrize(("settings", "message"), [
    (dict(model="alexnet", stacked=True), "stacked: True is not allowed; it needs a network without dropout"),
    (dict(model="resnet18", stacked=True), "stacked: True is not allowed"),
    (dict(stacked=True, gradient="native"), "gradient: 'native' is not allowed; stacked"),
    (dict(precision="bfloat16", gradient="native"), "gradient: 'native' is not allowed"),
    (dict(norm="group"), "norm: 'group' is not allowed; lenet5 has no norms"),
    (dict(model="resnet18", norm="group", batch_norm="local"), "batch_norm: 'local' is not allowed"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(tiny, settings, message):
    with pytest.raises(ValueError, match=message):
        tiny(**settings)


def test_stacked_clients_need_no_workers(tiny):
    with pytest.raises(ValueError, match="workers: 2 is not allowed"):
        run(tiny(stacked=True), workers=2)


def test_they_are_no_part_of_an_ordinary_run(tiny):
    assert tiny().replace(stacked=True).run_id != tiny().run_id
    assert tiny().gradient == "auto" and not tiny().stacked and not tiny().torch_compile and not tiny().channels_last
