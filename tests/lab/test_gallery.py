"""The static site: every notebook, all its figures, no request off the machine; in a browser in test_browser.py."""

import json
import re
from base64 import b64decode
from functools import cache
from pathlib import Path

import nbformat
import pytest

import feddip_core
from feddip_core import METHODS, run
from feddip_core.experiment import COMMON
from feddip_core.lab import classify, gallery, tidy

NOTEBOOKS = sorted((Path(__file__).parent.parent.parent / "notebooks").glob("*.ipynb"))


@cache
def pages(site):
    return {path.stem: path.read_text("utf-8") for path in site.parent.glob("*.html")}


@pytest.mark.slow
def test_every_notebook_has_a_page_a_card_and_a_thumbnail(site):
    stems = {path.stem for path in NOTEBOOKS}
    assert set(pages(site)) == stems | {"index", "api", "classify", "league"}
    index = site.read_text("utf-8")
    for stem in stems:
        assert index.count(f'href="{stem}.html"') == 1
        assert f'<img src="{stem}.png"' in index
        assert (site.parent / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
    assert index.index("<h2>Learn") < index.index("<h2>Results") < index.index("<h2>Use")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_every_figure_is_there_with_its_words(site, path):
    cells = nbformat.read(path, as_version=4).cells
    figures = [o for cell in cells for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    images = re.findall(r"<img[^>]*>", pages(site)[path.stem], re.S)
    assert len(images) >= len(figures) > 0
    assert all(re.search(r'alt="[^"]{10,}', image) for image in images)
    assert all('src="data:image/' in image for image in images)


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere_and_every_link_leads_somewhere(site):
    for stem, page in pages(site).items():
        scripted = stem in ("classify", "league", "03_error_feedback", "04_schedules", "08_explorer")
        assert ("<script" in page) == scripted, stem
        assert not re.findall(r"""(?:src|@import|url)\s*[=(]\s*["']?(?:https?:)?//""", page), stem
        for target in re.findall(r'(?:href|src)="([^"#]+)[^"]*"', page):
            if not target.startswith(("data:", "https://", "http://")):
                assert (site.parent / target).exists(), f"{stem}: {target}"


@pytest.mark.slow
def test_the_api_page_has_every_public_name_and_every_setting(site):
    page = pages(site)["api"]
    public = [name for name in feddip_core.__all__ if callable(getattr(feddip_core, name))]
    assert all(f'<section id="{name}">' in page for name in public)
    for method in METHODS.values():
        assert all(f"<code>{setting}</code>" in page for setting in (*COMMON, *method.settings))
    row = re.search(r"<tr><th[^>]*><code>batch_size</code>.*?</tr>", page)[0]
    assert re.findall(r"<td>(.*?)</td>", row) == [
        "64 / 128 / 128", "a whole number of at least 1, below 2**63", "B, samples per local step",
    ]  # fmt: skip
    assert "run(experiment, out=None, *, method=None" in page


@pytest.mark.slow
def test_formulas_are_mathml_and_none_is_left_over(site):
    everything = pages(site)
    assert sum(page.count("<math") for page in everything.values()) > 50
    for stem, page in everything.items():
        for formula in re.findall(r"<math.*?</math>", page, re.S):
            assert not re.search(r"\\[a-zA-Z]+", formula), f"{stem}: {formula}"
        prose = re.sub(
            r"<script.*?</script>|<pre.*?</pre>|<code.*?</code>|<math.*?</math>|<img[^>]*>", "", page, flags=re.S
        )
        assert "$" not in prose, f"{stem}: {prose[max(0, prose.find('$') - 80) : prose.find('$') + 80]}"


def test_formulas_look_right_whatever_the_font():
    drawn = gallery.mathml(r"\mathbb E\lVert\omega'_z\rVert^2", "inline")
    assert "&#x1D53C;" in drawn and "double-struck" not in drawn
    assert drawn.count("&#x02016;") == drawn.count('<mo stretchy="false" lspace="0" rspace="0">&#x02016;</mo>') == 2
    braced = gallery.mathml(r"\underbrace{a_1}_{b} + \underbrace{c}_{d}", "inline")
    assert braced.count("border-bottom") == braced.count("<munder>") == 2
    assert gallery.mathml(r"\Bigl(x\Bigr)^3", "block") == gallery.mathml(r"\left(x\right)^3", "block")


def test_links_between_notebooks_lead_to_pages_and_others_keep_their_words(tmp_path):
    cells = [
        nbformat.v4.new_markdown_cell("# A\n*b*\n\n[one](b.ipynb#x), [two](../README.md), [three](https://a.org/)")
    ]
    for name in "ab":
        nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / f"{name}.ipynb")
    gallery.build([tmp_path / "a.ipynb", tmp_path / "b.ipynb"], tmp_path / "site")
    page = (tmp_path / "site" / "a.html").read_text("utf-8")
    assert '<a href="b.html#x">one</a>, two, <a href="https://a.org/">three</a>' in page


def test_what_is_collapsed_stays_collapsed(tmp_path):
    hint = nbformat.v4.new_code_cell("secret = 1", execution_count=1, metadata={"jupyter": {"source_hidden": True}})
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# A"), hint])
    page = gallery.page_of(notebook, [])
    assert re.search(r"<details><summary>[^<]+</summary>.*secret.*</details>", page, re.S)


def test_a_notebook_that_was_not_executed_is_refused_by_name(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# A"), nbformat.v4.new_code_cell("1")])
    nbformat.write(notebook, tmp_path / "a.ipynb")
    with pytest.raises(ValueError, match=r"a\.ipynb: not executed"):
        gallery.build([tmp_path / "a.ipynb"], tmp_path / "site")


def test_a_formula_that_cannot_be_shown_is_named():
    with pytest.raises(ValueError, match="formula: "):
        gallery.prose(r"$\left( x$")


def test_a_tidied_notebook_has_its_results_and_nothing_that_changes(tmp_path):
    view = "application/vnd.jupyter.widget-view+json"
    shown = nbformat.v4.new_output("display_data", {"image/png": "AA==", view: {"model_id": "1"}, "text/plain": "x"})
    cut = [nbformat.v4.new_output("stream", name="stdout", text=part) for part in ("one ", "line\n")]
    extra = {"execution": {"at": "now"}, "tags": ["kept"]}
    cell = nbformat.v4.new_code_cell("1", outputs=[shown, *cut], metadata=extra)
    notebook = nbformat.v4.new_notebook(
        cells=[cell], metadata={"language_info": {"name": "python", "version": "3.11.7"}}
    )
    nbformat.write(notebook, tmp_path / "a.ipynb")
    tidy.tidy(tmp_path / "a.ipynb")
    notebook = nbformat.read(tmp_path / "a.ipynb", as_version=4)
    assert notebook.metadata["language_info"] == {"name": "python"}
    (cell,) = notebook.cells
    assert cell.metadata == {"tags": ["kept"]}
    assert sorted(cell.outputs[0].data) == ["image/png", "text/plain"]
    assert [output.text for output in cell.outputs[1:]] == ["one line\n"]


def test_the_page_that_classifies_has_the_models_that_are_there_and_names_the_others(tiny, tmp_path):
    dense, pruned = tiny("fedavg", rounds=1), tiny(rounds=1)
    run(dense, tmp_path)
    page = classify.page(tmp_path, {0.0: dense, 0.9: pruned})
    (model,) = json.loads(re.search(r'id="models">(.*?)</script>', page)[1])
    assert model["stop"] == 0.0 and model["run_id"] == dense.run_id and len(model["classes"]) == 10
    assert model["bytes"] == sum(len(b64decode(part)) for part in model["parts"].values())
    assert '<p id="missing" >Not here yet, since their runs have not left a model: 90 % zeros.</p>' in page
    assert '<p id="missing" hidden></p>' in classify.page(tmp_path, {0.0: dense})
    pixels = json.loads(re.search(r'id="pictures">(.*?)</script>', page)[1])
    assert len(b64decode(pixels["pixels"])) == 100 * 28 * 28
    assert pixels["labels"] == [c for c in range(10) for _ in range(10)]
