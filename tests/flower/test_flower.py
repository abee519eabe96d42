"""FedDIP on Flower: the same bits as in one process, what happens when clients fail, and what travels."""

import contextlib
import json
import math
import os
import ssl
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from grid import LocalGrid, assert_same_bits, kept, metrics, run_on

import feddip_core.lab.hospitals
from feddip_core import METHODS, Experiment, Method, deploy, flower, load_model, run
from feddip_core.engine.assembly import assemble, gradient_name
from feddip_core.engine.records import AnotherRun
from feddip_core.flower import NobodyAnswered, Server, apps, belief
from feddip_core.flower.client import federation_of
from feddip_core.flower.deployment import Deployment, make_certificates

LIMIT = 1200  # seconds, for what hangs; a busy machine may take long
OURS = [name for name in METHODS if ":" not in name]


def slow(test):
    """Starts many processes: one such test after the other."""
    return pytest.mark.slow(pytest.mark.xdist_group("flower")(test))


@pytest.fixture
def few(tiny, few_images):
    """Few clients with few images."""

    def make(method="feddip", **settings):
        defaults = dict(dataset=few_images, model="lenet5", rounds=4, clients=8, clients_per_round=3, batch_size=20)
        return tiny(method, **(defaults | settings))

    return make


@pytest.fixture
def hospitals():
    def make(method="feddip", where="feddip_core.lab.hospitals", **settings):
        defaults = dict(
            dataset=f"{where}:samples", model="feddip_core.lab.hospitals:network", partition="given", clients=3,
            clients_per_round=3, rounds=4, local_epochs=2, batch_size=16, learning_rate=0.05,
        )  # fmt: skip
        return Experiment(method=method, **(defaults | settings))

    return make


@pytest.mark.parametrize("settings", [
    dict(partition="dirichlet(0.5)"),
    dict(model="resnet18", width=0.05, rounds=3, clients_per_round=2, batch_norm="frozen"),
    dict(rounds=2, aggregation="median", clip_norm=0.05),
], ids=["non-IID", "frozen norms", "robust"])  # fmt: skip
def test_other_data_norms_and_averages_give_the_same_bits(few, tmp_path, settings):
    """What each method sends and gives is in test_payloads.py."""
    exp = few(**settings)
    run(exp, tmp_path / "here")
    run_on(LocalGrid(exp.clients), exp, tmp_path / "there")
    assert_same_bits(exp, tmp_path / "here", tmp_path / "there")
    models = [kept(exp, tmp_path / where, "model.safetensors").read_bytes() for where in ("here", "there")]
    assert models[0] == models[1]


@pytest.mark.parametrize("method", ["feddip", "prunefl", "snip", "feddst"])
def test_data_that_clients_bring_give_the_same_bits(hospitals, method):
    exp = hospitals(method, clients=5)
    here, there = run(exp), run_on(LocalGrid(5), exp)
    assert here.metrics.drop(columns="seconds").equals(there.metrics.drop(columns="seconds"))
    assert all(torch.equal(v, there.weights[k]) for k, v in here.weights.items())


def test_a_server_of_others_data_sees_none_of_them_nor_a_client_another_ones(hospitals, monkeypatch):
    seen, quick = [], feddip_core.lab.hospitals.samples

    def samples(client):
        seen.append(client)
        return quick(client)

    monkeypatch.setattr(feddip_core.lab.hospitals, "samples", samples)
    federation_of.cache_clear()
    run_on(LocalGrid(3), hospitals(rounds=1))
    assert seen == [None, 0, 1, 2]  # the server what it tests on, each client its own


# What a round does with clients that fail


def spoil(reply: Message, **changes) -> Message:
    """The reply of a client that lies: other arrays, another loss or number of samples."""
    arrays = {k: v.numpy() for k, v in reply.content["arrays"].items()} | changes.pop("arrays", {})
    content = RecordDict({
        "arrays": ArrayRecord({k: Array(np.asarray(v)) for k, v in arrays.items()}),
        "config": ConfigRecord(),
        "metrics": MetricRecord(dict(reply.content["metrics"]) | changes),
    })  # fmt: skip
    reply.content = content
    return reply


