"""A run that is killed resumes to the same bits, and no file is trusted that it did not write."""

import errno
import json
import multiprocessing
import os
import random
import signal
from pathlib import Path

import numpy as np
import own_networks
import pandas as pd
import pytest
import torch
from helpers import same

from feddip_core import run
from feddip_core.engine import checkpoints, final, records
from feddip_core.engine import run as running
from feddip_core.engine.records import folder_of
from feddip_core.server import Federation

CASES = {
    "fedavg": {},
    "feddip": {},
    "feddip with batch norm": dict(rules="released", model="resnet18", width=0.04),
    "feddip with dropout": dict(model="alexnet", width=0.03, regrowth="dense_memory"),
    "prunefl": {},
    "snip": dict(rules="released"),
    "prunetrain": dict(lambda_max=0.1, prunetrain_threshold=0.02),
    "feddst": dict(rules="released", clients=6),
    "feddip_swap": dict(reconfigure_every=1, swap_every=2, value_bits=16),
    "fedtiny": dict(reconfigure_every=2, adjust_until=4),
    "fedrts": dict(reconfigure_every=2, adjust_until=4),
    "ssfl": {},
    "flash": {},
    "sparsyfed": {},
    "fedmef": dict(reconfigure_every=2, adjust_until=4),
    "feddip with a sparse uplink": dict(sparse_uplink=True),
}


@pytest.mark.parametrize("case", [pytest.param(k, marks=pytest.mark.slow) if " with " in k else k for k in CASES])
def test_a_run_stopped_after_every_round_ends_with_the_same_bits(tiny, tmp_path, case):
    exp = tiny(case.split()[0], **(dict(rounds=4, clients=60) | CASES[case]))
    whole = run(exp)
    for until in (1, 2, 3, 4):
        part = run(exp, out=tmp_path, until=until)
        assert part.metrics["round"].tolist() == list(range(1, until + 1))
    assert same(part, whole)
    assert [r["after_round"] for r in part.provenance["resumed"]] == [1, 2, 3]


def test_an_observer_sees_every_round_of_a_run_that_was_done_before(tiny, tmp_path):
    exp, seen = tiny(rounds=2), []
    first = run(exp, out=tmp_path)
    assert same(run(exp, out=tmp_path, observe=lambda _, state, __: seen.append(state.t)), first)
    assert seen == [1, 2]


def test_a_finished_run_is_not_run_again(tiny, tmp_path, monkeypatch):
    exp = tiny(rounds=2)
    first = run(exp, out=tmp_path)
    monkeypatch.setattr(Federation, "round", lambda *_: pytest.fail("a round was run"))
    again = run(exp, out=tmp_path)
    assert same(first, again)
    pd.testing.assert_frame_equal(first.metrics, again.metrics, check_exact=True)  # the seconds too


def killed_at(moment, exp, out):
    """Run until something happens for the `moment`-th time: a client begins, a file is half or wholly written."""
    torch.set_num_threads(1)
    running.SAVING_SHARE = float("inf")  # every round is saved
    left = moment
    train_client, write = Federation.train_client, Path.write_bytes

    def passes():
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def trained(*args):
        passes()
        return train_client(*args)

    def written(path, content):
        write(path, content[: len(content) // 2])
        passes()
        write(path, content)
        passes()

    Federation.train_client, Path.write_bytes = trained, written
    run(exp, out=out, progress=False)


@pytest.mark.slow
def test_killed_twenty_times_at_random_moments(tiny, tmp_path):
    exp = tiny(rounds=60, width=0.2, clients=60)
    whole = run(exp)  # and whatever is compiled or read only once
    moments, context = random.Random(0), multiprocessing.get_context("fork")
    folder, reached = folder_of(exp, tmp_path), []
    for _ in range(20):
        # A round has eight such moments: two clients, and two in each of its three files.
        process = context.Process(target=killed_at, args=(moments.randint(1, 30), exp, tmp_path))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        if (folder / "metrics.csv").exists():  # whole at any moment
            reached.append(pd.read_csv(folder / "metrics.csv")["round"].iloc[-1])
    assert reached == sorted(reached)
    assert len(set(reached)) > 3  # killed in many different rounds
    assert same(run(exp, out=tmp_path), whole)
    assert not list(folder.glob("*unusable*")) and not list(folder.glob(".*.part"))


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "text"])
def test_what_cannot_be_trusted_is_set_aside_and_named(tiny, tmp_path, damage):
    exp = tiny(rounds=2)
    whole = run(exp)
    run(exp, out=tmp_path, until=1)
    path = folder_of(exp, tmp_path) / checkpoints.NAME
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes({"truncate": content[:-50], "empty": b"", "text": b"not tensors"}.get(damage, content))
    with pytest.warns(UserWarning, match=rf"{path} is unusable .* the run starts over"):
        result = run(exp, out=tmp_path)
    assert same(result, whole)
    assert (path.parent / "checkpoint.unusable-1.safetensors").exists()


