"""Pictures of the page and a short animation, with the bundled model: python -m benchmarks.page_pictures docs/images

It needs playwright and chromium (or what CHROMIUM names). It starts a server, or takes that of --url http://127.0.0.1:7860.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

PROMPTS = ("a cactus, fluent style", "a cat face, twemoji style", "a pizza, twemoji style", "a sunflower, fluent style",
           "a rocket, fluent flat style", "a dog face, noto style", "a red apple, fluent style")  # fmt: skip
PORT = 7868
WIDE, NARROW = (1280, 800), (390, 800)
FRAME = 0.12
"""Seconds of a frame of the animation."""


@contextmanager
def server() -> Iterator[str]:
    """The address of `canvax ui` in a new folder."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "canvax", "ui", "--port", str(PORT), "--output", f"{folder}/out", "--quiet"]
        process = subprocess.Popen(command, env={**os.environ, "BROWSER": "true"})
        try:
            yield f"http://127.0.0.1:{PORT}/"
        finally:
            process.terminate()
            process.wait(60)


def wait_until_ready(url: str, seconds: float = 900) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(f"{url}ready", timeout=5)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise SystemExit(f"{url} is not ready after {seconds:g} s")


@contextmanager
def opened(browser: Any, url: str, size: tuple[int, int], theme: str, *, scale: float = 1) -> Iterator[Any]:
    viewport = {"width": size[0], "height": size[1]}
    context = browser.new_context(
        viewport=viewport, color_scheme=theme, device_scale_factor=scale, reduced_motion="reduce"
    )
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.goto(url)
    page.wait_for_selector("body[data-ready]")
    yield page
    context.close()


def generate(page: Any, prompt: str) -> None:
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")
    page.wait_for_selector(".tile.busy", state="attached")


def idle(page: Any) -> None:
    page.wait_for_selector(".tile.busy", state="detached")


def save(page: Any, path: Path) -> None:
    page.wait_for_timeout(300)
    Image.open(io.BytesIO(page.screenshot())).convert("RGB").save(path, quality=85, method=6)


def pictures(browser: Any, url: str, folder: Path) -> None:
    with opened(browser, url, WIDE, "light") as page:
        page.fill("#seed", "1")
        for prompt in PROMPTS:
            generate(page, prompt)
            idle(page)
        page.locator(".tile .open").nth(3).focus()
        page.evaluate("document.activeElement.blur()")
        save(page, folder / "page.webp")
        page.locator(".tile .open").nth(2).click()
        save(page, folder / "page-viewer.webp")
        page.keyboard.press("p")
        page.wait_for_selector("#mask[open]")
        box = page.locator("#mask-canvas").bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + box["height"] * 0.3)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + box["height"] * 0.35, steps=12)
        page.mouse.up()
        save(page, folder / "page-mask.webp")
        page.keyboard.press("Escape")
    with opened(browser, url, WIDE, "dark") as page:
        page.fill("#count", "4")
        page.fill("#steps-number", "40")
        generate(page, "a butterfly, fluent style")
        page.wait_for_selector('.tile.busy img[src^="data:image/jpeg"]', state="visible")
        save(page, folder / "page-busy.webp")
        idle(page)
    with opened(browser, url, NARROW, "light", scale=1.5) as page:
        save(page, folder / "page-narrow.webp")
    with opened(browser, url, WIDE, "light") as page:
        page.route("**/api/jobs*", lambda route: route.abort())
        page.route("**/health", lambda route: route.abort())
        page.fill("#prompt", "a red apple")
        page.press("#prompt", "Enter")
        page.wait_for_selector("#banner", state="visible")
        save(page, folder / "page-failing.webp")


def animation(browser: Any, url: str, path: Path) -> None:
    """A prompt is written, its image grows and opens."""
    frames: list[Image.Image] = []

    def shoot(page: Any, times: int = 1) -> None:
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        frames.extend([picture.resize((880, 550), Image.Resampling.LANCZOS)] * times)

    with opened(browser, url, WIDE, "light") as page:
        page.fill("#steps-number", "100")
        shoot(page, 4)
        page.click("#prompt")
        for letter in "a tulip, fluent style":
            page.keyboard.type(letter)
            shoot(page)
        page.keyboard.press("Enter")
        while page.locator(".tile.busy").count() or len(frames) < 30:
            shoot(page)
            page.wait_for_timeout(60)
        shoot(page, 6)
        page.locator(".tile .open").first.click()
        page.wait_for_timeout(200)
        shoot(page, 12)
        for _ in range(2):
            page.keyboard.press("ArrowRight")
            page.wait_for_timeout(200)
            shoot(page, 8)
    step = max(1, len(frames) // 60)
    chosen = frames[::step]
    chosen[0].save(
        path, save_all=True, append_images=chosen[1:], duration=round(1000 * FRAME), loop=0, quality=60, method=3
    )


def main() -> None:
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--url", help="a running server, with its / at the end")
    arguments = parser.parse_args()
    executable = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")

    def draw(url: str) -> None:
        wait_until_ready(url)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
            pictures(browser, url, arguments.folder)
            animation(browser, url, arguments.folder / "page-moving.webp")
            browser.close()

    if arguments.url:
        draw(arguments.url)
    else:
        with server() as url:
            draw(url)


if __name__ == "__main__":
    main()