LIES = {
    "a wrong shape": (lambda r: spoil(r, arrays={"w": np.zeros(7, np.float32)}), "7"),
    "twice the precision": (
        lambda r: spoil(r, arrays={"w": r.content["arrays"]["w"].numpy().astype(np.float64)}),
        "64",
    ),
    "half the precision": (lambda r: spoil(r, arrays={"w": r.content["arrays"]["w"].numpy().astype(np.float16)}), "16"),
    "weights of a million": (
        lambda r: spoil(r, arrays={"w": r.content["arrays"]["w"].numpy() * 0 + 1e6}),
        "its model gives a loss that is not finite",
    ),
    "weights of fifty": (
        lambda r: spoil(r, arrays={"w": r.content["arrays"]["w"].numpy() * 0 + 50}),
        "it may be 10 times the others' median",
    ),
    "a loss that single precision cannot hold": (lambda r: spoil(r, loss=1e300), "not finite"),
    "a loss that is none": (lambda r: spoil(r, loss=[1.0, 2.0]), "its loss is"),
    "whole numbers": (lambda r: spoil(r, arrays={"w": np.zeros(r.content["arrays"]["w"].shape, np.int64)}), "int64"),
    "not a number": (lambda r: spoil(r, arrays={"w": r.content["arrays"]["w"].numpy() * np.nan}), "not finite"),
    "an infinite loss": (lambda r: spoil(r, loss=math.inf), "not finite"),
    "a negative number of samples": (lambda r: spoil(r, **{"num-examples": -5}), "-5"),
    "an absurd number of samples": (lambda r: spoil(r, **{"num-examples": 10**15}), "1000000000000000"),
    "a long number of samples": (lambda r: spoil(r, **{"num-examples": [0] * 5_000}), "it claims [0, 0, 0"),
    "half a sample": (lambda r: spoil(r, **{"num-examples": 0.5}), "0.5"),
    "a long name": (lambda r: spoil(r, arrays={"w" * 100_000: np.zeros(3)}), "it holds ['w', 'www"),
    "something else as well": (lambda r: spoil(r, arrays={"x_train": np.zeros(3)}), "x_train"),
    "nothing at all": (lambda r: empty(r), "cannot be read"),
    "an error without a reason": (lambda r: unexplained(r), "Flower says: error 1"),
    "a long story": (lambda r: story(r), "'once upon a time"),
    "bytes that are no array": (lambda r: unreadable(r), "cannot be read"),
}


def empty(reply: Message) -> Message:
    reply.content = RecordDict()
    return reply


def unexplained(reply: Message) -> Message:
    return Message(Error(1), reply_to=reply)


def story(reply: Message) -> Message:
    reply.content["config"] = ConfigRecord({"error": "once upon a time " * 10_000})
    return reply


def unreadable(reply: Message) -> Message:
    whole = reply.content["arrays"]["w"]
    reply.content["arrays"]["w"] = Array(whole.dtype, tuple(whole.shape), whole.stype, b"nonsense")
    return reply


def test_an_answer_that_cannot_be_used_is_left_out_and_its_client_named(few, tmp_path):
    """A client tells the truth in the first round and in the last, and another lie in each between."""
    lies = {str(t): lie for t, (lie, _) in enumerate(LIES.values(), 2)}
    exp = few("fedavg", clients=4, clients_per_round=4, rounds=len(lies) + 2)

    def liar(n, message, reply):
        return lies[message.metadata.group_id](reply) if n == 3 and message.metadata.group_id in lies else reply

    result = run_on(LocalGrid(4, fault=liar), exp, tmp_path)
    faults = result.provenance["faults"]
    assert [(fault["round"], fault["client"]) for fault in faults] == [(int(t), 3) for t in lies]
    for fault, (name, (_, says)) in zip(faults, LIES.items(), strict=True):
        assert says in fault["reason"] and len(fault["reason"]) < 400, f"{name}: {fault['reason']}"
    assert len(result.metrics) == exp.rounds and result.metrics["test_loss"].notna().all()


