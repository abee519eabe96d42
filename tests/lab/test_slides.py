"""Slides of the course: the cells that were chosen, formulas and figures, nothing cut, no request off the machine."""

import re
import shutil
from pathlib import Path

import nbformat
import pytest

from feddip_core.lab import slides

NOTEBOOKS = sorted((Path(__file__).parent.parent.parent / "notebooks").glob(slides.COURSE))
CHROMIUM = Path("/usr/bin/chromium")


@pytest.fixture(scope="module")
def decks(tmp_path_factory):
    """The decks, without reveal.js itself."""
    folder, built = tmp_path_factory.mktemp("slides"), pytest.MonkeyPatch()
    built.setattr(slides, "reveal", lambda _: None)
    slides.build(NOTEBOOKS, folder)
    built.undo()
    return folder


def kinds(path):
    cells = nbformat.read(path, as_version=4).cells
    return [(cell.metadata.get("slideshow", {}).get("slide_type"), cell) for cell in cells]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_deck_has_the_slides_that_its_cells_ask_for(decks, path):
    page, cells = (decks / f"{path.stem}.html").read_text("utf-8"), kinds(path)
    assert sum(kind == "slide" for kind, _ in cells) == len(re.findall(r"<section\s*><section", page)) > 10
    skipped = [cell.source for kind, cell in cells if kind == "skip"]
    assert "parameters" in str(cells[1][1].metadata) and cells[1][0] == "skip"
    assert skipped and not any(source in page for source in skipped)
    figures = [o for _, cell in cells for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    images = re.findall(r"<img[^>]*>", page)
    assert len(images) == len(figures) and all(re.search(r'alt="[^"]{10,}', image) for image in images)
    assert "<math" in page and "assert " not in page and "<summary>" not in page


@pytest.mark.slow
def test_a_deck_asks_for_nothing_that_is_not_in_its_folder(decks):
    for path in decks.glob("*.html"):
        page = re.sub(r'<a [^>]*href="[^"]*"', "", path.read_text("utf-8"))  # a link is no request
        wanted = re.findall(r'(?:src|href)="([^"]+)"', page)
        local = {"style.css", *(f"reveal.js/{name}" for name in slides.FILES)}
        assert {name for name in wanted if not name.startswith("data:")} <= local, path.name
        assert not re.findall(r"""(?:@import|url\(|import .* from)\s*["']?https?:""", page), path.name


def test_another_file_than_the_one_we_tried_is_refused(tmp_path, monkeypatch):
    def pack(command, cwd, **_):
        Path(cwd, "reveal.tgz").write_bytes(b"something else")

    monkeypatch.setattr(slides.subprocess, "run", pack)
    with pytest.raises(ValueError, match=r"reveal\.js@.*: the registry's file is not the one"):
        slides.reveal(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_in_a_browser_every_slide_is_shown_whole(decks):
    if not shutil.which("npm") or not CHROMIUM.exists():
        pytest.skip("no npm or no Chromium, so no slide was looked at")
    try:
        slides.reveal(decks / "reveal.js")
    except slides.subprocess.CalledProcessError:
        pytest.skip(f"npm could not fetch {slides.PACKAGE}, so no slide was looked at")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--headless", "--no-sandbox"])
        page, asked = browser.new_page(viewport=dict(width=1280, height=720)), []
        page.on("request", lambda request: asked.append(request.url))
        for path in NOTEBOOKS:
            page.goto((decks / f"{path.stem}.html").as_uri())
            page.wait_for_function("window.Reveal && Reveal.isReady()")
            assert page.evaluate(CUT) == [], path.stem
        browser.close()
    assert len(asked) > len(NOTEBOOKS) and all(url.startswith(("file:", "data:")) for url in asked)


# The beginnings of slides of which something is below or beside the screen.
CUT = """() => {
  const cut = [];
  for (let i = 0; i < Reveal.getTotalSlides(); i++) {
    Reveal.slide(i);
    const boxes = [...Reveal.getCurrentSlide().querySelectorAll('*')].map(e => e.getBoundingClientRect());
    if (!boxes.length || boxes.some(box => box.bottom > 720 || box.right > 1280))
      cut.push(i + ': ' + Reveal.getCurrentSlide().textContent.trim().slice(0, 40));
  }
  return cut;
}"""
