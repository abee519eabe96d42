import dataclasses
import os
import shutil
import subprocess

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import trained
from torch import nn
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


def masked(layout, sparsity, samples=48, **how):
    """A sparse point, its mask and a batch; some kept weights are zero, as one that has just come back is."""
    u, x, y = sample(layout, samples, 0.02, **how)
    kept = torch.ones(layout.size)
    for v in layout.weights(kept).values():
        v.copy_(torch.rand(v.shape, generator=torch.Generator().manual_seed(v.numel())) >= sparsity)
    return u * kept, kept, x, y


def computed(kept, lanes=16):
    """Which gradients a sparse layer may compute.

    A convolution: those of its kept weights. A linear layer: those of every vector of inputs that holds a kept weight,
    and of the rest of a row that fills no vector. Vectors have 16 lanes with AVX-512; shorter ones are parts of these.
    """
    if kept.ndim == 4:
        return kept == 1
    rows = F.pad(kept, (0, -kept.shape[1] % lanes), value=1).view(len(kept), -1, lanes)
    return (rows.amax(2) == 1).repeat_interleave(lanes, 1)[:, : kept.shape[1]]


@pytest.mark.parametrize("sparsity", [0.5, 0.9, 0.99])
def test_of_kept_weights_alone_the_gradient_has_the_same_bits(sparsity):
    net, layout = network()
    u, kept, x, y = masked(layout, sparsity)
    here = kernel(net)
    (loss, whole), (same_loss, part) = here.gradient(u, x, y), here.gradient_of(kept)(u, x, y)
    assert torch.equal(loss, same_loss) and torch.equal(part[kept == 1], whole[kept == 1])
    assert (u[kept == 1] == 0).any() and (whole[kept == 0] != 0).any()
    for name, held in layout.weights(kept).items() if sparsity >= 0.9 else []:
        left_out = ~computed(held)
        assert not layout.weights(part)[name][left_out].any(), name
        assert sparsity < 0.99 or layout.weights(whole)[name][left_out].any(), name


def test_a_point_that_the_mask_does_not_cover_is_still_differentiated_there():
    net, layout = network()
    u, x, y = sample(layout, 8, 0.9)
    here = kernel(net)
    assert torch.equal(here.gradient_of(torch.zeros(layout.size))(u, x, y)[0], here.gradient(u, x, y)[0])


SPARSE = dict(sparse_uplink=True, lambda_max=0.5, reconfigure_every=2)


@pytest.mark.parametrize(
    "method, settings", [("snip", {}), ("feddst", {}), ("feddip", SPARSE), ("feddip_prox", SPARSE | dict(prox_mu=0.5))]
)
def test_a_client_without_feedback_ends_with_the_same_bits(tiny, mini, monkeypatch, method, settings):
    federation = assemble(tiny(method, **settings), mini)
    state, here = federation.start().replace(t=4), federation.clients.kernel  # when FedDIP's penalty has begun
    assert bool(federation.method.terms(4, state.w)) == bool(settings)
    calls = []
    monkeypatch.setattr(here, "gradient_of", lambda kept: calls.append(kept) or native.Kernel.gradient_of(here, kept))
    upload = federation.train_client(state, 0).values
    monkeypatch.setattr(here, "gradient_of", lambda kept: here.gradient)
    assert all(torch.equal(v, upload[k]) for k, v in federation.train_client(state, 0).values.items())
    assert len(calls) == 1


@pytest.mark.parametrize("feedback, terms", [(True, []), (False, [lambda g, u: None])])
def test_feedback_and_a_term_that_may_read_it_get_the_whole_gradient(tiny, mini, monkeypatch, feedback, terms):
    federation = assemble(tiny("snip"), mini)
    state, clients = federation.start(), federation.clients
    monkeypatch.setattr(clients.kernel, "gradient_of", None)
    clients.train_(state.w.clone(), state.m, clients.batches(0, 0, "batches"), terms=terms, feedback=feedback)
    with pytest.raises(TypeError, match="not callable"):
        clients.train_(state.w.clone(), state.m, clients.batches(0, 0, "batches"), feedback=False)


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
    with pytest.warns(UserWarning, match=r"gradient: using eager, .* install a C\+\+ compiler"):
        result = run(tiny(rounds=1), progress=False)
    assert result.provenance["gradient"] == "eager"
    with pytest.raises(ValueError, match=r"gradient: 'native' is not available; install a C\+\+ compiler"):
        run(tiny(gradient="native"), progress=False)


