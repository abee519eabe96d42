"""What Flower carries is what is counted, byte for byte, and it gives the same bits as one process: every method."""

from pathlib import Path

import pytest
import torch
from flwr.app import RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from grid import LocalGrid, assert_same_bits, kept, run_on

from feddip_core import METHODS, Experiment, run
from feddip_core.communication import Payload
from feddip_core.engine.assembly import assemble
from feddip_core.experiment import settings_of
from feddip_core.flower import NobodyAnswered, Server
from feddip_core.flower.messages import ASK
from feddip_core.methods.asking import Asking

OURS = [name for name in METHODS if ":" not in name]
NORMS = dict(model="resnet18", width=0.05, rounds=5)


def variants():
    """Every method under the paper's rules, the released ones, and each single switch."""
    for name in OURS:
        cls = METHODS[name]
        yield dict(method=name)
        for switch, (_, values) in cls.switches.items():
            yield from (dict(method=name) | {switch: value} for value in list(values)[1:])
        if cls.switches or cls.released:
            yield dict(method=name, rules="released")
    for rules in ("paper", "released"):
        yield dict(method="feddip", rules=rules, sparse_uplink=True)
    yield dict(method="fedtiny", adjust_gradients="dense")
    yield from (dict(method=name, value_bits=16) for name in ("fedavg", "feddip_swap", "fedrts", "sparsyfed"))
    yield dict(method="feddip", regrowth="dense_memory", value_bits=16) | NORMS
    yield from (dict(method="feddip", batch_norm=mode) | NORMS for mode in ("average", "local"))
    yield dict(method="feddst", rules="released", batch_norm="local") | NORMS  # two things that are the client's own


@pytest.fixture(autouse=True)
def only_ours():
    """Methods of one's own are forgotten after a test."""
    yield
    for name in [name for name in METHODS if ":" in name]:
        del METHODS[name]


@pytest.fixture
def small(few_images):
    """Four clients of 60 images, two per round, a new mask every second round."""

    def make(method="feddip", **settings):
        known = settings_of(method, settings.get("rules", "paper"))
        own = dict(
            reconfigure_every=2,
            sparsity_initial=0.5,
            sparsity_target=0.9,
            prunetrain_threshold=0.08,
            lambda_max=0.1,
            swap_every=2,
            adjust_until=6,
        )
        common = dict(
            dataset=few_images, model="lenet5", width=0.25, clients=4, clients_per_round=2, rounds=6, local_epochs=1,
            batch_size=30, learning_rate=0.1,
        )  # fmt: skip
        return Experiment(method=method, **(common | {k: v for k, v in own.items() if k in known} | settings))

    return make


class Watched:
    """A run on Flower with the states of its rounds, and the clients and uploads of each."""

    def __init__(self, exp, monkeypatch, out=None, fault=None, grid=None, **options):
        self.rounds, collect = [], Server.collect

        def watched(server, state, chosen):
            replies = collect(server, state, chosen)
            self.rounds.append((state, replies))
            self.method, self.layout = server.method, server.clients.layout
            return replies

        with monkeypatch.context() as patch:
            patch.setattr(Server, "collect", watched)
            self.grid = grid or LocalGrid(exp.clients, fault=fault)
            self.run = run_on(self.grid, exp, out, answer_within=0.3, **options)

    def messages(self, t, n, kind="train"):
        """What went to client n in round t, and what came back."""
        here = [(m.metadata.group_id, m.metadata.message_type) for m in self.grid.sent]
        down = [m for m, of in zip(self.grid.sent, here, strict=True) if of == (str(t), kind)]
        up = [m for m in self.grid.answered if (m.metadata.group_id, m.metadata.message_type) == (str(t), kind)]
        down = [m for m in down if m.metadata.dst_node_id == 100 + n]
        return down, [m for m in up if m.metadata.src_node_id == 100 + n]


def carried(message):
    """The bytes of each array of a message, framing aside."""
    return {k: v.numpy().nbytes for k, v in message.content["arrays"].items()}


