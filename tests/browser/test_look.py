"""The page for everybody: axe-core finds nothing, nothing is wider than a phone, and colour is never all there is.

With TANDEM_SCREENSHOTS set to a folder, the pictures that were checked are left there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.browser.test_page import ask

axe = pytest.importorskip("axe_playwright_python.sync_playwright")

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]

# Past the page's policy: axe-core is not part of it.
LOOKS = [
    {"viewport": {"width": width, "height": 860}, "color_scheme": scheme, "bypass_csp": True}
    for width in (1280, 390, 320)
    for scheme in ("light", "dark")
]


@pytest.mark.parametrize("wishes", LOOKS, ids=lambda look: f"{look['viewport']['width']}-{look['color_scheme']}")
def test_every_view_is_accessible_and_fits(page: Any, wishes: dict[str, Any]) -> None:
    name = f"{wishes['viewport']['width']}-{wishes['color_scheme']}"
    _check(page, f"empty-{name}")
    page.check("#compare")
    ask(page)
    page.click(".table summary")
    page.locator(".answer .t.accepted").first.hover()
    _check(page, f"chat-{name}")
    page.click("#tab-race")
    ask(page)
    page.fill("#temperature", "9")
    page.click("#send")
    assert page.locator("#error").is_visible()
    _check(page, f"race-{name}")


def _check(page: Any, name: str) -> None:
    if folder := os.environ.get("TANDEM_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)
    overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert overflow <= 0, f"{name} is {overflow} px too wide"
    results = axe.Axe().run(page)
    assert results.violations_count == 0, f"{name}\n{results.generate_report()}"


def test_each_origin_has_a_line_style_of_its_own(page: Any) -> None:
    style = "samples => samples.map(sample => getComputedStyle(sample).textDecorationStyle)"
    styles = page.locator(".legend .t").evaluate_all(style)
    assert len(styles) == len(set(styles)) == 4
