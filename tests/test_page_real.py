"""The page of ``canvax serve`` over the model in the package. With CANVAX_SHOTS, pictures of it go into that folder."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from canvax.server.engine import ImageEngine
from tests.support.serving import generating, until

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
SHOTS = os.environ.get("CANVAX_SHOTS")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not CHROMIUM or importlib.util.find_spec("playwright") is None, reason="wants playwright and a Chromium"
    ),
]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, ImageEngine]]:
    with generating() as found:
        yield found


OTHERS = pytest.param((820, "dark"), marks=pytest.mark.weekly), pytest.param((390, "light"), marks=pytest.mark.weekly)


@pytest.fixture(params=[(1280, "light"), *OTHERS], ids=["wide", "middle", "narrow"])
def page(server: tuple[str, ImageEngine], request: pytest.FixtureRequest) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    width, theme = request.param
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        viewport = {"width": width, "height": 860}
        context = browser.new_context(viewport=viewport, color_scheme=theme, device_scale_factor=2)
        context.set_default_timeout(120_000)
        page = context.new_page()
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: message.type == "error" and faults.append(message.text))
        page.goto(server[0])
        page.wait_for_selector("body[data-ready]")
        yield page
        browser.close()
    assert not faults


def shot(page: Any, name: str) -> None:
    if SHOTS:
        width = page.viewport_size["width"]
        page.screenshot(path=Path(SHOTS) / f"page-{name}-{width}.png")


def draw(page: Any, prompt: str) -> None:
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")
    page.wait_for_selector(".tile.busy", state="attached")


def test_draw_watch_inpaint_and_drop(page: Any, server: tuple[str, ImageEngine], tmp_path: Path) -> None:
    _, engine = server
    shot(page, "empty")
    draw(page, "a red apple")
    page.wait_for_selector('.tile.busy img[src^="data:image/jpeg"]', state="visible")  # a preview of this very image
    page.wait_for_selector(".tile.busy", state="detached")
    for prompt in ("a dog face", "a sunflower", "a pizza", "an owl", "a hot air balloon", "a cat face", "a cactus"):
        draw(page, prompt)
    page.wait_for_selector(".tile.drawing")
    shot(page, "busy")
    page.wait_for_selector(".tile.busy", state="detached")
    shot(page, "done")
    page.locator(".tile .open").first.focus()
    page.keyboard.press("p")
    page.locator("#mask-canvas:focus").wait_for()
    box = page.locator("#mask-canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + box["height"] * 0.7)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + box["height"] * 0.7, steps=8)
    page.mouse.up()
    shot(page, "mask")
    page.click("#mask-use")
    draw(page, "a red apple")
    page.wait_for_selector(".tile.busy", state="detached")
    until(lambda: not engine.jobs())  # the page is ahead of the server
    job = list(engine._book._over.values())[-1][1]
    assert job.request.mask is not None
    assert not page.locator(".tile.failed").count()
    (tmp_path / "image.png").write_bytes(job.pictures[0].data or b"")
    page.fill("#prompt", "")
    page.click("#input-remove")
    page.set_input_files("#file", tmp_path / "image.png")
    page.wait_for_selector("text=Settings restored")
    assert page.input_value("#prompt") == "a red apple"
    page.locator(".tile .open").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#viewer[open]")
    shot(page, "viewer")