@pytest.mark.slow
def test_without_avx2_it_has_vectors_of_four(empty_cache, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    net, layout = network(0.5)
    u, kept, x, y = masked(layout, 0.9, samples=21)
    expected = eager_gradient(forward_of(net, layout), {})(u, x, y)[1]
    whole, part = kernel(net).gradient(u, x, y)[1], kernel(net).gradient_of(kept)(u, x, y)[1]
    assert (whole - expected).norm() <= 1e-5 * expected.norm() and torch.equal(part * kept, whole * kept)


ON_ARM = """
#include SOURCE
#include <cstdio>
int main() {
    static Workspace workspace;
    static float u[Sizes::all], mask[Sizes::all], x[21 * CHANNELS * SIZE * SIZE], g[Sizes::all];
    static int64_t y[21];
    fread(u, sizeof u, 1, stdin), fread(mask, sizeof mask, 1, stdin), fread(x, sizeof x, 1, stdin);
    fread(y, sizeof y, 1, stdin);
    gradient(&workspace, u, nullptr, x, y, g, 21), fwrite(g, sizeof g, 1, stdout);
    gradient(&workspace, u, mask, x, y, g, 21), fwrite(g, sizeof g, 1, stdout);
}
"""


@pytest.mark.skipif(
    not (shutil.which("aarch64-linux-gnu-g++") and shutil.which("qemu-aarch64")),
    reason="needs a compiler for arm64 and qemu",
)
def test_on_arm64_its_gradient_is_pytorchs_too(tmp_path):
    net, layout = network(0.5)
    u, kept, x, y = masked(layout, 0.9, samples=21)
    (tmp_path / "main.cpp").write_text(ON_ARM, "utf-8")
    sizes = dict(CHANNELS=1, SIZE=28, C1=3, C2=8, H1=60, H2=42, CLASSES=10, SOURCE=f'"{native.FOLDER}/lenet5.cpp"')
    command = ["aarch64-linux-gnu-g++", "-static", "-std=c++17", "-O3", "-w", *(f"-D{k}={v}" for k, v in sizes.items())]
    subprocess.run([*command, "main.cpp", "-o", "main"], cwd=tmp_path, check=True)
    given = b"".join(t.numpy().tobytes() for t in (u, kept, x, y))
    done = subprocess.run(["qemu-aarch64", tmp_path / "main"], input=given, capture_output=True, check=True)
    whole, part = torch.from_numpy(np.frombuffer(done.stdout, np.float32).copy()).split(layout.size)
    expected = eager_gradient(forward_of(net, layout), {})(u, x, y)[1]
    assert (whole - expected).norm() <= 1e-5 * expected.norm() and torch.equal(part * kept, whole * kept)


def test_a_compiler_that_fails_is_named(empty_cache, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(native.CannotBuild, match="false failed"):
        kernel(network()[0])
    assert not list((empty_cache / "feddip" / "native").iterdir())


def truncated(path, whole):
    path.unlink()  # this process has the old one open
    path.write_bytes(whole[:1000])


def anothers(path, whole):
    if not os.getuid():  # only root can give a file away
        os.chown(path, 12345, -1)
    else:
        truncated(path, whole)


def linked(path, whole):
    path.rename(path.parent.parent / "elsewhere.so")
    path.symlink_to(path.parent.parent / "elsewhere.so")


@pytest.mark.slow
def test_it_is_compiled_once_and_again_if_the_file_is_not_what_was_compiled(empty_cache, monkeypatch):
    net, _ = network(0.2)
    kernel(net)
    (path,), made = (empty_cache / "feddip" / "native").iterdir(), []
    whole = path.read_bytes()

    def compiled(folder, key, command, source):
        assert not path.exists() and not path.is_symlink()
        made.append(path.write_bytes(whole))
        return path

    def next_process():
        native._library.cache_clear()
        kernel(net)
        return len(made)

    monkeypatch.setattr(native, "_compiled", compiled)
    assert next_process() == 0
    for i, spoil in enumerate((truncated, anothers, linked)):
        spoil(path, whole)
        assert next_process() == i + 1
    path.parent.chmod(0o777)
    with pytest.raises(native.CannotBuild, match=f"others can write to {path.parent}"):
        next_process()


class Louder(models.LeNet5):
    def forward(self, x):
        return 2 * super().forward(x)


def hooked(net):
    net.fc2.register_forward_hook(lambda module, given, out: 2 * out)


def patched(net):
    net.forward = lambda x: x


def reflecting(net):
    net.conv1 = nn.Conv2d(1, 6, 5, padding=2, padding_mode="reflect")


def without_bias(net):
    net.fc3 = nn.Linear(84, 10, bias=False)


def parametrised(net):
    nn.utils.parametrizations.weight_norm(net.fc1)


@pytest.mark.parametrize("change", [hooked, patched, reflecting, without_bias, parametrised, None])
def test_it_takes_lenet5_itself_only(change):
    net = Louder() if change is None else network()[0]
    if change:
        change(net)
    with pytest.raises(native.Unavailable, match="only lenet5"):
        kernel(net)


@pytest.mark.parametrize(
    "model, device, reason", [("resnet18", "cpu", "only lenet5 and alexnet"), ("lenet5", "meta", "on a CPU")]
)
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
        (
            dict(y=torch.tensor([0, 9, 10**9, 0])),
            "y: 1000000000 is not allowed; a label must be at least 0 and below 10",
        ),
        (dict(y=torch.tensor([0, 9, -100, 0])), "y: -100 is not allowed"),
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


@pytest.mark.slow
def test_a_run_is_not_resumed_by_the_other_gradient(empty_cache, monkeypatch, tiny, tmp_path):
    exp = tiny(rounds=2)
    run(exp, out=tmp_path, until=1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    monkeypatch.setenv("PATH", "")
    native._library.cache_clear()
    with (
        pytest.warns(UserWarning, match="install a C.. compiler"),
        pytest.raises(ValueError, match="started with native, but here it is"),
    ):
        run(exp, out=tmp_path)
    assert (records.folder_of(exp, tmp_path) / "checkpoint.safetensors").exists()
