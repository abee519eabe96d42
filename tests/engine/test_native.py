import dataclasses
import subprocess

import pytest
import torch
import torch.nn.functional as F
from helpers import trained
from torch.func import functional_call

from feddip_core import Experiment, models, run
from feddip_core.client import eager_gradient
from feddip_core.engine import native, records
from feddip_core.engine.assembly import assemble
from feddip_core.engine.computing import forward_of
from feddip_core.layout import Layout


def network(width=1.0, classes=10, **image):
    torch.manual_seed(0)
    net = models.build("lenet5", classes, width, **({"channels": 1, "size": 28} | image))
    return net, Layout.of(net)


def kernel(net, **image):
    return native.Kernel(net, {"channels": 1, "size": 28} | image, torch.device("cpu"))


def sample(layout, samples, sparsity, channels=1, size=28, classes=10, seed=0):
    g = torch.Generator().manual_seed(seed)
    u = torch.randn(layout.size, generator=g) * 0.1 * (torch.rand(layout.size, generator=g) >= sparsity)
    x = torch.randn(samples, channels, size, size, generator=g)
    return u, x, torch.randint(0, classes, (samples,), generator=g)


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("samples", [1, 17, 48, 64])
def test_the_native_gradient_is_pytorchs(samples, sparsity):
    net, layout = network()
    u, x, y = sample(layout, samples, sparsity)
    loss, g = kernel(net).gradient(u, x, y)
    expected_loss, expected = eager_gradient(forward_of(net, layout), {})(u, x, y)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
    for k, v in layout.views(expected).items():
        assert (layout.views(g)[k] - v).norm() <= 1e-5 * v.norm(), k


@pytest.mark.parametrize("width, image, classes", [(0.5, {}, 10), (1.4, dict(channels=3, size=32), 7)])
def test_other_widths_images_and_classes(width, image, classes):
    net, layout = network(width, classes, **image)
    u, x, y = sample(layout, 21, 0.3, classes=classes, **image)
    g, expected = kernel(net, **image).gradient(u, x, y)[1], eager_gradient(forward_of(net, layout), {})(u, x, y)[1]
    assert (g - expected).norm() <= 1e-5 * expected.norm()


def test_among_equals_the_first_is_the_largest_as_in_pytorch():
    # Plain background: all four of a window are equal, and the gradient of the weights depends on which one counts.
    net, layout = network()
    u, x, y = sample(layout, 16, 0.0)
    x[:, :, ::2] = 0.5
    x[:, :, 1::2] = 0.5
    g, expected = kernel(net).gradient(u, x, y)[1], eager_gradient(forward_of(net, layout), {})(u, x, y)[1]
    assert (g - expected).norm() <= 1e-5 * expected.norm()


def test_its_bits_are_the_same_on_every_call():
    net, layout = network()
    u, x, y = sample(layout, 48, 0.5)
    here = kernel(net)
    first = here.gradient(u, x, y)
    here.gradient(-u, x * 2, y)
    for again in (here.gradient(u, x, y), kernel(net).gradient(u, x, y)):
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_logits_are_the_networks():
    net, layout = network()
    u, x, _ = sample(layout, 37, 0.5)
    expected = functional_call(net, layout.views(u), (x,))
    torch.testing.assert_close(kernel(net).logits(u, x), expected, rtol=1e-4, atol=1e-5)


def test_a_loss_that_is_not_finite_stays_so():
    net, layout = network()
    u, x, y = sample(layout, 5, 0.0)
    u[3] = float("nan")
    loss, g = kernel(net).gradient(u, x, y)
    assert loss.isnan() and g.isnan().any()


def test_a_round_is_the_same_whichever_gradient(tiny):
    both = [run(tiny(gradient=g, rounds=2), progress=False) for g in ("native", "eager")]
    assert [r.provenance["gradient"] for r in both] == ["native", "eager"]
    for k, v in both[1].weights.items():
        torch.testing.assert_close(both[0].weights[k], v, rtol=1e-3, atol=1e-5)


