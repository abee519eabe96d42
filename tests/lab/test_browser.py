"""JupyterLab and the built site in a real browser: Debian's Chromium, driven by Playwright, on loopback alone.

Screenshots are left in outputs/screenshots. Every wait is for a condition, with a limit for a slow machine.
"""

import json
import os
import re
import secrets
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
import torch

from feddip_core.deploy.source import finished
from feddip_core.engine import final
from feddip_core.engine.records import OWN_RECORDS, folder_of
from feddip_core.lab import classify

ROOT = Path(__file__).parent.parent.parent
SCREENSHOTS = ROOT / "outputs" / "screenshots"
CHROMIUM = "/usr/bin/chromium"
SECONDS = 600  # that anything may take on a machine that is busy with other things
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip

if not Path(CHROMIUM).exists():  # and then Playwright need not be there either
    reason = f"no browser: {CHROMIUM} is missing (apt-get install chromium), so nothing was tested in one"
    if os.environ.get("BROWSER_REQUIRED"):
        raise RuntimeError(reason)
    pytest.skip(reason, allow_module_level=True)

from playwright.sync_api import expect, sync_playwright  # noqa: E402

expect.set_options(timeout=SECONDS * 1000)
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]  # one JupyterLab for them all


@pytest.fixture(scope="module")
def browser():
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=SECONDS * 1000)
        yield browser
        browser.close()


@pytest.fixture
def page(browser, request):
    page = browser.new_page(viewport=dict(width=1400, height=1000))
    page.set_default_timeout(SECONDS * 1000)
    yield page
    page.screenshot(path=SCREENSHOTS / f"{request.node.name}.png")  # of a test that failed as well
    page.close()


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """JupyterLab on copies of the notebooks without their outputs, so that what is seen was made here."""
    home, token = tmp_path_factory.mktemp("lab"), secrets.token_hex(16)
    (home / "notebooks").mkdir()
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            cell |= {"outputs": [], "execution_count": None} if cell.cell_type == "code" else {}
        nbformat.write(notebook, home / "notebooks" / path.name)
    folders = {
        name: str(home / name.lower())
        for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTERLAB_SETTINGS_DIR")
    }
    settings(
        home / "jupyter_config_dir/labconfig/page_config.json",
        disabledExtensions={"@jupyterlab/apputils-extension:announcements": True},
    )
    # Cells outside the window would not be in the page.
    settings(
        home / "jupyterlab_settings_dir/@jupyterlab/notebook-extension/tracker.jupyterlab-settings",
        windowingMode="none",
    )
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0"]
    command += [f"--notebook-dir={home / 'notebooks'}", "--LabApp.expose_app_in_browser=True"]
    with (home / "lab.log").open("wb") as log:
        server = subprocess.Popen(command, env=os.environ | folders | {"JUPYTER_TOKEN": token}, stdout=log, stderr=log)
        try:
            yield (
                until(lambda: address(server, home), "JupyterLab starts")
                + "lab/workspaces/{0}/tree/{0}.ipynb?token="
                + token
            )
        finally:
            server.terminate()
            server.wait(60)


def settings(path, **values):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values), "utf-8")


def address(server, home):
    assert server.poll() is None, (home / "lab.log").read_text("utf-8")
    try:
        return json.loads(next((home / "jupyter_runtime_dir").glob("jpserver-*.json")).read_text("utf-8"))["url"]
    except (StopIteration, ValueError):  # not there yet, or half written
        return None


def until(condition, what):
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.1)
    raise TimeoutError(what)


CELLS = """window.jupyterapp.shell.currentWidget.content.widgets
    .filter(cell => cell.model.type === 'code' && cell.model.sharedModel.getSource())"""
OUTPUTS = f"{CELLS}.flatMap(cell => cell.model.outputs.toJSON())"