@pytest.mark.parametrize("claim", [0, 10**6 + 1, 141], ids=["none", "more than allowed", "another than before"])
def test_a_hospital_cannot_claim_what_samples_it_likes(hospitals, claim):
    """The server does not know how many it has: there is a limit, and the first claim counts."""

    def lie(n, message, reply):
        return spoil(reply, **{"num-examples": claim}) if (n, message.metadata.group_id) == (2, "2") else reply

    result = run_on(LocalGrid(3, fault=lie), hospitals(rounds=3))
    assert [(f["round"], f["client"]) for f in result.provenance["faults"]] == [(2, 2)]
    assert f"it claims {claim} samples" in result.provenance["faults"][0]["reason"]


@pytest.mark.parametrize("answer, says", [
    ({"g": np.zeros(1_000, np.float32)}, "shape"), ({"g": np.zeros(15_738, np.float32) * np.nan}, "not finite"),
    ({"h": np.zeros(3)}, "'h'"), (None, "no answer"),
], ids=["a wrong shape", "not a number", "another name", "silence"])  # fmt: skip
def test_a_question_that_one_client_answers_wrongly_is_answered_by_the_others(few, answer, says):
    def lie(n, message, reply):
        if message.metadata.message_type != "query.ask" or n != first:
            return reply
        if answer is not None:
            reply.content["arrays"] = ArrayRecord({k: Array(v) for k, v in answer.items()})
        return reply if answer is not None else None

    exp = few("snip", rounds=1)
    first = assemble(exp).select(0)[0]
    result = run_on(LocalGrid(8, fault=lie), exp, answer_within=0.5)
    (fault,) = result.provenance["faults"]
    assert (fault["round"], fault["client"]) == (0, first) and says in fault["reason"]
    assert result.metrics["sparsity"].iloc[-1] == pytest.approx(0.9, abs=1e-4)


def test_a_reply_that_flower_cannot_read_is_one_clients_fault(few):
    class Garbled(LocalGrid):
        def pull_messages(self, message_ids):
            for reply in super().pull_messages(message_ids):
                if reply.metadata.src_node_id == 101 and reply.metadata.group_id == "2":
                    json.loads("no JSON")
                yield reply

    result = run_on(Garbled(3), few("fedavg", clients=3, clients_per_round=3, rounds=3))
    assert [(f["round"], f["client"]) for f in result.provenance["faults"]] == [(2, 1)]


def test_negative_variances_and_statistics_that_are_far_off_are_rejected(hospitals):
    def lie(n, message, reply):
        if message.metadata.group_id != "2" or n == 0:
            return reply
        return spoil(reply, arrays={"statistics": np.float32([-100, 1e6])[n - 1] + 0 * statistics(reply)})

    result = run_on(LocalGrid(3, fault=lie), hospitals(model="test_hospitals:with_norms", rounds=3))
    negative, far = result.provenance["faults"]
    assert negative["client"] == 1 and "statistics hold a negative variance, -100 in " in negative["reason"]
    assert far["client"] == 2 and "its step in statistics is " in far["reason"]
    assert result.diverged is None and result.metrics["test_loss"].notna().all()


def statistics(reply: Message) -> np.ndarray:
    return reply.content["arrays"]["statistics"].numpy()


def test_when_all_clients_diverge_the_run_has_diverged_as_in_one_process(few, tmp_path):
    exp = few("feddip", clients=3, clients_per_round=2, rounds=3, learning_rate=1e30)
    here, there = run(exp, tmp_path / "here"), run_on(LocalGrid(3), exp, tmp_path / "there")
    assert here.diverged == there.diverged == 1
    pd.testing.assert_frame_equal(metrics(exp, tmp_path / "here"), metrics(exp, tmp_path / "there"), check_exact=True)
    again = run_on(LocalGrid(3), exp, tmp_path / "there")
    assert again.diverged == 1 and "faults" not in again.provenance


