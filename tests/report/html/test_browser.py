"""Reports in a real headless Chromium: no error, no request, sound for screen readers, nothing cut in print.

Skipped where there is no Chromium; `VERL_AUDIT_BROWSER=required` (as the continuous integration sets it) makes that a
failure. axe-core is what `make browser` fetched into the virtual environment, or the file that `VERL_AUDIT_AXE` names.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.report.html.pages import CASES, page

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
AXE = Path(os.environ.get("VERL_AUDIT_AXE", Path(sys.prefix) / "axe" / "package" / "axe.min.js"))
REQUIRED = os.environ.get("VERL_AUDIT_BROWSER") == "required"
WIDTHS = (1280, 390)
SCHEMES = ("light", "dark")


def chromium() -> str:
    """The path of Chromium, or a skip."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        (pytest.fail if REQUIRED else pytest.skip)("no Chromium on the PATH; `make browser` installs it")
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = chromium()
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


class Visit:
    """A page opened from its file, with everything it said and asked for."""

    def __init__(self, browser: Any, folder: Path, html: str, **context: Any) -> None:
        self.file = folder / "report.html"
        self.file.write_text(html, encoding="utf-8")
        self.said: list[str] = []
        self.asked: list[str] = []
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(self.file.as_uri())

    def quiet(self) -> None:
        """Nothing was said, and nothing but the file was asked for."""
        assert self.said == []
        assert self.asked == [self.file.as_uri()]


@pytest.fixture
def visit(browser: Any, tmp_path: Path) -> Iterator[Any]:
    opened: list[Visit] = []

    def open_(html: str, **context: Any) -> Visit:
        opened.append(Visit(browser, tmp_path, html, **context))
        return opened[-1]

    yield open_
    for one in opened:
        one.context.close()


@pytest.mark.parametrize("case", CASES)
def test_it_opens_without_error_or_request_and_never_scrolls_sideways(visit: Any, case: str) -> None:
    for width in WIDTHS:
        found = visit(page(case), viewport={"width": width, "height": 900})
        found.quiet()
        assert found.page.evaluate("document.documentElement.scrollWidth") <= width
        shown = found.page.locator("svg.chart:visible, svg.flow:visible")
        for i in range(shown.count()):
            box = shown.nth(i).bounding_box()
            assert box["width"] > 150 and box["height"] > 90, (case, width, box)


@pytest.mark.parametrize("case", CASES)
def test_axe_finds_nothing_serious(visit: Any, case: str) -> None:
    if not AXE.is_file():
        required = os.environ.get("VERL_AUDIT_AXE_CORE") == "required"
        (pytest.fail if required else pytest.skip)(f"{AXE} is not there; `make browser` fetches axe-core")
    found = visit(page(case), bypass_csp=True, viewport={"width": 1280, "height": 900})  # or axe could not be added
    found.page.add_script_tag(path=str(AXE))
    found.page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
    for scheme in SCHEMES:
        found.page.emulate_media(color_scheme=scheme)
        result = found.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        assert serious(result) == []
    assert len(result["passes"]) > 10


