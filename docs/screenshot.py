"""Draw docs/img/report.png, the head of a real report, in Chromium: `python docs/screenshot.py`."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from verl_audit import audit
from verl_audit.report.html.page import render

DOCS = Path(__file__).parent
REAL = DOCS.parent / "fixtures" / "real"
WIDTH = 1100


def main() -> None:
    """The page from its top to the end of the four steps."""
    found = audit(REAL / "async_drop_bias", baselines=[REAL / "sync_baseline"])
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as running:
        file = Path(folder) / "report.html"
        file.write_text(render(found.document), encoding="utf-8")
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 900})
        page.goto(file.as_uri())
        box = page.locator("#steps").bounding_box()
        assert box is not None
        clip = {"x": 0.0, "y": 0.0, "width": float(WIDTH), "height": box["y"] + box["height"]}
        page.screenshot(path=DOCS / "img" / "report.png", clip=clip, full_page=True)  # type: ignore[arg-type]
        browser.close()


if __name__ == "__main__":
    main()