def test_a_full_disk_stops_the_run_and_leaves_the_last_good_checkpoint(tiny, tmp_path, monkeypatch):
    exp = tiny(rounds=3)
    whole = run(exp)
    run(exp, out=tmp_path, until=1)
    honest = Path.write_bytes

    def full(self, content):
        honest(self, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"could not be written \(No space left on device\); an earlier file is kept"):
        run(exp, out=tmp_path)
    monkeypatch.undo()
    assert not list(folder_of(exp, tmp_path).glob("*.part"))
    result = run(exp, out=tmp_path)
    assert same(result, whole)


@pytest.mark.parametrize("until", [0, 7, 2.5, -1])
def test_until_must_be_a_round_of_the_experiment(tiny, until):
    with pytest.raises(ValueError, match=r"until: \S+ is not allowed; it must be a whole number from 1 to 6"):
        run(tiny(), until=until)


def test_a_checkpoint_holds_tensors_and_plain_data(tmp_path):
    tensors = {"a": torch.tensor([1.5, float("nan")]), "b": torch.tensor([True, False]), "none": torch.empty(0)}
    checkpoints.save(tmp_path, "key", checkpoints.Checkpoint(tensors, {"rows": [{"loss": float("inf")}]}))
    back = checkpoints.load(tmp_path, "key", torch.device("cpu"))
    assert back.plain == {"rows": [{"loss": float("inf")}]}
    assert all(torch.equal(back.tensors[k].nan_to_num(), v.nan_to_num()) for k, v in tensors.items())


def test_an_observer_that_stops_early_leaves_the_checkpoint_that_went_further(tiny, tmp_path, monkeypatch):
    exp = tiny(rounds=3)
    run(exp, out=tmp_path)
    run(exp, out=tmp_path, until=1, observe=lambda *_: None)
    monkeypatch.setattr(Federation, "round", lambda *_: pytest.fail("a round was run"))
    assert len(run(exp, out=tmp_path).metrics) == 3


def test_what_is_done_cannot_be_stopped_earlier(tiny, tmp_path):
    exp = tiny(rounds=3)
    run(exp, out=tmp_path, until=2)
    with pytest.raises(ValueError, match=r"until: 1 is not allowed; .* is already at round 2"):
        run(exp, out=tmp_path, until=1)


def test_what_a_killed_process_left_half_written_is_swept_up(tiny, tmp_path):
    exp = tiny(rounds=1)
    folder_of(exp, tmp_path).mkdir(parents=True)
    (folder_of(exp, tmp_path) / ".checkpoint.safetensors.1.part").write_text("half", "utf-8")
    run(exp, out=tmp_path)
    assert not list(folder_of(exp, tmp_path).glob(".*.part"))


def test_a_gpu_without_room_does_not_cost_the_checkpoint(tiny, tmp_path, monkeypatch):
    exp = tiny(rounds=2)
    run(exp, out=tmp_path, until=1)
    kept = (folder_of(exp, tmp_path) / checkpoints.NAME).read_bytes()

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "Checkpoint", full)
        with pytest.raises(torch.OutOfMemoryError):
            run(exp, out=tmp_path)
    assert (folder_of(exp, tmp_path) / checkpoints.NAME).read_bytes() == kept
    assert same(run(exp, out=tmp_path), run(exp))


@pytest.mark.parametrize("damage", ["metrics and provenance", "metrics", "a digit"])
@pytest.mark.parametrize("checkpoint", [True, False])
def test_a_record_that_was_lost_is_written_again(tiny, tmp_path, monkeypatch, damage, checkpoint):
    """From the checkpoint, or else by running it again."""
    exp = tiny("fedavg", rounds=2)
    run(exp, out=tmp_path)
    folder = folder_of(exp, tmp_path)
    kept = (folder / "metrics.csv").read_text("utf-8")
    if damage == "a digit":
        first, accuracy = kept.splitlines()[1].split(",")[:2]
        (folder / "metrics.csv").write_text(kept.replace(f"{first},{accuracy},", f"{first},0.99,"), "utf-8")
    else:
        (folder / "metrics.csv").unlink()
    if damage == "metrics and provenance":
        (folder / "provenance.json").unlink()
    if checkpoint:
        monkeypatch.setattr(Federation, "round", lambda *_: pytest.fail("a round was run"))
    else:
        (folder / checkpoints.NAME).unlink()
    assert records.progress(exp, tmp_path) == (0, False)
    run(exp, out=tmp_path)
    again = (folder / "metrics.csv").read_text("utf-8")
    assert without_seconds(again) == without_seconds(kept) and (again == kept or not checkpoint)
    assert records.progress(exp, tmp_path) == (2, True)


