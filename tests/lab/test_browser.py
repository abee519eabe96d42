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
from feddip_core.lab.exercises import rounds_until_return
from feddip_core.schedules import lambda_at, sparsity_at

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
    # A save in the middle of a test can take the focus away from what is about to be pressed.
    settings(
        home / "jupyterlab_settings_dir/@jupyterlab/docmanager-extension/plugin.jupyterlab-settings",
        autosave=False,
    )
    # Cells outside the window would not be in the page.
    settings(
        home / "jupyterlab_settings_dir/@jupyterlab/notebook-extension/tracker.jupyterlab-settings",
        windowingMode="none",
    )
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0"]
    command += [f"--notebook-dir={home / 'notebooks'}", "--LabApp.expose_app_in_browser=True"]
    folders["JUPYTER_CONFIG_PATH"] = str(ROOT / "notebooks" / ".jupyter")  # as `make lab` does
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


def press(locator, key, seen, *args, patience=20):
    """Press a key until the page shows what it does: `seen`, a method of `expect`, holds for these arguments.

    JupyterLab may move the focus between the two halves of a press, which is then lost. Only for keys that do no harm
    when they are pressed twice.
    """
    end = time.monotonic() + SECONDS
    while True:
        locator.press(key)
        try:
            return seen(*args, timeout=patience * 1000)
        except AssertionError:
            if time.monotonic() > end:
                raise


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


@pytest.fixture(scope="module")
def explored(lab, browser):
    """The explorer in JupyterLab, in a window of 1280 × 800, after its notebook has run."""
    page = browser.new_page(viewport=dict(width=1280, height=800))
    page.set_default_timeout(SECONDS * 1000)
    run_all(page, lab, "08_explorer")
    box = page.locator(".explorer").first
    box.scroll_into_view_if_needed()
    yield Explored(page, box)
    page.close()


class Explored:
    """Its parts, by the names that a screen reader has for them."""

    def __init__(self, page, box):
        self.page, self.box = page, box
        self.film = box.frame_locator("iframe[title^='Film of']")
        self.planned = box.get_by_role("status").filter(has_text="the whole run sends")

    def button(self, name):
        return self.box.get_by_role("button", name=name, exact=True)

    def slider(self, name):
        return self.box.get_by_role("slider", name=name)

    def snap(self, name):
        self.box.evaluate("box => box.scrollIntoView()")
        self.page.screenshot(path=SCREENSHOTS / f"explorer-{name}.png")

    def show(self, view):
        press(self.button(view), "Enter", expect(self.button(view)).to_have_attribute, "aria-pressed", "true")

    def preset(self, name):
        press(self.button(name), "Enter", expect(self.planned).to_contain_text, re.compile(PRESETS[name]))

    def train(self, preset):
        self.preset(preset)
        progress = self.box.get_by_role("status").filter(has_text=f"{preset}: ")
        press(self.button("Train"), "Enter", expect(progress).to_be_visible, patience=60)
        expect(progress).to_contain_text(f"{preset}: done")


PRESETS = {
    "The paper": r"40 rounds.*0\.900 after the last.*7\.55 MB up",
    "Prune too fast": r"10 rounds.*0\.980 after the last",
    "Never reconfigure": r"40 rounds.*0\.500 after the last",
    "Kill the network": r"40 rounds.*penalty up to 0\.285",
    "Sparse both ways": r"40 rounds.*2\.92 MB up",
}  # and what the plan then says


def test_the_explorer_opens_alive_and_needs_no_scrolling(explored):
    box, page = explored.box, explored.page
    expect(explored.planned).to_contain_text("FedDIP, 12 rounds")
    expect(box.get_by_role("combobox", name="Method")).to_have_value("FedDIP")
    assert box.get_by_role("slider", disabled=True).count() == 0
    window = page.locator(".jp-WindowedPanel-outer").bounding_box()
    for view in ("Compare", "Film", "Plan"):
        explored.show(view)
        if view == "Film":
            expect(explored.film.get_by_role("button", name="Play")).to_be_visible()
        explored.snap(view.lower())
        size = box.bounding_box()
        assert size["height"] <= window["height"] and size["width"] <= window["width"], view
    controls, chart = (
        explored.slider("Rounds T").bounding_box(),
        box.get_by_role("img", name="the whole").bounding_box(),
    )
    assert controls["x"] + controls["width"] < chart["x"]  # beside each other
    assert page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth")


