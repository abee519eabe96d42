"""Which notebooks `python -m feddip_core.reproduce` runs, with which parameters, and what it says of one that fails."""

import subprocess
from pathlib import Path

import pytest

from feddip_core.reproduce import command

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def asked(monkeypatch):
    """What would be run, without running it; the notebook on Flower fails, and README is left alone."""
    calls = []

    def run(words, **how):
        calls.append(words)
        failed = Path(words[-2]).stem == "33_flower"
        return subprocess.CompletedProcess(words, int(failed), "", "the network is down" if failed else "")

    monkeypatch.setattr(command.subprocess, "run", run)
    monkeypatch.setattr(command.readme, "main", lambda: calls.append("README"))
    monkeypatch.setattr(command.expected, "main", lambda folder: calls.append(Path(folder)))
    return calls


def parameters(words):
    return {words[i + 1]: words[i + 2] for i, word in enumerate(words) if word == "-p"}


def test_every_notebook_is_run_also_after_one_that_fails(asked, capsys):
    assert command.main([]) == 1
    *calls, compared = asked
    everything = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert [Path(words[-2]) for words in calls] == everything
    assert [Path(words[-1]) for words in calls] == [ROOT / "outputs/toy/notebooks" / path.name for path in everything]
    assert all(parameters(words) == {"out": "../outputs/toy"} for words in calls)
    assert compared == ROOT / "outputs/toy/runs"
    said = capsys.readouterr().out
    assert "33_flower: failed, see" in said and "the network is down" in said and "07_methods: done" in said


def test_the_results_come_from_the_records(asked):
    assert command.main(["--preset", "narrow", "--dataset", "cifar10", "cifar100"]) == 0
    *calls, last = asked
    assert last == "README" and len(calls) == 10
    assert parameters(calls[5]) == dict(
        preset="narrow", dataset="cifar100", runs="../outputs/runs", out="../outputs"
    )  # fmt: skip
    assert Path(calls[5][-1]).name == "11_accuracy-cifar100-narrow.ipynb"
    asked.clear()
    assert command.main(["--preset", "paper", "--dataset", "fashion_mnist", "--notebooks", "20_convergence"]) == 0
    assert [Path(words[-2]).stem for words in asked[:-1]] == ["20_convergence"]
    asked.clear()
    assert command.main(["--preset", "paper", "--dataset", "fashion_mnist"]) == 0
    once = [words for words in asked[:-1] if Path(words[-2]).stem in command.ABOUT_THE_PAPERS_SCALE]
    assert len(once) == 3 and all(parameters(words) == {"out": "../outputs"} for words in once)


@pytest.mark.parametrize(("words", "message"), [
    (["--notebooks", "none"], "notebooks: 'none' is not allowed; it must be one of 00_start_here"),
    (["--preset", "paper"], "--preset and --dataset belong together"),
    (["--jobs", "0"], "invalid choice: 0"),
])  # fmt: skip
def test_what_cannot_be_meant_is_refused(asked, capsys, words, message):
    with pytest.raises(SystemExit, match="2"):
        command.main(words)
    assert message in capsys.readouterr().err and not asked