def test_the_choice_is_a_setting_and_auto_leaves_ids_alone():
    auto = Experiment()
    assert auto.gradient == "auto"
    assert len({auto.run_id, auto.replace(gradient="eager").run_id, auto.replace(gradient="native").run_id}) == 3
    with pytest.raises(ValueError, match="gradient: 'fast' is not allowed; it must be one of auto, eager, native"):
        Experiment(gradient="fast")


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native._library.cache_clear()
    yield tmp_path
    native._library.cache_clear()


def test_without_a_compiler_auto_is_eager_and_says_why(empty_cache, monkeypatch, tiny):
    monkeypatch.setenv("PATH", "")
    with pytest.warns(UserWarning, match=r"gradient: eager, .* no C\+\+ compiler"):
        result = run(tiny(rounds=1), progress=False)
    assert result.provenance["gradient"] == "eager"
    with pytest.raises(ValueError, match=r"gradient: 'native' is not available; there is no C\+\+ compiler"):
        run(tiny(gradient="native"), progress=False)


def test_without_avx2_auto_is_eager_and_says_why(empty_cache, monkeypatch, tiny):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    with pytest.warns(UserWarning, match="this processor has no AVX2"):
        run(tiny(rounds=1), progress=False)


def test_a_compiler_that_fails_is_named(empty_cache, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(native.NotHere, match="false failed"):
        kernel(network()[0])
    assert not list((empty_cache / "feddip").iterdir())


def test_it_is_compiled_once(empty_cache, monkeypatch):
    net, _ = network()
    kernel(net)
    native._library.cache_clear()
    monkeypatch.setattr(subprocess, "run", None)
    kernel(net)


@pytest.mark.parametrize("model, device, reason", [("alexnet", "cpu", "only lenet5"), ("lenet5", "meta", "on a CPU")])
def test_other_networks_and_devices_have_none(model, device, reason):
    net = models.build(model, 10, 0.1)
    with pytest.raises(native.Unavailable, match=reason):
        native.Kernel(net, {"channels": 1, "size": 28}, torch.device(device))


def test_another_loss_is_left_to_pytorch(tiny, mini):
    clients = assemble(tiny(), mini).clients
    assert clients.gradient() == clients.kernel.gradient
    assert clients.gradient(loss_of=F.nll_loss) != clients.kernel.gradient


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(u=torch.zeros(7)), "u: torch.float32 .7,. is not allowed"),
        (dict(x=torch.zeros(4, 1, 28, 28, dtype=torch.float64)), "x: torch.float64 "),
        (dict(x=torch.zeros(4, 1, 20, 20)), "x: torch.float32 .4, 1, 20, 20. is not allowed"),
        (dict(y=torch.zeros(3, dtype=torch.int64)), "y: torch.int64 .3,. is not allowed"),
        (dict(x=torch.zeros(4, 1, 28, 28, device="meta")), "tensors on the CPU"),
    ],
)
def test_tensors_that_would_crash_it_are_refused(change, message):
    net, layout = network()
    u, x, y = sample(layout, 4, 0.0)
    with pytest.raises(ValueError, match=message):
        kernel(net).gradient(**(dict(u=u, x=x, y=y) | change))


def test_crops_and_flips_come_as_views_and_are_taken(tiny, mini):
    cropped = dataclasses.replace(mini, crop_padding="zeros")
    weights = {}
    for gradient in ("native", "eager"):
        federation = assemble(tiny(gradient=gradient, clients=60), cropped)
        weights[gradient] = trained(federation, federation.start(), 0)
    torch.testing.assert_close(weights["native"], weights["eager"], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_large_images_need_no_large_stack():
    net, layout = network(3.0, size=224, channels=3)
    u, x, y = sample(layout, 3, 0.5, size=224, channels=3)
    g = kernel(net, size=224, channels=3).gradient(u, x, y)[1]
    expected = eager_gradient(forward_of(net, layout), {})(u, x, y)[1]
    assert (g - expected).norm() <= 1e-5 * expected.norm()


def test_a_run_is_not_resumed_by_the_other_gradient(empty_cache, monkeypatch, tiny, tmp_path):
    exp = tiny(rounds=2)
    run(exp, out=tmp_path, until=1)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    native._library.cache_clear()
    with pytest.warns(UserWarning, match="no AVX2"), pytest.raises(ValueError, match="begun with the native one"):
        run(exp, out=tmp_path)
    assert (records.folder_of(exp, tmp_path) / "checkpoint.safetensors").exists()
