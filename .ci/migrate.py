"""Bring records of version 0.1 into the present form: python .ci/migrate.py FROM TO

FROM holds folders named by an old run_id. Each gets its new name, settings and id; the old id stays in its provenance.
Metrics are copied digit by digit, but for the bits that were counted otherwise than they are sent: every record is
counted anew from the payloads, and what changed is named in its provenance. A difference without a reason is an error.
"""

import csv
import io
import json
import shutil
import sys
from pathlib import Path

import torch

from feddip_core import Experiment
from feddip_core.engine import records, sources
from feddip_core.engine.assembly import assemble
from feddip_core.engine.measure import bits
from feddip_core.experiment import settings_of
from feddip_core.state import State

BASELINES = ("prunefl", "snip", "prunetrain", "feddst")
SWITCHES = ("initial_mask", "regrowth", "reconfigure_at", "lambda_schedule")
COLUMNS = {f"{way}link_mebibits_authors": f"{way}link_mebibits_released" for way in ("down", "up")}
REASONS = {
    ("prunefl", "downlink_bits"): "the first model goes to the K clients of the first round, with its mask, not to all "
    "N and then to K again; a client that first takes part later is sent the mask then",
    ("prunefl", "uplink_bits"): "a squared gradient for each prunable weight travels in every round, since the server "
    "sums them up, not once for each client that took part since the last mask",
    ("dense_memory", "downlink_bits"): "the dense weights that the server remembers are sent",
}


def settings_now(old: dict) -> dict:
    """The settings of an old config.json in today's words, without those that the method does not read."""
    new = dict(old) | {"adjust_alpha": old.get("feddst_alpha", 0.5)}
    released = new.pop("variant", "original") == "authors"
    new = {k: {"authors": "released", "authors20": "released"}.get(v, v) if isinstance(v, str) else v
           for k, v in new.items()}  # fmt: skip
    if new["method"] in BASELINES:
        new["rules"] = "released" if released else "paper"
    elif all(new.get(k) == "released" for k in SWITCHES):
        new["rules"] = "released"
    return {k: v for k, v in new.items() if k in settings_of(new["method"], new["rules"])}


def counted(exp: Experiment, rows: list[dict], data: dict) -> list[dict[str, int]]:
    """The bits of every round, from the sizes of the masks that the record names."""
    if exp.dataset not in data:
        data[exp.dataset] = sources.of(exp)
    federation = assemble(exp.replace(gradient="eager"), data[exp.dataset])
    layout, state, out = federation.clients.layout, federation.start(sketch=True), []
    for row in rows:
        chosen = federation.select(state.t)
        out.append(bits(federation, state, chosen))
        zeros = list(map(int, row["layer_zeros"].split()))
        m = {k: (torch.arange(shape.numel()) >= z).view(shape)
             for (k, shape), z in zip(layout.prunable_shapes.items(), zeros, strict=True)}  # fmt: skip
        changed = int(row["regrown"]) + int(row["dropped"]) > 0
        held = tuple(state.mask_version if n in chosen else v for n, v in enumerate(state.held))
        dense = not any(zeros)
        m = None if dense else m
        state = State(state.t + 1, state.w, m, state.statistics, state.mask_version + changed, held)
    return out


def migrate(old: Path, out: Path, data: dict) -> Path:
    exp = Experiment(**settings_now(json.loads((old / "config.json").read_text("utf-8"))))
    provenance = json.loads((old / "provenance.json").read_text("utf-8"))
    table = list(csv.reader(io.StringIO((old / "metrics.csv").read_text("utf-8"))))
    head, lines = [COLUMNS.get(k, k) for k in table[0]], table[1:]
    rows = [dict(zip(head, line, strict=True)) for line in lines]
    corrections = {}
    for t, (row, new) in enumerate(zip(rows, counted(exp, rows, data), strict=True)):
        for column, value in new.items():
            if int(row[column]) != value:
                kind = "dense_memory" if getattr(exp, "regrowth", "") == "dense_memory" else exp.method
                if (kind, column) not in REASONS:
                    raise ValueError(f"{old}: round {t + 1} has {row[column]} {column}, counted now {value}")
                corrections.setdefault(column, {"rounds": 0, "why": REASONS[kind, column]})["rounds"] += 1
                row[column] = str(value)
    folder = out / records.folder_name(exp)
    folder.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([head, *([row[k] for k in head] for row in rows)])
    records.write(folder / "metrics.csv", text.getvalue())
    records.write(folder / "config.json", records._json(exp.to_dict()))
    was = {"run_id": provenance["run_id"], "version": "0.1"}
    provenance |= {"run_id": exp.run_id, "method_sha256": None, "differs_from_paper": exp.differences_from_paper()}
    provenance |= {"migrated_from": was} | ({"corrections": corrections} if corrections else {})
    records.write(folder / "provenance.json", records._json(provenance))
    for other in old.iterdir():
        if other.suffix == ".csv" and other.name != "metrics.csv":
            shutil.copy(other, folder / other.name)
    return folder


def main(source: str, target: str) -> None:
    out, data = Path(target), {}
    for config in sorted(Path(source).glob("*/config.json")):
        provenance = config.with_name("provenance.json")
        settings = json.loads(config.read_text("utf-8"))
        if settings["dataset"] == "fashion_mini" or not provenance.exists():
            continue  # toys are not kept, and a run without a first round has no record
        kept = json.loads(provenance.read_text("utf-8"))
        if kept["rounds_done"] < settings["rounds"] and kept["diverged"] is None:
            continue  # still under way
        new = records.folder_of(Experiment(**settings_now(settings)), out)
        if not new.exists():
            print(migrate(config.parent, out, data), flush=True)
    records.write_index(out / "index.csv", records.lines(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
