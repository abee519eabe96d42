"""AlexNet's compiled gradient; what it shares with LeNet-5's is tested there."""

import dataclasses
import shutil
import subprocess
from functools import cache, partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from feddip_core import models
from feddip_core.client import eager_gradient
from feddip_core.engine import native
from feddip_core.engine.assembly import assemble, gradient_name
from feddip_core.engine.computing import forward_of
from feddip_core.layout import Layout
from feddip_core.study import theory

WIDTH = 0.05  # channels 3, 10, 19, 13, 13 and 205 hidden units: no multiples of a vector


@cache
def made(width=WIDTH, classes=10, channels=3):
    """A network that nobody changes, its layout and its kernel."""
    net = build(width, classes, channels)
    return net, Layout.of(net), kernel(net, channels)


def build(width=WIDTH, classes=10, channels=3):
    torch.manual_seed(0)
    return models.build("alexnet", classes, width, channels=channels, size=32).train()


def kernel(net, channels=3, size=32):
    return native.Kernel(net, {"channels": channels, "size": size}, torch.device("cpu"))


def sample(net, layout, samples, sparsity, seed=1):
    """A mask of this sparsity, a point under it with a few more zeros, and a batch.

    With seed 0 the two largest of a max-pool differ by 1e-8, and rounding decides which one gets the gradient.
    """
    g, (kept, u) = torch.Generator().manual_seed(seed), torch.ones(2, layout.size)
    u.copy_(torch.randn(layout.size, generator=g) * 0.1 * (torch.rand(layout.size, generator=g) >= 0.02))
    for v in layout.weights(kept).values():
        v.copy_(torch.rand(v.shape, generator=g) >= sparsity)
    x = torch.randn(samples, net.conv1.in_channels, 32, 32, generator=g)
    return u * kept, kept, x, torch.randint(0, net.fc3.out_features, (samples,), generator=g)


def drawn(f, *given):
    """The result of f, which draws from torch's generator, and the generator's state after it."""
    with torch.random.fork_rng([]):
        torch.manual_seed(7)
        return f(*given), torch.get_rng_state()


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("samples", [1, 17, 128, 150])
def test_the_native_gradient_is_pytorchs_with_the_same_dropout(samples, sparsity):
    net, layout, here = made()
    u, _, x, y = sample(net, layout, samples, sparsity)
    (loss, g), state = drawn(here.gradient, u, x, y)
    (expected_loss, expected), expected_state = drawn(eager_gradient(forward_of(net, layout), {}), u, x, y)
    assert torch.equal(state, expected_state)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
    for k, v in layout.views(expected).items():
        assert (layout.views(g)[k] - v).norm() <= 1e-5 * v.norm(), k


@pytest.mark.parametrize("width, classes, channels", [(0.02, 7, 1), (0.125, 100, 3)])
def test_other_widths_images_and_classes(width, classes, channels):
    net, layout, here = made(width, classes, channels)
    u, kept, x, y = sample(net, layout, 37, 0.3)
    g, expected = (drawn(f, u, x, y)[0][1] for f in (here.gradient, eager_gradient(forward_of(net, layout), {})))
    assert (g - expected).norm() <= 1e-5 * expected.norm()
    assert torch.equal(drawn(here.gradient_of(kept), u, x, y)[0][1] * kept, g * kept)


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.99])
def test_of_kept_weights_alone_the_gradient_has_the_same_bits(sparsity):
    net, layout, here = made()
    u, kept, x, y = sample(net, layout, 150, sparsity)
    (loss, whole), _ = drawn(here.gradient, u, x, y)
    (same_loss, part), _ = drawn(here.gradient_of(kept), u, x, y)
    assert torch.equal(loss, same_loss) and torch.equal(part[kept == 1], whole[kept == 1])
    assert (u[kept == 1] == 0).any() and (whole[kept == 0] != 0).any() == (sparsity > 0)
    assert not part[kept == 0].any() or sparsity < 0.9


def test_a_batch_is_the_same_to_the_bit_after_another():
    net, layout, here = made()
    u, _, x, y = sample(net, layout, 48, 0.5)
    first = drawn(here.gradient, u, x, y)[0]
    drawn(here.gradient, -u, x[:20] * 2, y[:20])
    assert all(map(torch.equal, first, drawn(here.gradient, u, x, y)[0]))


@pytest.mark.parametrize("training", [False, True])
def test_logits_are_without_dropout_unless_in_training(training):
    net, layout, here = build().train(training), *made()[1:]
    u, _, x, _ = sample(net, layout, 139, 0.5)
    logits, state = drawn(partial(here.logits, training=training), u, x)
    expected, same = drawn(lambda u, x: functional_call(net, layout.views(u), (x,)), u, x)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(state, same)


def test_a_loss_that_is_not_finite_stays_so():
    net, layout, here = made()
    u, _, x, y = sample(net, layout, 5, 0.0)
    u[3] = float("nan")
    loss, g = here.gradient(u, x, y)
    assert loss.isnan() and g.isnan().any()


def test_a_label_that_is_no_class_is_refused():
    net, layout, here = made()
    u, _, x, y = sample(net, layout, 5, 0.0)
    y[3] = 10
    with pytest.raises(ValueError, match="y: 10 is not allowed; a label must be at least 0 and below 10"):
        here.gradient(u, x, y)


def hooked(net):
    net.fc2.register_forward_hook(lambda module, given, out: 2 * out)


def strided(net):
    net.conv3 = nn.Conv2d(10, 19, 3, padding=1, dilation=1, stride=2)


