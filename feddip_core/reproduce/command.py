"""Every notebook, run by Papermill without make or a shell: python -m feddip_core.reproduce

Without options it runs all of them on the embedded data, and compares their records with the expected ones. With
--preset and --dataset it renews the result notebooks from the records in outputs/runs, and README's tables.
"""

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..presets import PRESETS, TABLE_II
from ..study import expected, readme

ROOT = Path(__file__).parent.parent.parent
RESULTS = ("11_accuracy", "12_communication", "13_non_iid", "14_layer_sparsity", "15_extreme_sparsity")
AT_THE_PAPERS_SCALE = ("16_paper_vs_code", "20_convergence")
ABOUT_THE_PAPERS_SCALE = ("10_reproduction", "18_beyond_the_paper", "19_league")  # no other data set, no other preset
MOST_SECONDS = 3600  # for one cell that hangs


def parser() -> argparse.ArgumentParser:
    words = argparse.ArgumentParser(prog="python -m feddip_core.reproduce", description=__doc__.splitlines()[0])
    words.add_argument("--preset", choices=[p for p in PRESETS if p != "smoke"], help="the scale of the records")
    words.add_argument("--dataset", nargs="+", choices=list(TABLE_II), default=[], help="the data sets of the records")
    words.add_argument("--notebooks", nargs="+", metavar="NAME", help="only these, such as 30_quickstart")
    words.add_argument("--jobs", type=int, choices=range(1, 17), default=1, metavar="N", help="this many at once")
    return words


def main(words: list[str] | None = None) -> int:
    options = parser().parse_args(words)
    known = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    if unknown := [name for name in options.notebooks or [] if name not in known]:
        parser().error(f"notebooks: {unknown[0]!r} is not allowed; it must be one of {', '.join(known)}")
    if not known:
        parser().error(f"there are no notebooks in {ROOT}; run it in a clone of the repository")
    if bool(options.preset) != bool(options.dataset):
        parser().error("--preset and --dataset belong together")
    if options.preset:
        return _results(options)
    toy = ROOT / "outputs" / "toy"
    names = options.notebooks or known
    failed = _all([(n, toy / "notebooks" / f"{n}.ipynb", {"out": "../outputs/toy"}) for n in names], options.jobs)
    print(f"Executed notebooks are in {toy / 'notebooks'}, figures in {toy / 'figures'}, records in {toy / 'runs'}.")
    expected.main(str(toy / "runs"))
    return failed


def _results(options: argparse.Namespace) -> int:
    """The tables and figures of the paper from the records, and README's tables."""
    at_the_papers = AT_THE_PAPERS_SCALE + ABOUT_THE_PAPERS_SCALE if options.preset == "paper" else ()
    names, folder = options.notebooks or RESULTS + at_the_papers, ROOT / "outputs" / "notebooks"
    tasks = [
        (name, folder / f"{name}-{dataset}-{options.preset}.ipynb",
         {"preset": options.preset, "dataset": dataset, "runs": "../outputs/runs", "out": "../outputs"})
        for dataset in options.dataset for name in names if name not in ABOUT_THE_PAPERS_SCALE
    ]  # fmt: skip
    tasks += [
        (name, folder / f"{name}.ipynb", {"out": "../outputs"}) for name in names if name in ABOUT_THE_PAPERS_SCALE
    ]
    failed = _all(tasks, options.jobs)
    readme.main()
    return failed


def _all(tasks: list[tuple[str, Path, dict[str, str]]], at_once: int) -> int:
    """Run these notebooks; 1 if any fails. A failure is reported, and the others still run."""
    with ThreadPoolExecutor(at_once) as pool:
        return int(any(list(pool.map(_failed, tasks))))


def _failed(task: tuple[str, Path, dict[str, str]]) -> bool:
    name, output, parameters = task
    output.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "papermill", "-k", "python3", "--no-progress-bar", "--log-level", "ERROR"]
    command += ["--cwd", str(ROOT / "notebooks"), "--execution-timeout", str(MOST_SECONDS)]
    command += [word for k, v in parameters.items() for word in ("-p", k, v)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # this very package
    # The profile keeps kernels from warning about loopback, the next variable from warning about frozen modules.
    profile = {"IPYTHONDIR": str(ROOT / "notebooks" / ".ipython"), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    done = subprocess.run(
        [*command, str(ROOT / "notebooks" / f"{name}.ipynb"), str(output)], capture_output=True, encoding="utf-8",
        errors="replace", env=os.environ | profile | {"PYTHONPATH": path, "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    print(f"{output.stem}: failed, see {output}\n{done.stderr[-2000:]}" if done.returncode else f"{output.stem}: done")
    sys.stdout.flush()
    return bool(done.returncode)