def test_presets_move_the_sliders_and_say_what_to_look_for(explored):
    for preset in PRESETS:
        explored.preset(preset)
    expect(explored.box.get_by_text("Compare with The paper")).to_be_visible()
    explored.preset("Never reconfigure")
    expect(explored.box.get_by_role("status").filter(has_text="R 50 is more than T 40")).to_be_visible()
    explored.snap("preset")


def beside(explored, alert, name):
    """Whether the alert stands right below the slider of that name."""
    slider = explored.box.locator(".widget-slider").filter(has_text=name).bounding_box()
    return 0 <= alert.bounding_box()["y"] - slider["y"] < 1.6 * slider["height"]


def test_an_error_stands_beside_the_slider_that_was_moved(explored):
    explored.preset("The paper")
    alert = explored.box.get_by_role("alert")
    for moved, key, words in (
        ("Target sparsity", "Home", "First sparsity 0.5 must not exceed the target 0"),
        ("First sparsity", "End", "First sparsity 0.99 must not exceed the target 0.9"),
    ):
        press(explored.slider(moved), key, expect(alert).to_contain_text, words)
        assert beside(explored, alert, moved)
        expect(explored.box.get_by_text("Dimmed: the last settings that were allowed")).to_be_visible()
        explored.snap(f"mistake-{moved.split()[0].lower()}")
        press(explored.button("The paper"), "Enter", expect(alert).to_have_count, 0)
    number = explored.box.get_by_role("textbox", name="Target sparsity s_p, as a number")
    number.fill("1.5")
    press(number, "Enter", expect(alert).to_contain_text, "1.5 is out of range; it became 0.99")
    explored.snap("clipped")
    partition = explored.box.get_by_role("combobox", name="Partition")
    partition.fill("dirichlet(-1)")
    press(
        partition,
        "Enter",
        expect(alert.filter(has_text="Partition 'dirichlet(-1)' is not allowed; it must be one of iid")).to_be_visible,
    )
    press(explored.button("The paper"), "Enter", expect(alert).to_have_count, 0)


def test_a_run_is_watched_and_stopped(explored):
    explored.preset("The paper")
    press(explored.slider("Rounds T"), "End", expect(explored.planned).to_contain_text, "FedDIP, 200 rounds")
    progress = explored.box.get_by_role("status").filter(has_text="T 200, seed 0: ")
    press(explored.button("Train"), "Enter", expect(progress).to_contain_text, "being trained", patience=60)
    expect(progress).to_contain_text(re.compile(r"being trained, round \d+ of 200, accuracy"))
    press(explored.button("Train"), "Enter", expect(explored.box.get_by_role("alert")).to_contain_text, "being trained")
    explored.snap("training")
    press(explored.button("Stop"), "Enter", expect(progress).to_contain_text, "stopped, round")
    assert int(re.search(r"round (\d+) of 200", progress.text_content())[1]) < 200