def test_one_client_that_diverges_ends_no_run(few, tmp_path):
    """If it is the only one that is asked, the run stops, and resumes from its last good round."""
    exp = few("fedavg", clients=3, clients_per_round=1, rounds=3)
    broken = lambda n, message, reply: spoil(reply, loss=math.nan) if message.metadata.group_id == "2" else reply  # noqa: E731
    with pytest.raises(
        NobodyAnswered, match=r"round 2: nobody .* \(client \d: loss holds a number that is not finite\)"
    ):
        run_on(LocalGrid(3, fault=broken), exp, tmp_path / "there")
    run_on(LocalGrid(3), exp, tmp_path / "there")
    run(exp, tmp_path / "here")
    assert_same_bits(exp, tmp_path / "here", tmp_path / "there")


@pytest.mark.parametrize("settings", [dict(rounds=3), dict(rounds=8, evaluate_every=8)], ids=["always", "seldom"])
def test_a_round_that_cannot_be_evaluated_is_refused_and_the_last_good_one_stays(few, tmp_path, monkeypatch, settings):
    """Whatever got past the checks, and whether or not the round is to be tested."""
    exp = few("fedavg", clients=3, clients_per_round=2, **settings)
    broken = lambda n, message, reply: spoil(reply, loss=math.inf) if message.metadata.group_id == "3" else reply  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(belief, "check_finite", lambda tensors: None)
        with pytest.raises(RuntimeError, match="round 3: the loss is not finite; the round is discarded"):
            run_on(LocalGrid(3, fault=broken), exp, tmp_path)
    assert len(metrics(exp, tmp_path)) == 2
    assert run_on(LocalGrid(3), exp, tmp_path).diverged is None


def test_steps_that_are_too_long_by_hand():
    def steps(*lengths, sent=1.0):
        return {n: {"w": (length, sent)} for n, length in enumerate(lengths)}

    assert belief.too_far(steps(3, 4, 30)) == {}  # ten times the smaller of the others' two
    assert belief.too_far(steps(3, 4, 31)).keys() == {2}
    assert belief.too_far(steps(3, 1e9, 1e12)).keys() == {1, 2}  # two that shout do not cover each other
    assert belief.too_far(steps(0, 0, 9)) == {}  # those who stand still have nobody rejected
    assert belief.too_far(steps(10)) == {} and belief.too_far(steps(11)).keys() == {0}  # alone, by what was sent
    assert belief.too_far(steps(11, sent=2.0)) == {} and belief.too_far(steps(11), longest=20) == {}
    sent = {"w": torch.tensor([3.0, 4.0])}
    assert belief.lengths({"w": torch.tensor([3.0, 16.0]), "g2": torch.ones(2)}, sent) == {"w": (12.0, 5.0)}


def test_clients_as_one_computation_are_refused(few):
    with pytest.raises(ValueError, match="stacked: True is not allowed"):
        run_on(LocalGrid(8), few(stacked=True))


def test_messages_of_before_a_restart_are_kept(few, tmp_path):
    exp = few("feddip", rounds=4)
    run_on(LocalGrid(8), exp, tmp_path, until=2)
    run_on(LocalGrid(8), exp, tmp_path)
    sent = pd.read_csv(kept(exp, tmp_path, "messages.csv")).query("kind == 'train'")
    assert sent.groupby("round").size().to_dict() == {1: 3, 2: 3, 3: 3, 4: 3}


def test_a_round_without_a_client_averages_the_others(few):
    """Of three equal clients two are left: each counts for a half, as if the third had never been chosen."""
    exp = few("fedavg", clients=3, clients_per_round=3, rounds=1)
    absent = LocalGrid(
        3, fault=lambda n, message, reply: None if n == 1 and "train" in message.metadata.message_type else reply
    )
    got = run_on(absent, exp, answer_within=0.2)
    fed = assemble(exp)
    uploads = [fed.train_client(fed.start(), n).values["w"].double() for n in (0, 2)]
    expected = ((uploads[0] + uploads[1]) / 2).float()
    assert torch.equal(fed.clients.layout.flat(got.weights), expected)
    assert got.provenance["faults"] == [{"round": 1, "client": 1, "reason": "no answer within 0.2 s"}]