def without_seconds(metrics):
    return [line.rpartition(",")[0] for line in metrics.splitlines()]


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".csv", ".json")}


def test_a_whole_record_is_confirmed_by_a_run_that_is_done_again_and_never_written(tiny, tmp_path, monkeypatch):
    exp = tiny(rounds=2)
    first = run(exp, out=tmp_path)
    folder = folder_of(exp, tmp_path)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config.pop("stacked")  # as if it were a setting that is newer than the record
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    kept, model = files(folder), (folder / final.NAME).read_bytes()
    for name in (checkpoints.NAME, final.NAME):
        (folder / name).unlink()
    assert same(run(exp, out=tmp_path), first)
    assert files(folder) == kept and (folder / final.NAME).read_bytes() == model
    (folder / checkpoints.NAME).unlink()  # as in a record that was handed on
    monkeypatch.setattr(Federation, "round", lambda *_: pytest.fail("a round was run"))
    again = run(exp, out=tmp_path)
    assert same(again, first) and again.provenance == first.provenance
    assert files(folder) == kept


def test_a_run_that_differs_from_its_whole_record_says_where(tiny, tmp_path):
    exp = tiny("fedavg", rounds=2)
    run(exp, out=tmp_path)
    folder = folder_of(exp, tmp_path)
    rows = pd.read_csv(folder / "metrics.csv")
    rows.loc[1, "test_loss"] = 9.5
    rows.to_csv(folder / "metrics.csv", index=False)
    kept = json.loads((folder / "provenance.json").read_text("utf-8"))
    kept.pop("metrics_sha256")  # as in a record that is older than the checksum
    (folder / "provenance.json").write_text(json.dumps(kept), "utf-8")
    for name in (checkpoints.NAME, final.NAME):
        (folder / name).unlink()
    before = files(folder)
    with pytest.raises(
        ValueError, match=r"has test_loss 9\.5 in round 2, but here it is .*; choose another folder|move"
    ):
        run(exp, out=tmp_path)
    assert files(folder) == before and not (folder / final.NAME).exists()


class Other(Federation):
    """A federation of one's own, which may do what it likes."""


@pytest.mark.parametrize("lost", ["provenance.json", checkpoints.NAME])
def test_what_belongs_to_other_data_is_refused(tiny, tmp_path, monkeypatch, lost):
    own = dict(dataset="own_networks:samples", model="own_networks:two_layers", partition="given", width=1.0)
    exp = tiny("fedavg", rounds=2, **own)
    run(exp, out=tmp_path, until=1)
    folder, samples = folder_of(exp, tmp_path), own_networks.samples
    (folder / lost).unlink()
    kept = files(folder)
    monkeypatch.setattr(own_networks, "samples", lambda client: (samples(client)[0] + 1, samples(client)[1]))
    both = {
        "provenance.json": rf"belongs to another run or other data \({exp.run_id} 2 \w{{12}} .*, but here it is",
        checkpoints.NAME: r"was made with data_sha256 x_train \w{12}, .*, but here it is x_train \w{12}, ",
    }
    with pytest.raises(records.AnotherRun, match=f"{both[lost]}.* choose another folder"):
        run(exp, out=tmp_path)
    assert files(folder) == kept
    assert len(run(exp, out=tmp_path / "elsewhere").metrics) == 2


@pytest.mark.parametrize("until", [1, 2])
def test_what_another_federation_has_begun_or_done_is_refused(tiny, tmp_path, until):
    exp = tiny("fedavg", rounds=2)
    run(exp, out=tmp_path, until=until, federation=Other)
    kept = files(folder_of(exp, tmp_path))
    with pytest.raises(
        records.AnotherRun, match="made with federation Other, but here it is Federation; choose another"
    ):
        run(exp, out=tmp_path)
    assert files(folder_of(exp, tmp_path)) == kept


def test_the_checkpoint_of_another_run_is_refused(tiny, tmp_path):
    exp, other = tiny(rounds=2), tiny(rounds=2, seed=1)
    for each in (exp, other):
        run(each, out=tmp_path, until=1)
    stray = (folder_of(other, tmp_path) / checkpoints.NAME).read_bytes()
    (folder_of(exp, tmp_path) / checkpoints.NAME).write_bytes(stray)
    with pytest.raises(
        records.AnotherRun, match=rf"belongs to another run .*{other.run_id}.*, but here it is {exp.run_id}"
    ):
        run(exp, out=tmp_path)
    assert (folder_of(exp, tmp_path) / checkpoints.NAME).read_bytes() == stray


class Seen(list):
    def __call__(self, federation, state, done):
        self.append(state.t)


def test_an_observer_may_be_empty_and_a_round_any_whole_number(tiny):
    seen = Seen()
    run(tiny(rounds=3), observe=seen, until=np.int64(2))
    assert seen == [1, 2]