def test_two_runs_side_by_side_and_their_film_by_keyboard(explored):
    explored.train("The paper")
    explored.train("Kill the network")
    explored.show("Compare")
    words = explored.box.get_by_text("The paper → Kill the network: accuracy ")
    expect(words).to_contain_text("Settings: Penalty λ_max 0.001 → 0.3, Penalty steps Q 10 → 20")
    charts = explored.box.get_by_role("img", name="by round and by megabytes sent")
    expect(charts).to_have_attribute("alt", re.compile(r"The paper: 0\.\d+; Kill the network: 0\.1"))
    explored.snap("two-runs")
    explored.show("Film")
    film = explored.film
    scrub, counts = film.get_by_role("slider", name="Round of the film"), film.locator(".counts")
    expect(counts).to_contain_text("The paper: ")
    press(scrub, "Home", expect(counts).to_contain_text, " 0 returned")
    playing, paused = (film.get_by_role("button", name=name) for name in ("Pause", "Play"))
    press(paused, "Enter", expect(playing).to_be_visible)
    expect(film.get_by_text(re.compile(r"^round [2-9] of 40$"))).to_be_visible()
    press(playing, "Enter", expect(paused).to_be_visible)
    press(scrub, "End", expect(film.get_by_text("round 40 of 40")).to_be_visible)
    weights, told = film.get_by_role("application", name="Weights of fc2.weight, The paper"), film.locator(".weight")
    weights.hover(position=dict(x=1, y=1))
    expect(told).to_contain_text("Output 0, input 0, after round 40")
    weights.press("ArrowDown")
    weights.press("ArrowRight")
    expect(told).to_contain_text(re.compile(r"Output 1, input 1, after round 40: .*(pruned|kept).*, threshold 0\.\d"))
    explored.snap("film-of-two")
    assert film.locator("html").evaluate("page => page.scrollHeight <= window.innerHeight"), "the film scrolls"
    unnamed = r"^\s*- '?(?:slider|button|combobox|textbox|spinbutton|progressbar|checkbox|img)(?! \").*"
    for view in ("Plan", "Compare", "Film"):
        explored.show(view)
        # While a view is drawn, a part of it may not have its name yet.
        until(lambda: not re.findall(unnamed, explored.box.aria_snapshot(), re.M), f"{view}: every control has a name")
    until(lambda: not re.findall(unnamed, film.locator("body").aria_snapshot(), re.M), "the film's controls have names")
    expect(explored.box.locator("iframe")).to_have_attribute("title", re.compile(r"\w"))
    no_errors(explored.page)


def test_the_first_teaching_notebook_runs(lab, page):
    run_all(page, lab, "01_federated_averaging")
    expect(page.locator(".jp-RenderedImage img").first).to_be_visible()
    page.locator(".jp-RenderedImage img").first.scroll_into_view_if_needed()
    code = "[...document.querySelectorAll('.jp-CodeCell .cm-scroller')]"
    assert page.evaluate(f"() => {code}.filter(cell => cell.scrollWidth > cell.clientWidth).length") == 0  # cut off
    expect(page.locator(".Toastify__toast")).to_have_count(0)


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


def test_schedules_and_sawtooth_move_in_the_static_page_and_agree_with_python(site, page):
    page.goto((site.parent / "04_schedules.html").as_uri())
    cases = [(T, t, s, Q) for T in (1, 7, 100) for t in range(T) for s in (0.0, 0.5) for Q in (1, 4, 10)]
    both = "([T, t, s, Q]) => [play.sparsityAt(t, T, s, 0.9), play.lambdaAt(t, T, 1, Q)]"
    ours = page.evaluate(f"cases => cases.map({both})", cases)
    theirs = [[sparsity_at(t, T, s, 0.9), lambda_at(t, T, 1, Q)] for T, t, s, Q in cases]
    assert ours == [pytest.approx(row, abs=1e-12) for row in theirs]
    words = page.locator("[data-play=schedules] p[role=status]")
    expect(words).to_contain_text("ends at sparsity 0.900")
    page.get_by_role("slider", name="First sparsity").press("End")
    expect(page.get_by_text("First sparsity 0.99 must not exceed the target 0.9")).to_be_visible()
    page.screenshot(path=SCREENSHOTS / "site-schedules.png")

    page.goto((site.parent / "03_error_feedback.html").as_uri())
    for rule in ("paper", "released", "dense_memory"):
        for steps in (3, 4, 12):
            back = page.evaluate(f"() => play.sawtooth('{rule}', {steps}, 0.1, 0.85, 50).back")
            assert back == rounds_until_return(rule, steps, eta=0.1)
    words = page.locator("[data-play=sawtooth] p[role=status]")
    expect(words).to_contain_text("dense memory: returns after round 3")
    page.get_by_role("slider", name="Local steps").press("End")
    expect(words).to_contain_text("paper: returns after round 1; released code: not within 4 rounds")
    page.locator("[data-play=sawtooth]").scroll_into_view_if_needed()
    page.screenshot(path=SCREENSHOTS / "site-sawtooth.png")