def test_a_client_that_was_away_takes_part_again(few):
    away = lambda n, message, reply: None if n == 1 and message.metadata.group_id == "2" else reply  # noqa: E731
    exp = few("feddip", clients=3, clients_per_round=3, rounds=4)
    result = run_on(LocalGrid(3, fault=away), exp, answer_within=0.3)
    assert [(f["round"], f["client"]) for f in result.provenance["faults"]] == [(2, 1)]


def test_a_node_that_was_started_anew_is_sent_the_mask_again(few, tmp_path):
    exp = few("feddip", clients=3, clients_per_round=3, rounds=4, reconfigure_every=4)
    grid = LocalGrid(3)

    def forgetful(n, message, reply):
        grid.contexts[100 + n].state = RecordDict()
        return reply

    grid.fault = forgetful
    run_on(grid, exp, tmp_path / "there")
    run(exp, tmp_path / "here")
    assert_same_bits(exp, tmp_path / "here", tmp_path / "there")
    refused = [m for m in grid.answered if "error" in m.content.config_records.get("config", {})]
    assert {m.content["config"]["error"] for m in refused} == {"MaskMissing"}


def test_a_node_in_the_place_of_another_is_taken_when_that_one_is_gone(few):
    grid, dead = LocalGrid(3), []

    def die(n, message, reply):
        node = message.metadata.dst_node_id
        if node == 101 and message.metadata.group_id == "2":
            dead.append(node)
            # Its successor is there while Flower still believes in the old node.
            grid.contexts[200] = grid.context(200, 1)
        return None if node in dead else reply

    grid.fault = die
    result = run_on(grid, few("fedavg", clients=3, clients_per_round=3, rounds=4), answer_within=0.3)
    assert [(f["round"], f["client"]) for f in result.provenance["faults"]] == [(2, 1)]
    trained = [(m.metadata.dst_node_id, m.metadata.group_id) for m in grid.sent if m.metadata.message_type == "train"]
    assert [t for node, t in trained if node == 200] == ["3", "4"]


@pytest.mark.parametrize("number", [1, 7, -1, "two", None], ids=str)
def test_a_node_with_a_number_that_is_not_its_own_is_refused(few, caplog, number):
    grid = LocalGrid(3)
    grid.contexts[200] = grid.context(200, number)
    run_on(grid, few("fedavg", clients=3, clients_per_round=2, rounds=2))
    assert "node 200 is refused" in caplog.text
    assert not any(m.metadata.dst_node_id == 200 and m.metadata.message_type == "train" for m in grid.sent)


def test_without_a_single_answer_the_run_stops_and_resumes_later(few, tmp_path):
    exp = few("feddip", clients=3, clients_per_round=2, rounds=4)
    deaf = LocalGrid(3, fault=lambda n, message, reply: None if message.metadata.group_id == "3" else reply)
    with pytest.raises(NobodyAnswered, match=r"round 3: nobody .* client \d: no answer within 0\.2 s"):
        run_on(deaf, exp, tmp_path / "there", answer_within=0.2, patience=0.2)
    run_on(LocalGrid(3), exp, tmp_path / "there")
    run(exp, tmp_path / "here")
    assert_same_bits(exp, tmp_path / "here", tmp_path / "there")


