"""Make a static site of the notebooks and the outputs they carry: python -m feddip_core.lab.gallery [folder]

It opens from disk and loads nothing from the network: formulas become MathML, and pictures are part of the pages.
"""

import re
import shutil
import sys
from base64 import b64decode
from functools import cache
from html import escape
from io import BytesIO
from pathlib import Path

import nbformat
from latex2mathml.converter import convert
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode
from PIL import Image
from pygments.formatters import HtmlFormatter

from ..engine.records import OWN_RECORDS, write
from . import api, classify, film, league
from .contents import told

ROOT = Path(__file__).parent.parent.parent  # of the checkout: an installed package has no notebooks beside it
# The map: the parts by the first digit of their notebooks, which are read in the order of their names.
MAP = {
    "Learn": ("Federated averaging, masks, error feedback and schedules, one idea per notebook.", r"0.*"),
    "Results": ("The paper's tables and figures, and where its code differs from its text.", r"1.*"),
    "Theory": ("What can be proved about it, and what can be measured of that.", r"2.*"),
    "Use": ("Run any experiment, try a method of your own, train on other machines.", r".*"),
}


class Prose(IPythonRenderer):
    """Markdown as nbconvert renders it, but with formulas that a browser can show without a script."""

    def inline_math(self, body):
        return mathml(body, "inline")

    def block_math(self, body):
        return mathml(body, "block")

    def latex_environment(self, name, body):
        return mathml(rf"\begin{{{name}}}{body}\end{{{name}}}", "block")


def mathml(formula: str, display: str) -> str:
    # The converter knows a blackboard letter only in braces, and else draws 𝔼 as E; and a large bracket only by its
    # content, not by name.
    known = re.sub(r"\\mathbb\s*([A-Za-z])", r"\\mathbb{\1}", formula)
    known = re.sub(r"\\[Bb]igg?([lr])(?![a-z])", lambda side: {"l": r"\left", "r": r"\right"}[side[1]], known)
    try:
        drawn = convert(known, display=display)
    except Exception as error:  # of many kinds, and none of them says where
        raise ValueError(f"formula: {formula!r} cannot be shown ({error!r})") from error
    # Not every font has a brace that stretches; a line always does.
    line = r'<munder><mrow style="padding-bottom: .15em; border-bottom: 1px solid">\1</mrow>'
    drawn = re.sub(r"<munder><munder>(.*?)<mo>&#x23DF;</mo></munder>", line, drawn)
    # If the right one of two bars has an exponent, a browser stretches only the left one.
    return re.sub(r"<mo>(&#x02016;|&#x0007C;)</mo>", r'<mo stretchy="false" lspace="0" rspace="0">\1</mo>', drawn)


def prose(source: str) -> str:
    return MarkdownWithMath(renderer=Prose(escape=False, exclude_anchor_links=True)).render(source)


@cache
def exporter() -> HTMLExporter:
    """nbconvert's plainest template, which loads nothing; cached, since preparing it takes longer than using it."""
    plain = HTMLExporter(template_name="basic", exclude_input_prompt=True, exclude_output_prompt=True)
    plain.register_filter("markdown2html", prose)
    return plain


def page_of(notebook: NotebookNode, stems: list[str]) -> str:
    """The cells one after the other; those that are collapsed in JupyterLab are collapsed here."""
    parts = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if formula := output.get("data", {}).pop("text/latex", ""):
                output.data["text/html"] = mathml(formula.strip("$ ").removeprefix(r"\displaystyle"), "block")
        alone = nbformat.v4.new_notebook(cells=[cell], metadata=notebook.metadata)
        part = exporter().from_notebook_node(alone)[0]
        hidden = cell.metadata.get("jupyter", {})
        if hidden.get("source_hidden") or hidden.get("outputs_hidden"):
            part = f"<details><summary>Show the hidden cell</summary>{part}</details>"
        parts.append(part + film.blocks_of(cell))
    linked = re.sub(
        r'<a\s[^>]*?href="([^"]*)"[^>]*>(.*?)</a>', lambda link: _link(link, stems), "".join(parts), flags=re.S
    )
    return film.scripted(linked)


def _link(link: re.Match, stems: list[str]) -> str:
    """Links between notebooks lead to their pages; a link to anything else becomes plain text."""
    target, words = link[1], link[2]
    notebook = re.fullmatch(r"(?:\./)?([\w-]+)\.ipynb(#.*)?", target)
    if notebook and notebook[1] in stems:
        return f'<a href="{notebook[1]}.html{notebook[2] or ""}">{words}</a>'
    return link[0] if re.match(r"https?:|#", target) else words


