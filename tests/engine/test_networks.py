"""Networks of one's own: what of them is pruned, which are refused, and how a changed one is told from the old."""

import json
import sys

import own_networks
import pytest
import torch
from torch import nn

from feddip_core import Experiment, masks, models, run
from feddip_core.engine import networks, records
from feddip_core.engine.assembly import assemble
from feddip_core.engine.run import check_importable
from feddip_core.layout import Layout
from feddip_core.methods.prunefl import uses_of
from feddip_core.methods.prunetrain import Structure

SEQUENCE = {  # weights, and how often a sample uses each
    "conv.weight": (144, 8), "attention.in_proj_weight": (108, 8), "attention.out_proj.weight": (36, 8),
    "up.weight": (48, 8), "lstm.weight_ih_l0": (80, 16), "lstm.weight_hh_l0": (100, 16), "out.weight": (15, 1),
}  # fmt: skip
LINE = (
    "531 of 782 parameters are prunable: Conv1d 144, MultiheadAttention 108, Linear 51, ConvTranspose1d 48, LSTM 180; "
    "never pruned: position 48, Embedding 30, biases 125, LayerNorm 48"
)


def own(name, **settings):
    """An experiment with a network of one's own."""
    hooks = dict(dataset="own_networks:samples", model=f"own_networks:{name}", partition="given")
    defaults = dict(clients=4, clients_per_round=2, rounds=2, local_epochs=1, batch_size=30, reconfigure_every=1)
    return Experiment(**(hooks | defaults | settings))


def test_what_multiplies_is_pruned_by_name_and_count():
    layout = Layout.of(own_networks.Sequence())
    assert {k: s.numel() for k, s in layout.prunable_shapes.items()} == {k: n for k, (n, _) in SEQUENCE.items()}
    assert (layout.size, layout.prunable_size) == (782, 531)
    cell = nn.Sequential(nn.GRUCell(2, 3), nn.Bilinear(2, 3, 4), nn.Conv3d(1, 2, 1), nn.Embedding(4, 4), nn.PReLU())
    assert models.prunable(cell) == ["0.weight_ih", "0.weight_hh", "1.weight", "2.weight"]
    apart = nn.MultiheadAttention(4, 1, kdim=3, add_bias_kv=True)
    assert models.prunable(nn.Sequential(apart)) == [f"0.{k}_proj_weight" for k in "qkv"] + ["0.out_proj.weight"]


def test_erk_gives_each_of_their_shapes_its_share():
    shapes = Layout.of(own_networks.Sequence()).prunable_shapes
    s = masks.erk_sparsities(shapes, 0.5)
    # Of 122 dimensions `out` has 8, and is kept whole: ε = (265.5 − 15) / 114.
    expected = [0.7405885, 0.5116959, 0.2675439, 0.4506579, 0.3407895, 0.4506579, 0]
    assert list(s.values()) == pytest.approx(expected, abs=1e-7)


def test_a_weight_is_used_once_per_position_and_per_step():
    x = own_networks.samples(None)[0][:1]
    assert uses_of(own_networks.Sequence(), x) == {k: uses for k, (_, uses) in SEQUENCE.items()}


def test_a_run_says_once_what_of_a_network_is_pruned(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("TQDM_DISABLE")
    exp = own("Sequence", sparsity_target=0.8)
    result = run(exp, tmp_path)
    assert capsys.readouterr().out == f"{LINE}\n"
    assert result.metrics["sparsity"].iloc[-1] == pytest.approx(0.8, abs=1 / 531)
    kept = json.loads((records.folder_of(exp, tmp_path) / "provenance.json").read_text("utf-8"))
    assert kept["parameters"] == LINE
    run(exp.replace(rounds=1), progress=False)
    run(Experiment.preset("smoke", method="fedavg", rounds=1, width=0.1, clients=60, clients_per_round=1))
    assert capsys.readouterr().out == ""


def test_prunetrain_refuses_what_has_no_channels_unless_it_is_exempt():
    net = own_networks.Sequence()
    with pytest.raises(
        ValueError, match=r"'prunetrain' is not allowed; .* list the layer of 'attention.in_proj_weight'"
    ):
        Structure.of(net, models.prunable(net))
    net.exempt = ("attention", "attention.out_proj", "up", "lstm")
    assert Structure.of(net, models.prunable(net)).first == ("conv.weight",)


def test_prunetrain_refuses_a_grouped_convolution_unless_it_is_exempt():
    """Channels pass through an exempt one."""
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 8, 1), nn.Flatten())
    with pytest.raises(ValueError, match=r"ungrouped convolutions .* list the layer of '1.weight'"):
        Structure.of(net, models.prunable(net))
    net.exempt = ("1",)
    assert Structure.of(net, models.prunable(net)) == Structure(("0.weight",), ("2.weight",), ())