def test_a_record_at_the_server_has_a_model_and_is_neither_trained_again_nor_destroyed(hospitals, tmp_path):
    exp = hospitals(rounds=2)
    result = run_on(LocalGrid(3), exp, tmp_path)
    folder = kept(exp, tmp_path, "")
    model = load_model(folder).state_dict()
    assert all(torch.equal(v, model[k]) for k, v in result.weights.items())
    about, graph = deploy.load(folder / "model" / "model.safetensors")  # the export, written at the server
    assert about["run_id"] == exp.run_id and all(torch.equal(v.half().float(), graph.tensors[k]) for k, v in
                                                 result.weights.items() if v.ndim > 1)  # fmt: skip
    elsewhere = deploy.export(folder, tmp_path / "elsewhere")
    files = [{path.name: path.read_bytes() for path in each.iterdir()} for each in (folder / "model", elsewhere)]
    assert files[0] == files[1] and {"model.c", "model.js", "README.md"} < files[0].keys()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(AnotherRun, match="choose another folder"):  # in one process, with everybody's data
        run(exp, tmp_path)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_missing_clients_are_named_before_the_first_round(few):
    with pytest.raises(NobodyAnswered, match=r"clients 5, 6, 7 are not connected after 0\.2 s"):
        run_on(LocalGrid(5), few(), patience=0.2)


def test_what_goes_wrong_at_a_client_stays_there(hospitals, monkeypatch, caplog):
    quick = feddip_core.lab.hospitals.samples

    def samples(client):
        if client == 1:
            raise OSError("/secret/patients.csv: no such file, last seen with Mr Smith")
        return quick(client)

    monkeypatch.setattr(feddip_core.lab.hospitals, "samples", samples)
    federation_of.cache_clear()
    grid = LocalGrid(3)
    result = run_on(grid, hospitals(rounds=1))
    assert result.provenance["faults"] == [{"round": 1, "client": 1, "reason": "'DataError'"}]
    assert "Mr Smith" in caplog.text  # in the client's own log
    assert not any(b"Smith" in everything(m) for m in grid.answered)


def everything(message: Message) -> bytes:
    """All bytes of a message as it travels."""
    return b"".join(part.deflate() for part in get_all_nested_objects(message).values())


# What travels


FRAMING = 4_000  # bytes of a message that are no payload: names, shapes, headers, the settings


@pytest.mark.parametrize("method", ["fedavg", "feddip", "snip"])
def test_the_bytes_on_the_network_are_those_of_the_accounting_and_a_little_framing(few, tmp_path, method):
    """Of every method, what Flower carries is the payload exactly: test_payloads.py."""
    exp = few(method, width=1.0, clients=6, clients_per_round=2, rounds=6)
    result = run_on(LocalGrid(6), exp, tmp_path)
    sent = pd.read_csv(kept(exp, tmp_path, "messages.csv")).query("kind == 'train'").groupby("round").sum()
    for way, column in (("down_bytes", "downlink_bits"), ("up_bytes", "uplink_bits")):
        billed = result.metrics.set_index("round")[column] / 8
        extra = sent[way] - billed
        assert (extra > 0).all() and (extra < exp.clients_per_round * FRAMING).all(), extra.tolist()
    # A sparse model is not sent as zeros: at nine tenths it takes a fifth of a dense one, mask included.
    if method != "fedavg":
        assert sent["down_bytes"].iloc[-1] < 0.2 * 2 * 4 * 61_706


# Flower's own runtimes


@slow
def test_the_simulation_gives_the_same_bits(few, tmp_path):
    exp = few(clients=6, clients_per_round=3, rounds=3)
    limits = dict(patience=LIMIT, answer_within=LIMIT)
    flower.simulate(exp, tmp_path / "there", progress=False, observe=check_that_ray_asks_for_a_token, **limits)
    run(exp, tmp_path / "here")
    assert_same_bits(exp, tmp_path / "here", tmp_path / "there")


@slow
def test_on_a_busy_machine_ray_is_started_again(monkeypatch):
    import ray

    errors = [Exception("The current node timed out during startup. This could …"), None, Exception("no room")]
    started = []

    def init(**options):
        started.append(options)
        if error := errors.pop(0):
            raise error

    monkeypatch.setattr(ray, "is_initialized", lambda: len(started) == 2)
    monkeypatch.setattr(ray, "init", init)
    apps.start_ray(num_cpus=2)
    assert len(started) == 2 and started[1]["num_cpus"] == 2
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(Exception, match="no room"):
        apps.start_ray()
    errors[:] = [Exception("timed out during startup")] * 3
    with pytest.raises(Exception, match="timed out"):
        apps.start_ray(attempts=3)
    assert errors == []