def counted(payload: Payload, layout):
    """The bits of each part of a payload, but for those that have none."""
    bits = {k: form.bits_each * form.count(layout, payload.kept) for k, form in payload.parts.items()}
    return {k: v for k, v in bits.items() if v}


def asked_bytes(watched):
    """The bytes of all questions, and of the answers to them."""
    clients = range(watched.method.exp.clients)
    asked = [watched.messages(0, n, ASK) for n in clients]
    return {
        way: sum(sum(carried(m).values()) for both in asked for m in both[i]) for i, way in enumerate(("down", "up"))
    }


def check_bytes(watched):
    """Every message of every round holds its payload, and all of them what the metrics say."""
    method, layout = watched.method, watched.layout
    for (state, replies), row in zip(watched.rounds, watched.run.metrics.to_dict("records"), strict=True):
        total, padding = {"down": 0, "up": 0}, {"down": 0, "up": 0}
        if state.t == 0 and isinstance(method, Asking):  # what was asked before counts with the first round
            total = asked_bytes(watched)
            padding = {way: -bits % 8 for way, bits in zip(total, method.bits_before(), strict=True)}
        for n in replies.clients:
            sent = dict(zip(("down", "up"), watched.messages(state.t + 1, n), strict=True))
            for way, payload in (("down", method.download(state, n)), ("up", method.upload(state, n))):
                (message,) = sent[way]
                bits = counted(payload, layout)
                assert carried(message) == {k: -(-v // 8) for k, v in bits.items()}
                total[way] += sum(carried(message).values())
                padding[way] += sum(-v % 8 for v in bits.values())
        assert 8 * total["down"] == row["downlink_bits"] + padding["down"]
        assert 8 * total["up"] == row["uplink_bits"] + padding["up"]


def check_answers(watched, exp):
    """What a client says beside its payload tells nothing of its data."""
    fed = assemble(exp).clients
    images = [fed.data.x_train[part[0]].numpy().tobytes() for part in fed.parts]
    labels = [fed.data.y_train[part].numpy().tobytes() for part in fed.parts]
    plain = {"query.who": {"config": {"client"}}, "query.ask": {}, "train": {"metrics": {"loss", "num-examples"}}}
    for message in watched.grid.answered:
        names = {record: set(values) for record, values in message.content.items() if len(values)}
        names.pop("arrays", None)
        assert names == plain[message.metadata.message_type]
        raw = b"".join(part.deflate() for part in get_all_nested_objects(message).values())
        assert not any(
            secret in raw for secret in [*images, *labels, exp.dataset.encode(), Path(exp.dataset).stem.encode()]
        )
    for message in (m for m in watched.grid.answered if m.metadata.message_type == "query.ask"):
        (question,) = watched.method.questions.values()
        assert carried(message) == {k: -(-v // 8) for k, v in counted(Payload(question), watched.layout).items()}


@pytest.mark.slow  # all together: every method trains twice
@pytest.mark.parametrize(
    "settings", [*variants()], ids=lambda s: "-".join(str(v) for k, v in s.items() if k not in NORMS)
)
def test_flower_carries_what_is_counted_and_gives_the_same_bits(small, tmp_path, monkeypatch, settings):
    exp = small(**settings)
    watched = Watched(exp, monkeypatch, tmp_path / "there")
    assert watched.run.provenance.get("faults", []) == []
    check_bytes(watched)
    check_answers(watched, exp)
    run(exp, tmp_path / "here")
    assert_same_bits(exp, tmp_path / "here", tmp_path / "there")
    if settings["method"] not in ("fedavg", "fedprox", "snip", "ssfl", "sparsyfed", "flash"):
        assert watched.rounds[-1][0].mask_version > 1
    if settings == dict(method="feddip"):  # the cases that matter: a mask sent, and one that the node holds
        sent = [set(carried(m)) for m in watched.grid.sent if m.metadata.message_type == "train"]
        assert {"w", "mask"} in sent and {"w"} in sent


# What a client keeps for itself


FEDDST = dict(method="feddst", rules="released")


def own_masks_sent(watched):
    """How often a node was sent a mask of its own."""
    return sum("own/mask" in m.content.array_records.get("arrays", {}) for m in watched.grid.sent)


def errors(watched):
    return [m.content["config"]["error"] for m in watched.grid.answered if "error" in m.content.get("config", {})]


def check_uploads(watched, exp):
    """The server understands every upload as its client means it."""
    fed = assemble(exp)
    for state, replies in watched.rounds:
        for n, upload in zip(replies.clients, replies.uploads, strict=True):
            meant = fed.train_client(state, n)
            assert upload.values.keys() == meant.values.keys() and upload.own.keys() == meant.own.keys()
            assert all(torch.equal(v, upload.values[k]) for k, v in meant.values.items())
            assert all(torch.equal(v, upload.own[k]) for k, v in meant.own.items())


@pytest.mark.parametrize("settings", [FEDDST, dict(method="unusual_methods:Drift", lean=0.2)], ids=["feddst", "own"])
def test_a_node_that_lost_what_it_kept_is_sent_it_again(small, tmp_path, monkeypatch, settings):
    exp = small(**settings)
    grid = LocalGrid(exp.clients)

    def forgetful(n, message, reply):
        grid.contexts[100 + n].state = RecordDict()
        return reply

    grid.fault = forgetful
    watched = Watched(exp, monkeypatch, tmp_path / "there", grid=grid)
    run(exp, tmp_path / "here")
    assert_same_bits(exp, tmp_path / "here", tmp_path / "there")
    assert set(errors(watched)) == {"MaskMissing"}
    if settings == FEDDST:
        assert own_masks_sent(watched) > 0


def test_no_own_mask_is_sent_back_without_a_fault(small, monkeypatch):
    watched = Watched(small(**FEDDST), monkeypatch)
    assert own_masks_sent(watched) == 0 and errors(watched) == []
    assert any("own/mask" in carried(m) for m in watched.grid.answered if m.metadata.message_type == "train")


def test_an_own_mask_that_the_server_never_saw_does_not_count(small, monkeypatch):
    """The answers of the first readjusting round get lost; their clients have other masks than the server knows."""
    exp = small(**FEDDST, clients_per_round=3, rounds=5)
    first = assemble(exp).select(1)[0]
    lost = lambda n, message, reply: None if message.metadata.group_id == "2" and n != first else reply  # noqa: E731
    watched = Watched(exp, monkeypatch, fault=lost)
    assert {f["round"] for f in watched.run.provenance["faults"]} == {2}
    check_uploads(watched, exp)


def test_a_server_that_was_started_anew_sends_the_own_masks_that_it_knows(small, tmp_path, monkeypatch):
    exp = small(**FEDDST)
    Watched(exp, monkeypatch, tmp_path / "there", until=3)
    watched = Watched(exp, monkeypatch, tmp_path / "there")
    assert own_masks_sent(watched) > 0 and errors(watched) == []
    run(exp, tmp_path / "here")
    assert_same_bits(exp, tmp_path / "here", tmp_path / "there")


# Methods of one's own


@pytest.mark.parametrize("settings", [
    dict(method="unusual_methods:Drift", lean=0.2),
    dict(method="unusual_methods:NothingLeft"),
    dict(method="unusual_methods:NothingLeft", model="unusual_methods:without_biases", width=1),
    dict(method="unusual_methods:NothingGone"),
], ids=["memory and own", "all pruned", "all pruned, no biases", "none pruned"])  # fmt: skip
def test_a_method_of_ones_own_sends_what_it_says(small, tmp_path, monkeypatch, settings):
    exp = small(**settings)
    watched = Watched(exp, monkeypatch, tmp_path / "there")
    check_bytes(watched)
    run(exp, tmp_path / "here")
    assert_same_bits(exp, tmp_path / "here", tmp_path / "there")
    assert kept(exp, tmp_path / "there", "messages.csv").exists()


def test_what_is_kept_must_be_named_in_the_upload(small, monkeypatch, caplog):
    with pytest.raises(NobodyAnswered, match="'ValueError'"):
        Watched(small("unusual_methods:Secretive"), monkeypatch)
    assert "upload: unusual_methods:Secretive must name 'own/drift' among its parts" in caplog.text