def checked(path: Path) -> NotebookNode:
    """The notebook, if it was executed from top to bottom."""
    notebook = nbformat.read(path, as_version=4)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code" and cell.source]
    if counts != list(range(1, len(counts) + 1)):
        raise ValueError(f"{path}: not executed from top to bottom; make notebooks does it")
    return notebook


def heading(notebook: NotebookNode) -> tuple[str, str, str]:
    """Title, subtitle and question, from the first cell."""
    said = told(notebook.cells[0].source)
    return said["title"], said["subtitle"], said["question"]


def thumbnail(notebook: NotebookNode) -> bytes | None:
    """Its first figure, small."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if picture := output.get("data", {}).get("image/png"):
                small, file = Image.open(BytesIO(b64decode(picture))).convert("RGB"), BytesIO()
                small.thumbnail((560, 400))
                small.save(file, format="png", optimize=True)
                return file.getvalue()
    return None


def groups(stems: list[str]) -> dict[str, list[str]]:
    """The notebooks of each part of the map."""
    place = {stem: next(name for name, (_, names) in MAP.items() if re.fullmatch(names, stem)) for stem in stems}
    return {name: sorted(stem for stem in stems if place[stem] == name) for name in MAP}


def shell(title: str, body: str, home: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>"
        '<link rel="icon" href="data:,"><link rel="stylesheet" href="style.css"></head>'
        f"<body>{home}<main>{body}</main></body></html>\n"
    )


def card(stem: str, notebook: NotebookNode, pictured: bool) -> str:
    title, subtitle, question = heading(notebook)
    picture = f'<img src="{stem}.png" alt="">' if pictured else ""
    return (
        f'<a class="card" href="{stem}.html">{picture}<h3>{prose(title)[3:-5]}</h3>'
        f'<p class="subtitle">{escape(subtitle)}</p><div>{prose(question)}</div></a>'
    )


def build(notebooks: list[Path], folder: Path, runs: Path = OWN_RECORDS) -> Path:
    """Make the site in this folder, replacing it; return the path of its first page."""
    read = {path.stem: checked(path) for path in notebooks}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    parts = {name: stems for name, stems in groups(list(read)).items() if stems}
    walk = [stem for stems in parts.values() for stem in stems]
    cards = {}
    for i, stem in enumerate(walk):
        small = thumbnail(read[stem])
        if small:
            write(folder / f"{stem}.png", small)
        cards[stem] = card(stem, read[stem], bool(small))
        steps = [(walk[i - 1], "← ")] if i else []
        steps += [(walk[i + 1], "→ ")] if i + 1 < len(walk) else []
        links = " ".join(f'<a href="{to}.html">{sign}{escape(heading(read[to])[0])}</a>' for to, sign in steps)
        home = f'<nav aria-label="Collection"><a href="index.html">All notebooks</a> {links}</nav>'
        write(folder / f"{stem}.html", shell(heading(read[stem])[0], page_of(read[stem], walk), home))
    styles = [Path(__file__).with_name(f"{name}.css").read_text(encoding="utf-8") for name in ("gallery", "classify")]
    write(folder / "style.css", "".join([*styles, HtmlFormatter().get_style_defs(".highlight")]))
    home = '<nav aria-label="Collection"><a href="index.html">All notebooks</a></nav>'
    write(folder / "api.html", shell("API of feddip_core", api.page(), home))
    write(folder / "league.html", shell(league.TITLE, league.page(runs), home))
    write(folder / "classify.html", shell(classify.TITLE, classify.page(runs), home))
    write(folder / "classify.png", classify.thumbnail())
    write(folder / "index.html", shell("FedDIP notebooks", _index(parts, cards), ""))
    return folder / "index.html"


def _index(parts: dict[str, list[str]], cards: dict[str, str]) -> str:
    steps = "".join(f'<li><a href="#{name.lower()}">{name}</a></li>' for name in parts)
    steps += '<li><a href="api.html">API</a></li>'
    sections = "".join(
        f'<section id="{name.lower()}"><h2>{name}</h2><p>{MAP[name][0]}</p>'
        f'<div class="cards">{"".join(cards[stem] for stem in stems)}</div></section>'
        for name, stems in parts.items()
    )
    return (
        "<h1>FedDIP notebooks</h1><p>Federated learning of one sparse network: explained step by step, run, and "
        "compared with the paper (Long et al., ICDM 2023). These pages are the notebooks as they were executed; to "
        "change a setting, open them in JupyterLab with <code>make lab</code>.</p>"
        f'<nav aria-label="Map of the collection"><ol class="map">{steps}</ol></nav>'
        f"{classify.link()}{league.link()}{sections}"
    )


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "outputs" / "site"
    build(sorted((ROOT / "notebooks").glob("*.ipynb")), target)