def check_that_ray_asks_for_a_token(*_):
    from ray._raylet import AuthenticationMode, get_authentication_mode, validate_authentication_token

    assert get_authentication_mode() == AuthenticationMode.TOKEN
    assert validate_authentication_token(f"Bearer {os.environ['RAY_AUTH_TOKEN']}")
    assert not validate_authentication_token(f"Bearer {'0' * 64}")


@slow
def test_a_deployment_gives_the_same_bits_and_survives_kills(few, hospitals, tmp_path, monkeypatch):
    """One deployment for three runs: starting it takes longer than they do."""
    monkeypatch.setenv("FEDDIP_SLOW", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.syspath_prepend(Path(__file__).parent)
    with Deployment(tmp_path / "flower", clients=3) as deployment:
        began = time.monotonic()
        check_bits_over_tls(deployment, few(clients=3, clients_per_round=2, rounds=3), tmp_path)
        enough = time.monotonic() - began  # for an answer, on this machine: three rounds of them took as long
        check_that_a_failure_is_explained(deployment, few(clients=4, clients_per_round=2), tmp_path)
        check_a_killed_superlink(deployment, hospitals(rounds=4, clients_per_round=2), tmp_path)
        # More rounds than there is time for: it ends with the deployment.
        check_a_killed_supernode(deployment, hospitals(where="slow_hospitals", rounds=1000), tmp_path, enough)


def check_bits_over_tls(deployment, exp, folder):
    deployment.run(exp, folder / "there", within=LIMIT)
    run(exp, folder / "here")
    assert_same_bits(exp, folder / "here", folder / "there")
    link = (folder / "flower" / "superlink.log").read_text("utf-8")
    assert "https" in link.lower() or "ssl" in link.lower()


def check_that_a_failure_is_explained(deployment, exp, folder):
    """By the traceback of the server: of four clients there are three."""
    number = deployment.submit(exp, folder, patience=1.0)
    with pytest.raises(RuntimeError, match=r"(?s)Traceback .*NobodyAnswered: clients .*3 are not connected after 1 s"):
        wait_for(lambda: deployment.ended(number))


def check_a_killed_superlink(deployment, exp, folder):
    """Training resumes from the last checkpoint."""
    number = deployment.submit(exp, folder / "there", patience=30.0)

    def begun():
        nonlocal number
        done = trained(folder / "there", exp)
        try:
            if not done:
                deployment.ended(number)
        except RuntimeError:  # a late answer to the failed run before can cost a node its next message
            number = deployment.submit(exp, folder / "there", patience=30.0)
        return done >= 2

    wait_for(begun)
    deployment.kill_link()  # while the server is about to save the second round, or the third is under way
    done = trained(folder / "there", exp)
    assert done < 4
    deployment.start_link()
    deployment.run(exp, folder / "there", within=LIMIT)
    run(exp, folder / "here")
    pd.testing.assert_frame_equal(metrics(exp, folder / "here"), metrics(exp, folder / "there"), check_exact=True)
    (resumed,) = json.loads((kept(exp, folder / "there", "provenance.json")).read_text("utf-8"))["resumed"]
    assert done - 1 <= resumed["after_round"] <= done  # nothing is lost but the round under way


def check_a_killed_supernode(deployment, exp, folder, enough):
    """A round continues without it, and it may come back."""
    (folder / "slow-1").touch()
    deployment.submit(exp, folder, answer_within=enough)
    wait_for(lambda: (folder / "busy-1").exists())
    deployment.kill_node(1)  # in the middle of its first round
    wait_for(lambda: rounds_of(folder, exp) >= 1)
    (folder / "slow-1").unlink()
    deployment.start_node(1)
    wait_for(lambda: uploaded(folder, exp, 1))  # it has come back
    faults = json.loads((kept(exp, folder, "provenance.json")).read_text("utf-8"))["faults"]
    assert next(f["round"] for f in faults if f["client"] == 1) == 1
    assert uploaded(folder, exp, 0) and uploaded(folder, exp, 2)


def wait_for(condition) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def trained(out: Path, exp: Experiment) -> int:
    """The last round whose clients have answered: their messages are on file before the server continues."""
    file = kept(exp, out, "messages.csv")
    return int(pd.read_csv(file)["round"].max()) if file.exists() else 0


def uploaded(out: Path, exp: Experiment, n: int) -> bool:
    """Whether client n has answered in some round."""
    sent = pd.read_csv(kept(exp, out, "messages.csv")).query("kind == 'train'")
    return bool((sent.query(f"client == {n}")["up_bytes"] > 0).any())


def rounds_of(out: Path, exp: Experiment) -> int:
    try:
        return json.loads((kept(exp, out, "provenance.json")).read_text("utf-8"))["rounds_done"]
    except (OSError, ValueError):
        return 0


# `flwr run`


def test_the_run_configuration_names_an_experiment():
    config = dict(preset="smoke", method="feddst", dataset="", settings="{rounds: 4, clients: 3, clients_per_round: 2}")
    exp = flower.configured(config)
    assert (exp.method, exp.rounds, exp.clients) == ("feddst", 4, 3)
    small = exp.replace(weight_decay=1e-5)  # in YAML's first version, this is a word
    whole = dict(preset="", method="", dataset="", settings=json.dumps(small.changed()))
    assert flower.configured(whole) == small
    assert flower.configured(config | {"settings": "{weight_decay: 1e-5}"}).weight_decay == 1e-5
    own = flower.configured(config | {"method": "unusual_methods:Drift", "settings": "{lean: 0.3, rounds: 2}"})
    assert (own.method, own.lean, own.rounds) == ("unusual_methods:Drift", 0.3, 2)
    with pytest.raises(ValueError, match="settings: 'rounds' is not allowed"):
        flower.configured(config | {"settings": "rounds"})
    with pytest.raises(ValueError, match="rounds"):
        flower.configured(config | {"settings": "{rounds: 0}"})


def test_all_that_an_experiment_is_travels(few):
    for method in OURS:
        exp = few(method, seed=5, partition="shards")
        server = assemble(exp, federation=partial(Server, grid=LocalGrid(8)))
        again = Experiment(**json.loads(server.settings))
        # Which gradient it is, is the server's to say: a client that chose by itself would give other bits.
        assert again.to_dict() == exp.to_dict() | {"gradient": gradient_name(server)}


def test_a_method_that_other_processes_cannot_import_is_refused_before_anything_starts(few, monkeypatch):
    class Inside(Method):
        """In a function, where no other process finds it."""

    for refused in (few(Inside), few()):
        with pytest.raises(ValueError, match=r"method: '.*Inside' is not allowed here; .* name it yours:Inside"):
            flower.simulate(refused, method=Inside)
    assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()
    with pytest.raises(ValueError, match="is not allowed here"):
        run(few(Inside), federation=partial(Server, grid=LocalGrid(8)))
    METHODS.pop(f"{__name__}:{Inside.__qualname__}")


def test_the_certificate_is_for_its_hosts_and_signed_by_its_authority(tmp_path):
    authority, certificate, key = make_certificates(tmp_path, hosts=["127.0.0.1", "server.example.org"], days=3)
    assert key.stat().st_mode & 0o077 == 0
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=authority)
    server.load_cert_chain(certificate, key)
    for host in ("127.0.0.1", "server.example.org"):
        shake_hands(server, client, host)
    with pytest.raises(ssl.SSLCertVerificationError, match=r"other\.example\.org"):
        shake_hands(server, client, "other.example.org")


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> None:
    """TLS in memory: each side reads what the other has written until both are content."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [client.wrap_bio(down, up, server_hostname=host), server.wrap_bio(up, down, server_side=True)]
    for side in sides * 3:
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
