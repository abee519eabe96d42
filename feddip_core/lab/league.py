"""The page of the gallery with the league's table: a click on a column's name sorts it. Nothing is loaded."""

from html import escape
from pathlib import Path

import pandas as pd

from ..study import standings
from ..study.league import ENTRANTS, TARGETS

TITLE = "The league of federated pruning"
COLUMNS = ("method", "accuracy", "std", "n", "MB down", "MB up", "TFLOP", "kept", "against FedDIP", "front", "ranked",
           "settings", "values")  # fmt: skip
SCRIPT = """
document.querySelectorAll("table.sortable").forEach(table => {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, i) => head.firstChild.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") !== "descending", sign = down ? -1 : 1;
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = row => row.cells[i].dataset.value ?? row.cells[i].textContent;
    const empty = v => v === "" || v === "–";
    [...body.rows].sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (empty(x) || empty(y)) return empty(x) - empty(y);
      return sign * (isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y);
    }).forEach(row => body.append(row));
  }));
});
"""


def page(runs: str | Path) -> str:
    """One table per target; missing runs show as missing, and stay last however the table is sorted."""
    table = standings.standings(runs)
    parts = [f"<h1>{TITLE}</h1><p>Fashion-MNIST, LeNet-5, 1,000 rounds, IID. "
             '<a href="19_league.html">The league</a> has the protocol and what the columns mean.</p>']  # fmt: skip
    for target in TARGETS:
        own = table[table["target"].isin([0.0, target])].sort_values("accuracy", ascending=False, na_position="last")
        heads = "".join(f'<th scope="col"><button>{escape(name)}</button></th>' for name in COLUMNS)
        rows = "".join(f"<tr>{''.join(_cell(name, row) for name in COLUMNS)}</tr>" for _, row in own.iterrows())
        parts.append(
            f'<h2>{target:.0%} zeros</h2><div class="wide"><table class="sortable"><thead><tr>{heads}</tr></thead>'
            f"<tbody>{rows}</tbody></table></div>"
        )
    return f"{''.join(parts)}<script>{SCRIPT}</script>"


def _cell(name: str, row: pd.Series) -> str:
    if name == "method":
        return f'<th scope="row">{escape(standings.named(row["entrant"]))}</th>'
    value = row[name]
    if isinstance(value, str):
        return f"<td>{escape(value)}</td>"
    if name in ("ranked", "front"):
        return f'<td data-value="{int(value)}">{"●" if value else ""}</td>'
    if pd.isna(value):
        return "<td>–</td>"
    places = {"n": 0, "kept": 0, "MB down": 1, "MB up": 1, "TFLOP": 1}.get(name, 2)
    return f'<td data-value="{float(value)}">{value:,.{places}f}</td>'


def link() -> str:
    """The link from the first page to this one."""
    words = f"Accuracy, bytes and work of {len(ENTRANTS)} methods under one protocol. Sort it by what matters to you."
    return f'<a class="try" href="league.html"><span><b>{TITLE}</b>{words}</span></a>'
