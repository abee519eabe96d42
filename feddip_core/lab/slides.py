"""Slides of the course, made by nbconvert for reveal.js: python -m feddip_core.lab.slides [folder]

They open from disk and ask for nothing from the network. What a slide shows is in each cell's metadata: a cell without
a slide type stays on the slide of the cell before it.
"""

import re
import subprocess
import sys
import tarfile
from base64 import b64encode
from hashlib import sha512
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory

from nbconvert import SlidesExporter
from nbformat import NotebookNode
from pygments.formatters import HtmlFormatter

from ..engine.records import write
from .gallery import ROOT, checked, heading, prose

COURSE = "0[1-6]_*.ipynb"
PACKAGE = "reveal.js@6.0.2"
INTEGRITY = "sha512-JYIg5D9aoxoaLeb84O+OvAwsKWdIavVgEDScxtYEXFCT6t6TQrhNtSgogcjdCpdLsWglhJn3zyE3fUOwiH5KEg=="
FILES = ("LICENSE", "dist/reveal.css", "dist/reveal.js", "dist/plugin/notes.js")  # of the package, all that is needed
SIZE = dict(reveal_width="1280", reveal_height="720", reveal_number="c/t")
# nbconvert's own template, without the scripts that it takes from elsewhere: formulas are MathML already.
TEMPLATE = """{% extends 'index.html.j2' %}
{% block header %}<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ nb.metadata.title }}: slides</title><link rel="icon" href="data:,">
<link rel="stylesheet" href="reveal.js/dist/reveal.css"><link rel="stylesheet" href="style.css"></head>{% endblock %}
{% block body_header %}<body><main class="reveal"><div class="slides">{% endblock %}
{% block body_footer %}</div></main></body>{% endblock %}
{% block in_prompt %}{% endblock %}{% block output_prompt %}{% endblock %}{% block output_area_prompt %}{% endblock %}
{% block footer_js %}<script src="reveal.js/dist/reveal.js"></script>
<script src="reveal.js/dist/plugin/notes.js"></script>
<script>Reveal.initialize({width: {{ resources.reveal.width }}, height: {{ resources.reveal.height }}, margin: 0,
center: false, hash: true, transition: "none", slideNumber: "{{ resources.reveal.number }}",
plugins: [RevealNotes]});</script>{% endblock %}"""


def exporter() -> SlidesExporter:
    slides = SlidesExporter(raw_template=TEMPLATE, **SIZE)
    slides.register_filter("markdown2html", prose)
    return slides


def deck(notebook: NotebookNode, slides: SlidesExporter) -> str:
    """The page of one notebook, without hints, assertions, and the code that draws a figure."""
    notebook.metadata["title"] = escape(heading(notebook)[0])
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"<details>.*?</details>", "", cell.source, flags=re.S)
        else:
            cell.source = "\n".join(line for line in cell.source.splitlines() if not line.strip().startswith("assert "))
            drawn = any("image/png" in output.get("data", {}) for output in cell.outputs)
            cell.metadata["transient"] = {"remove_source": drawn}
    return slides.from_notebook_node(notebook)[0]


def reveal(folder: Path) -> None:
    """Of reveal.js as much as is needed, from the npm registry, and only the version that we have tried."""
    if all((folder / name).exists() for name in FILES):
        return
    with TemporaryDirectory() as place:
        subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=place, check=True, capture_output=True)
        (archive,) = Path(place).glob("*.tgz")
        if f"sha512-{b64encode(sha512(archive.read_bytes()).digest()).decode()}" != INTEGRITY:
            raise ValueError(f"{PACKAGE}: the registry's file is not the one that we have tried")
        with tarfile.open(archive) as packed:
            for name in FILES:
                content = packed.extractfile(f"package/{name}").read()
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                write(folder / name, content)


def build(notebooks: list[Path], folder: Path) -> Path:
    """The decks in this folder; the path of the page that lists them."""
    folder.mkdir(parents=True, exist_ok=True)
    reveal(folder / "reveal.js")
    slides, links = exporter(), []
    for path in notebooks:
        notebook = checked(path)
        write(folder / f"{path.stem}.html", deck(notebook, slides))
        links.append(f'<li><a href="{path.stem}.html">{escape(heading(notebook)[0])}</a></li>')
    style = Path(__file__).with_name("slides.css").read_text(encoding="utf-8")
    write(folder / "style.css", style + HtmlFormatter().get_style_defs(".highlight"))
    write(
        folder / "index.html",
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>FedDIP: slides of the course</title>'
        '<link rel="icon" href="data:,"><link rel="stylesheet" href="style.css"></head><body class="decks"><main>'
        f"<h1>FedDIP: slides of the course</h1><ol>{''.join(links)}</ol>"
        "<p>Arrow keys move, O shows all slides, S opens the speaker's view, F fills the screen.</p>"
        "</main></body></html>\n",
    )
    return folder / "index.html"


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "outputs" / "slides"
    print(f"The slides begin at {build(sorted((ROOT / 'notebooks').glob(COURSE)), target)}.")