def run_all(page, lab, name):
    """Open a notebook, run all its cells by the menu, and see that none ended in an error."""
    page.goto(lab.format(name))  # in a workspace of its own, or what was open before would be opened again
    # 'Run All' before there is a kernel would only open a dialogue.
    page.wait_for_function("""() => {
        const session = window.jupyterapp?.shell.currentWidget?.sessionContext?.session;
        return session?.kernel?.connectionStatus === 'connected' && session.kernel.status === 'idle';
    }""")
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    ended = f"{CELLS}.every(cell => cell.model.executionCount)"
    page.wait_for_function(f"() => {ended} || {OUTPUTS}.some(output => output.output_type === 'error')")
    no_errors(page)


def no_errors(page):
    outputs = page.evaluate(f"() => {OUTPUTS}")
    assert outputs and not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]


def test_the_explorer_is_moved_trained_and_stopped(lab, page):
    page.set_viewport_size(dict(width=1400, height=2300))  # all of it in one picture
    run_all(page, lab, "08_explorer")
    box = page.locator(".widget-vbox").first
    planned = box.get_by_role("status").filter(has_text="the whole run sends")
    picture = box.get_by_role("img", name="the whole run sends")
    target, rounds = box.get_by_role("slider", name="Target sparsity"), box.get_by_role("slider", name="Rounds T")

    box.get_by_role("combobox", name="Method").select_option("FedDIP")
    expect(planned).to_contain_text("FedDIP, 12 rounds")
    expect(planned).to_contain_text("0.900 after the last")
    before = picture.get_attribute("src")
    target.press("ArrowLeft")
    expect(planned).to_contain_text("0.890 after the last")
    expect(picture).not_to_have_attribute("src", before)

    box.get_by_role("combobox", name="Partition").fill("dirichlet(-1)")
    box.get_by_role("combobox", name="Partition").press("Enter")
    expect(box.get_by_role("alert")).to_contain_text("partition: 'dirichlet(-1)' is not allowed; it must be one of")
    page.screenshot(path=SCREENSHOTS / "explorer-mistake.png")
    box.get_by_role("combobox", name="Partition").fill("iid")
    box.get_by_role("combobox", name="Partition").press("Enter")
    expect(box.get_by_role("alert")).to_have_count(0)

    rounds.press("End")
    expect(planned).to_contain_text("FedDIP, 200 rounds")
    progress = box.get_by_role("status").filter(has_text="T 200, seed 0: ")
    box.get_by_role("button", name="Train").press("Enter")
    expect(progress).to_contain_text(re.compile(r"being trained, round \d+ of 200, accuracy"))
    box.get_by_role("button", name="Train").press("Enter")
    expect(box.get_by_role("alert")).to_contain_text("A run is being trained")
    page.screenshot(path=SCREENSHOTS / "explorer-training.png")
    box.get_by_role("button", name="Stop").press("Enter")
    expect(progress).to_contain_text("stopped, round")
    assert int(re.search(r"round (\d+) of 200", progress.text_content())[1]) < 200

    box.get_by_role("combobox", name="Layer").select_option("fc2.weight")
    box.get_by_role("slider", name="After round").press("Home")
    mask = box.get_by_role("status").filter(has_text="fc2.weight")
    expect(mask).to_contain_text("after round 0, ")
    expect(mask).to_contain_text(" 0 regrown")
    box.get_by_role("slider", name="After round").press("End")
    expect(mask).not_to_contain_text("after round 0, ")
    sizes = box.locator(".widget-slider, .widget-dropdown, .widget-text, .widget-combobox").evaluate_all(
        "controls => controls.map(control => [control.offsetWidth, control.offsetHeight])"
    )
    assert len(sizes) == 15 and len({width for width, _ in sizes}) == 1 and max(height for _, height in sizes) < 60
    unnamed = r"^\s*- '?(?:slider|button|combobox|textbox|spinbutton|progressbar|img)(?! \").*"
    assert re.findall(unnamed, box.aria_snapshot(), re.M) == []
    no_errors(page)


def test_the_first_teaching_notebook_runs(lab, page):
    run_all(page, lab, "01_federated_averaging")
    expect(page.locator(".jp-RenderedImage img").first).to_be_visible()
    page.locator(".jp-RenderedImage img").first.scroll_into_view_if_needed()


LOGITS = "m => classifier.images.map(image => Array.from(classifier.networks[m].classify(image)))"