def wider(net):
    net.conv5 = nn.Conv2d(13, 13, 5, padding=2)


@pytest.mark.parametrize("change", [hooked, strided, wider])
def test_it_takes_alexnet_itself_only(change):
    net = build()
    change(net)
    with pytest.raises(native.Unavailable, match="only lenet5 and alexnet"):
        kernel(net)


def test_other_image_sizes_are_left_to_pytorch():
    net = models.build("alexnet", 10, WIDTH, channels=3, size=28)
    with pytest.raises(native.Unavailable, match="for alexnet it needs an image size of 32, not 28"):
        kernel(net, size=28)


@pytest.fixture(scope="module")
def colour(mini):
    """The small data set as 32×32 images of three channels, with crops and flips, which come as views."""
    three = {k: F.pad(getattr(mini, k).expand(-1, 3, -1, -1), (2, 2, 2, 2)) for k in ("x_train", "x_test")}
    return dataclasses.replace(mini, **three, crop_padding="zeros")


@pytest.mark.parametrize("method", ["feddip", "feddst", "snip"])
def test_two_rounds_are_those_of_pytorch(tiny, colour, method):
    weights = {}
    for gradient in ("native", "eager"):
        exp = tiny(method, gradient=gradient, model="alexnet", width=WIDTH, rounds=2, clients=20)
        federation = assemble(exp, colour)
        assert gradient_name(federation) == gradient
        state = federation.start()
        for _ in range(2):
            state, _ = federation.round(state)
        weights[gradient] = state.w
    torch.testing.assert_close(weights["native"], weights["eager"], rtol=1e-3, atol=1e-5)


def test_auto_takes_it_and_a_method_s_own_batch_has_the_same_dropout(tiny, colour):
    """`batch_gradient` and the theory draw from the stream of their purpose, natively as in PyTorch."""
    federations = [
        assemble(tiny(gradient=gradient, model="alexnet", width=WIDTH), colour) for gradient in ("auto", "eager")
    ]
    assert [gradient_name(f) for f in federations] == ["native", "eager"]
    w = federations[0].start().w
    g, expected = (f.clients.batch_gradient(w, 3, 1, "a purpose") for f in federations)
    assert (g - expected).norm() <= 1e-5 * expected.norm()
    f, expected = (theory.loss(f.clients, w, 0, 0.0, f.start().statistics) for f in federations)
    assert f == pytest.approx(expected, rel=1e-5)


ON_ARM = """
#include SOURCE
#include <cstdio>
int main() {
    static Workspace workspace;
    static float u[Sizes::all], mask[Sizes::all], x[21 * CHANNELS * SIZE * SIZE], g[Sizes::all];
    static float ones[21 * (FEATURES + H)];
    static int64_t y[21];
    fread(u, sizeof u, 1, stdin), fread(mask, sizeof mask, 1, stdin), fread(x, sizeof x, 1, stdin);
    fread(y, sizeof y, 1, stdin), fread(ones, sizeof ones, 1, stdin);
    const float *more = ones + 21 * FEATURES;
    gradient(&workspace, u, nullptr, x, y, g, ones, more, 21), fwrite(g, sizeof g, 1, stdout);
    gradient(&workspace, u, mask, x, y, g, ones, more, 21), fwrite(g, sizeof g, 1, stdout);
}
"""


@pytest.mark.skipif(
    not (shutil.which("aarch64-linux-gnu-g++") and shutil.which("qemu-aarch64")),
    reason="needs a compiler for arm64 and qemu",
)
def test_on_arm64_its_gradient_is_pytorchs_too(tmp_path):
    net, layout, here = made()
    u, kept, x, y = sample(net, layout, 21, 0.9)
    with torch.random.fork_rng([]):
        torch.manual_seed(7)
        dropouts = here._dropouts(21)
    (tmp_path / "main.cpp").write_text(ON_ARM, "utf-8")
    _, sizes = native._alexnet(net, dict(channels=3, size=32))
    sizes |= dict(CHANNELS=3, CLASSES=10, SOURCE=f'"{native.FOLDER}/alexnet.cpp"')
    command = ["aarch64-linux-gnu-g++", "-static", "-std=c++17", "-O3", "-w", *(f"-D{k}={v}" for k, v in sizes.items())]
    subprocess.run([*command, "main.cpp", "-o", "main"], cwd=tmp_path, check=True)
    given = b"".join(t.numpy().tobytes() for t in (u, kept, x, y, *dropouts))
    done = subprocess.run(["qemu-aarch64", tmp_path / "main"], input=given, capture_output=True, check=True)
    whole, part = torch.from_numpy(np.frombuffer(done.stdout, np.float32).copy()).split(layout.size)
    expected = drawn(eager_gradient(forward_of(net, layout), {}), u, x, y)[0][1]
    assert (whole - expected).norm() <= 1e-5 * expected.norm() and torch.equal(part * kept, whole * kept)


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["AVX2", "DEFAULT"])
def test_shorter_vectors(monkeypatch, capability):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    net, layout, _ = made()
    native._library.cache_clear()
    here = kernel(net)
    native._library.cache_clear()
    u, kept, x, y = sample(net, layout, 133, 0.9)
    g, part, expected = (
        drawn(f, u, x, y)[0][1]
        for f in (here.gradient, here.gradient_of(kept), eager_gradient(forward_of(net, layout), {}))
    )
    assert (g - expected).norm() <= 1e-5 * expected.norm() and torch.equal(part * kept, g * kept)