@pytest.mark.parametrize(("name", "message"), [
    ("half", "'out.weight' is torch.float16; it must be torch.float32"),
    ("double_statistics", "'2.running_mean' is torch.float64; it must be torch.float32"),
    ("complex_numbers", "'1.weight' is torch.complex64; it must be torch.float32"),
    ("lazy", "'1.weight' has no values; give every layer its sizes"),
    ("with_an_argument", r"calling it failed \(TypeError: .*missing 1 required positional argument"),
    ("too_narrow", r"it fails on a sample, torch.float32 of shape \(1, 8, 8\) \(RuntimeError: mat1"),
    ("Pair", "for 2 samples it returns a tuple; it must return one tensor with a row of logits per sample"),
    ("Detached", r"it cannot be trained \(RuntimeError: .*does not require grad"),
])  # fmt: skip
def test_a_network_that_cannot_be_trained_is_refused_by_name(name, message):
    with pytest.raises(ValueError, match=rf"^model: 'own_networks:{name}' is not allowed; .*{message}"):
        assemble(own(name))


def test_a_trial_leaves_the_network_and_the_generator_as_they_were():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    fed = assemble(own("Sequence")).clients
    networks.described(fed)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in fed.net.parameters())


def test_a_module_that_a_function_keeps_is_the_same_before_every_run(monkeypatch):
    kept = own_networks.OutOfOrder()
    monkeypatch.setattr(own_networks, "keeps", lambda: kept, raising=False)
    first = run(own("keeps", rounds=1))
    assert not torch.equal(first.weights["out.weight"], kept.out.weight)
    again = run(own("keeps", rounds=1))
    assert torch.equal(first.weights["out.weight"], again.weights["out.weight"])


def test_a_changed_network_is_told_from_the_old_one():
    """Layers, shapes and even weights may be the same, and what is done with them another thing."""

    def sha(name):
        return networks.described(assemble(own(name)).clients)["network_sha256"]

    hashes = [sha(name) for name in ("OutOfOrder", "Gated", "DataDependent", "two_layers")]
    assert len(set(hashes)) == 4 and sha("OutOfOrder") == hashes[0]
    assert networks.described(assemble(own("OutOfOrder", seed=1)).clients)["network_sha256"] == hashes[0]


def test_a_changed_network_does_not_resume(tmp_path, monkeypatch):
    exp = own("changing")
    monkeypatch.setattr(own_networks, "changing", own_networks.OutOfOrder, raising=False)
    run(exp, tmp_path, until=1)
    monkeypatch.setattr(own_networks, "changing", own_networks.Gated)
    with pytest.raises(
        ValueError, match=r"^model: 'own_networks:changing' is not the network that .* was started with"
    ):
        run(exp, tmp_path)
    monkeypatch.setattr(own_networks, "changing", own_networks.OutOfOrder)
    assert len(run(exp, tmp_path).metrics) == 2
    monkeypatch.setattr(own_networks, "changing", own_networks.Gated)
    with pytest.raises(ValueError, match=r"^model: .* is not the network"):  # nor is a finished run passed off as its
        run(exp, tmp_path)


def test_functions_of_a_cell_train_here_and_are_refused_where_other_processes_need_them(monkeypatch):
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "network", own_networks.OutOfOrder, raising=False)
    monkeypatch.setattr(main, "samples", own_networks.samples, raising=False)
    exp = own("OutOfOrder", model="__main__:network", dataset="__main__:samples", rounds=1)
    assert len(run(exp).metrics) == 1
    with pytest.raises(ValueError, match=r"^model: '__main__:network' is not allowed here; .* name it yours:network"):
        run(exp, workers=2)
    with pytest.raises(ValueError, match=r"^dataset: '__main__:samples' is not allowed here; .* yours:samples"):
        check_importable(exp.replace(model="own_networks:OutOfOrder"))