def test_the_network_in_the_page_says_what_pytorch_says(site, page):
    """Of all hundred garments, with every model that is in the page."""
    page.goto((site.parent / "classify.html").as_uri())
    here = {
        s: folder for s, exp in classify.STOPS.items() if (folder := folder_of(exp, OWN_RECORDS) / final.NAME).exists()
    }
    assert page.evaluate("() => classifier.networks.map(network => network.about.stop)") == list(here) != []
    x, y = classify.garments()
    right = []
    for m, path in enumerate(here.values()):
        graph = finished(path.parent).graph.rounded(classify.BITS)
        expected, found = graph(x), torch.tensor(page.evaluate(LOGITS, m))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        assert found.argmax(1).tolist() == expected.argmax(1).tolist()
        right.append((expected.argmax(1) == y).sum().item())
        page.get_by_role("slider", name="How many are zero").fill(str(m))
        expect(page.locator("#score")).to_contain_text(f"This model gets {right[m]} of 100 right.")
        expect(page.locator(".wrong")).to_have_count(100 - right[m])
        expect(page.locator("#multiplications")).to_have_text(f"{sum(graph.multiplications().values()):,}")
    assert min(right) > 50


def test_a_garment_is_picked_and_drawn_by_keyboard_mouse_and_finger(site, browser, page):
    address = (site.parent / "classify.html").as_uri()
    page.goto(address)
    said, slider = page.locator("#said"), page.get_by_role("slider", name="How many are zero")
    first = page.get_by_role("radio", name="Ankle boot 1", exact=True)
    first.focus()
    page.keyboard.press("Home")
    expect(page.get_by_role("radio", checked=True)).to_have_attribute("title", "T-shirt/top")
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("radio", checked=True)).to_have_attribute("title", "Pullover")
    expect(said).to_contain_text(re.compile(r"“.+”, [0-9.]+ % sure\. (Right|Wrong: it is “Pullover”)\."))
    slider.press("Home")
    expect(page.locator("#stop")).to_have_text("none of 61,470")
    expect(page.get_by_role("img", name="fc1: 48,000 of 48,000 weights")).to_be_visible()

    page.get_by_role("button", name="Clear").press("Enter")
    expect(said).to_have_text("Nothing is drawn yet.")
    expect(page.get_by_role("radio", checked=True)).to_have_count(0)
    drawing = page.get_by_role("application", name="Picture of 28 by 28 pixels")
    drawing.press("Space")
    expect(said).to_contain_text("% sure.")
    drawing.press("Delete")
    expect(said).to_have_text("Nothing is drawn yet.")
    drawing.click()
    expect(said).to_contain_text("% sure.")
    page.screenshot(path=SCREENSHOTS / "classify.png", full_page=True)
    unnamed = r"^\s*- '?(?:slider|button|radio|application|img)(?! \"|\w).*"
    assert re.findall(unnamed, page.locator("main").aria_snapshot(), re.M) == []

    phone = browser.new_page(viewport=dict(width=400, height=800), has_touch=True, is_mobile=True)
    phone.goto(address)
    phone.get_by_role("button", name="Clear").tap()
    expect(phone.locator("#said")).to_have_text("Nothing is drawn yet.")
    phone.locator("#drawing").tap()
    expect(phone.locator("#said")).to_contain_text("% sure.")
    assert phone.evaluate("() => document.documentElement.scrollWidth") <= 400
    phone.screenshot(path=SCREENSHOTS / "classify-phone.png", full_page=True)
    phone.close()


def test_every_page_of_the_site_opens_from_disk_and_asks_for_nothing_else(site, page):
    asked, said = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    for path in sorted(site.parent.glob("*.html")):
        page.goto(path.as_uri())
        broken = page.evaluate(
            "() => [...document.images].filter(image => !image.naturalWidth).map(image => image.src)"
        )
        assert broken == []
        assert page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth"), (
            f"{path.stem} is too wide"
        )
        if path.stem in ("index", "08_explorer", "07_methods"):
            page.screenshot(path=SCREENSHOTS / f"site-{path.stem}.png", full_page=True)
    assert said == []
    assert len(asked) > 10 and [url for url in asked if not url.startswith(("file:", "data:"))] == []
