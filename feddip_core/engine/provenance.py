"""Where a number comes from: the machine, the versions and the commit that made it."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

from ..experiment import REVISION, Experiment


def provenance(exp: Experiment) -> dict:
    """What a reader needs to trust or doubt a number."""
    return {
        "run_id": exp.run_id,
        "revision": REVISION,
        "method_sha256": exp.source_sha256,
        "differs_from_paper": exp.differences_from_paper(),
        "seed": exp.seed,
        "device": exp.device,
        "threads": exp.threads,
        "cpu": _cpu(),
        "gpu": torch.cuda.get_device_name(exp.device) if exp.device != "cpu" and torch.cuda.is_available() else None,
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": dict(_packages()),
        "commit": _commit(),
        "started": now(),
    }


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@cache
def _packages() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "torchvision", "numpy", "pandas")}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or "unknown"
    return f"{name}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"


def _commit() -> str | None:
    """This code's commit, with a + if files have changed since; None outside a repository."""
    here = Path(__file__).parent

    def git(*words):
        return subprocess.run(
            ["git", *words], cwd=here, capture_output=True, encoding="utf-8", check=True
        ).stdout.strip()

    try:
        # For a package installed inside another project's repository, that project's commit would say nothing.
        if not git("ls-files", Path(__file__).name):
            return None
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