def serious(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Violations that axe calls serious or critical, with the first element of each."""
    grave = [v for v in result["violations"] if v["impact"] in ("serious", "critical")]
    return [(v["id"], v["nodes"][0]["html"][:200]) for v in grave]


def test_axe_would_find_a_text_too_pale_to_read(visit: Any) -> None:
    if not AXE.is_file():
        pytest.skip("axe-core is not there; `make browser` fetches it")
    pale = page("healthy").replace("--soft:#545c66", "--soft:#b4bcc6")
    found = visit(pale, bypass_csp=True)
    found.page.add_script_tag(path=str(AXE))
    assert [rule for rule, _ in serious(found.page.evaluate("axe.run(document)"))] == ["color-contrast"]


OVERLAPS = """() => {
  const bad = [];
  for (const chart of document.querySelectorAll('svg.chart, svg.flow')) {
    if (!chart.checkVisibility()) continue;
    const boxes = [...chart.querySelectorAll('text')].map((t) => [t.textContent, t.getBoundingClientRect()]);
    for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length; j++) {
      const [a, p] = boxes[i], [b, q] = boxes[j];
      if (p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 2 && q.top < p.bottom - 2)
        bad.push(a + ' / ' + b);
    }
    const edge = chart.closest('figure').getBoundingClientRect();
    for (const [text, at] of boxes)
      if (at.right > edge.right + 2 || at.left < edge.left - 2) bad.push('outside: ' + text);
  }
  return bad;
}"""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("case", ["stale", "evicted", "traced", "long", "compared"])
def test_no_labels_of_a_figure_overlap_or_leave_it(visit: Any, case: str, width: int) -> None:
    found = visit(page(case), viewport={"width": width, "height": 900})
    assert found.page.evaluate(OVERLAPS) == []


def test_the_clock_is_switched_from_the_keyboard_without_script(visit: Any) -> None:
    found = visit(page("healthy"), java_script_enabled=True)
    found.page.locator("#clock-update").focus()
    assert found.page.locator("#panel-update").is_visible()
    found.page.keyboard.press("ArrowRight")
    assert found.page.locator("#panel-sample").is_visible() and not found.page.locator("#panel-update").is_visible()
    found.page.keyboard.press("ArrowRight")
    assert found.page.locator("#panel-hour").is_visible()
    found.quiet()


def test_dark_and_light_differ_and_print_is_light(visit: Any) -> None:
    colours = {}
    for scheme in SCHEMES:
        found = visit(page("healthy"), color_scheme=scheme)
        colours[scheme] = found.page.evaluate("getComputedStyle(document.body).backgroundColor")
    found.page.emulate_media(media="print")
    printed = found.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert colours["light"] == printed == "rgb(255, 255, 255)" != colours["dark"]


A4 = 297 * 96 / 25.4
"""Height of an A4 page in CSS pixels."""


@pytest.mark.parametrize("case", ["undetermined", "stale", "traced", "long", "compared"])
def test_print_shows_every_clock_and_cuts_no_figure(visit: Any, case: str) -> None:
    found = visit(page(case), viewport={"width": 688, "height": 1020})  # A4 less its margins
    found.page.emulate_media(media="print")
    figures = found.page.locator("figure:visible")
    assert figures.count() >= 5
    for i in range(figures.count()):
        figure = figures.nth(i)
        assert figure.evaluate("(f) => getComputedStyle(f).breakInside") == "avoid"
        assert figure.bounding_box()["height"] < A4 / 2
    assert found.page.evaluate(OVERLAPS) == []
    for clock in ("update", "sample", "hour"):
        assert found.page.locator(f"#panel-{clock}").is_visible()
    pdf = found.page.pdf(format="A4", prefer_css_page_size=True)
    pages = pdf.count(b"/Type /Page\n") or pdf.count(b"/Type /Page ") or pdf.count(b"/Type/Page/")
    assert pdf.startswith(b"%PDF") and 2 <= pages <= 20


@pytest.mark.parametrize("case", ["traced", "compared"])
def test_interactive_figures_draw_and_offer_no_address(visit: Any, case: str) -> None:
    found = visit(page(case, interactive=True), viewport={"width": 1280, "height": 900})
    folds = found.page.locator("details.explore > summary")
    for i in range(folds.count()):
        if folds.nth(i).is_visible():
            folds.nth(i).click()
    found.page.wait_for_function("document.querySelectorAll('.js-plotly-plot .main-svg').length > 5")
    titles = found.page.eval_on_selector_all(".modebar-btn", "(buttons) => buttons.map((b) => b.dataset.title)")
    assert set(titles) == {"Zoom", "Pan", "Reset axes"}
    addresses = found.page.eval_on_selector_all("a", "(links) => links.map((a) => a.getAttribute('href'))")
    assert [a for a in addresses if not (a or "").startswith("#")] == []
    for button in found.page.locator(".modebar-btn:visible").all()[:3]:
        button.click(force=True)
    found.quiet()
