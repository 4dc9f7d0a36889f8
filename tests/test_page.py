"""The page of ``canvax serve``: its files, and what it does in a browser."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import os
import random
import re
import shutil
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from PIL import Image, ImageChops, ImageDraw
from PIL.PngImagePlugin import PngInfo

from canvax.images.formats import save_keywords
from canvax.images.metadata import read_metadata, save_numbered
from canvax.samplers import CURVES, SAMPLERS
from canvax.server import history
from canvax.server.answers import size_of
from canvax.server.app import Settings, create_app
from canvax.server.jobs import (
    AdapterCard,
    Changed,
    ControlCard,
    JobRequest,
    ModelCard,
    Picture,
    Rejected,
    State,
    Status,
)
from canvax.server.metrics import Metrics
from canvax.server.work import INVERSE
from tests.support.server_stub import CARD, StubEngine
from tests.support.serving import served, until

PAGE = Path(__file__).parents[1] / "src" / "canvax" / "server" / "page"
HTML = (PAGE / "index.html").read_text()
SCRIPTS = {path.name: path.read_text() for path in PAGE.glob("*.js")}
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


# ---- without a browser


class Names(HTMLParser):
    """Files, ids, references to ids, and what the policy of the page forbids."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.inline: list[str] = []
        self._script = False
        self.feed(HTML)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.files += [given[name] for name in ("src", "href") if name in given and not given[name].startswith("#")]
        self.ids += [given["id"]] if "id" in given else []
        for name in ("for", "aria-labelledby", "aria-describedby"):
            self.references += given.get(name, "").split()
        self.inline += [f"{tag} {name}" for name in given if name == "style" or name.startswith("on")]
        if tag == "style" or (tag == "script" and "src" not in given):
            self.inline.append(tag)


def test_every_file_that_is_named_exists() -> None:
    imported = [name for text in SCRIPTS.values() for name in re.findall(r'from "\./([^"]+)"', text)]
    styled = re.findall(r'url\("([^"]+)"\)', (PAGE / "style.css").read_text())
    named = [file.removeprefix("static/") for file in Names().files]
    assert {*named, *imported, *styled, "index.html"} == {path.name for path in PAGE.iterdir()}


def test_the_commands_for_other_models_are_those_of_the_docs() -> None:
    docs = (Path(__file__).parents[1] / "docs" / "which-model.md").read_text()
    commands = [line for line in re.findall(r"<code>(canvax ui [^<]+)</code>", HTML) if "FOLDER" not in line]
    assert len(commands) == 4
    for line in commands:
        assert f"`{line}`" in docs


def test_it_is_small() -> None:
    assert sum(path.stat().st_size for path in PAGE.iterdir()) < 230_000


def test_nothing_is_inline() -> None:
    assert not Names().inline
    for name, text in SCRIPTS.items():
        assert not re.search(r"innerHTML|setAttribute\(\"style\"|eval\(|new Function", text), name


def test_no_address_elsewhere() -> None:
    for path in PAGE.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|[\"'(]//", text), path.name


def test_every_id_exists_once() -> None:
    ids = Names().ids
    assert len(ids) == len(set(ids))
    used = {name for text in SCRIPTS.values() for name in re.findall(r'\$\("([^"]+)"\)', text)}
    assert used | set(Names().references) <= set(ids)


def test_every_icon_is_drawn() -> None:
    drawn = set(re.findall(r"^  (\w+): \"M", SCRIPTS["ui.js"], re.MULTILINE))
    used = set(re.findall(r'data-icon="(\w+)"', HTML))
    for text in SCRIPTS.values():
        used |= set(re.findall(r'\b(?:button|one|icon)\("(\w+)"', text))
    assert used <= drawn


# ---- in a browser

NETS = (ControlCard("edges", "controlnet"), ControlCard("all", "union", ("depth", "canny")))

browser_only = pytest.mark.skipif(
    not CHROMIUM or importlib.util.find_spec("playwright") is None,
    reason="wants playwright and a chromium (or its path in CHROMIUM)",
)


def thorough(test: Any) -> Any:
    """Of the browser's tests, those that are no smoke test."""
    return pytest.mark.slow(browser_only(test))


class Site:
    """The server over a stub of its models, and a page of it.

    Attributes:
        engine: the stub; its jobs run in turn.
        folder: into which images are saved, and which the page shows.
        secret: the key that requests must bear, if any.
        bodies: of the jobs asked for.
        url: of the page.
    """

    def __init__(self, folder: Path | None = None, syntax: str = "plain") -> None:
        self.engine = StubEngine(pace=0.05)
        self.engine.turn, self.engine.paint = threading.Lock(), self.spot
        self.engine.seed = partial(random.randrange, 2**32)
        self.folder, self.secret, self.url = folder, "", ""
        self.bodies: list[dict[str, Any]] = []
        self.faults: list[str] = []
        settings = Settings(keys=self, history=folder, syntax=syntax)  # type: ignore[arg-type]
        self._app = create_app(self.engine, settings, state=lambda: State.READY, metrics=Metrics())

    def client(self, authorization: str, key: str) -> str | None:
        """As the server's keys: whose request it is."""
        return "" if not self.secret or authorization == f"Bearer {self.secret}" else None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """The application, which notes what jobs are asked for."""
        body = b""

        async def noted() -> Any:
            nonlocal body
            message = await receive()
            if (scope["method"], scope["path"]) == ("POST", "/api/jobs") and message["type"] == "http.request":
                body += message["body"]
                if not message["more_body"]:
                    self.bodies.append(json.loads(body))
            return message

        await self._app(scope, noted if scope["type"] == "http" else receive, send)

    def spot(self, ask: JobRequest, picture: Picture) -> bytes:
        """A spot whose colour and place the seed decides, over the input image if there is one; saved in the folder."""
        rng, size = random.Random(picture.seed), (picture.width, picture.height)
        image = ask.image.convert("RGB").resize(size) if ask.image else Image.new("RGB", size, "white")
        x, y, r = rng.randrange(size[0]), rng.randrange(size[1]), min(size) // 4
        ImageDraw.Draw(image).ellipse((x - r, y - r, x + r, y + r), fill=tuple(rng.randrange(256) for _ in range(3)))
        settings = {
            "prompt": ask.prompt, "seed": picture.seed, "width": size[0], "height": size[1], "options": {**ask.options},
            "num_inference_steps": picture.steps, "guidance_scale": ask.guidance_scale or 7.5,
        }  # fmt: skip
        if self.folder:
            self.folder.mkdir(exist_ok=True)
            picture.file = save_numbered(self.folder, image, settings, picture.seed).name
        return encoded(image, settings)

    def use(self, page: Any) -> None:
        self.page = page
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("console", lambda message: "Content Security" in message.text and self.faults.append(message.text))
        self.open()

    def another_browser(self) -> None:
        browser, old = self.page.context.browser, self.page.context
        context = browser.new_context()
        context.set_default_timeout(15_000)
        self.use(context.new_page())
        old.close()

    def open(self) -> None:
        self.page.goto(self.url)
        self.page.wait_for_selector("body[data-ready]")

    def draw(self, prompt: str, *, wait: bool = True) -> None:
        asked, started = len(self.bodies), time.monotonic()
        self.page.fill("#prompt", prompt)
        self.page.press("#prompt", "Enter")
        if wait:  # not for the tile: on a busy machine it is there and gone between two looks
            while len(self.bodies) == asked:
                assert time.monotonic() - started < 15
                self.page.wait_for_timeout(20)
            self.idle()

    def drop(self, selector: str, image: Image.Image, by: tuple[str, ...] = ("dragenter", "dragover", "drop")) -> None:
        """Drop an image file on an element, or what the events say."""
        file = io.BytesIO()
        image.save(file, "png")
        drop = """([selector, data, names]) => {
            const file = new File([Uint8Array.from(atob(data), c => c.charCodeAt(0))], "b.png", {type: "image/png"});
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(file);
            for (const name of names) {
                const told = {dataTransfer, clipboardData: dataTransfer, bubbles: true, cancelable: true};
                const event = name === "paste" ? new ClipboardEvent(name, told) : new DragEvent(name, told);
                document.querySelector(selector).dispatchEvent(event);
            }
        }"""
        self.page.evaluate(drop, [selector, base64.b64encode(file.getvalue()).decode(), by])

    def give(self, settings: dict[str, Any] | None = None, data: bytes | None = None) -> None:
        """Open an image file, with these settings in it."""
        data = data or encoded(Image.new("RGB", (64, 64)), settings)
        self.page.set_input_files("#file", {"name": "a.png", "mimeType": "image/png", "buffer": data})

    def card(self, **changes: Any) -> None:
        """Change what the server says of its model, and open the page again."""
        self.engine.cards = (replace(CARD, **changes),)
        self.open()

    def dialogs(self) -> Iterator[str]:
        """Open each dialog of an image in turn: its id."""
        for name, key in (("viewer", "Enter"), ("compare", "c"), ("mask", "p"), ("sheet", "m"), ("help", "Shift+?")):
            self.key(key)
            self.page.wait_for_selector(f"#{name}[open]")
            yield name
            self.close()

    def idle(self) -> None:
        """Wait until nothing is drawn; the tile of a job must be there already."""
        self.page.wait_for_selector(".tile.busy", state="detached")

    def images(self, count: int) -> None:
        """Wait for this many finished images."""
        self.page.wait_for_selector(f".tile[data-id] >> nth={count - 1}")

    def key(self, key: str, index: int = 0) -> None:
        """Press a key on a finished image; wait until its settings are restored, or the mask editor is there."""
        self.page.locator(".tile .open").nth(index).focus()
        self.page.keyboard.press(key)
        if key in ("r", "p"):
            self.page.locator("#prompt:focus" if key == "r" else "#mask-canvas:focus").wait_for()

    def close(self, button: str | None = None) -> None:
        """Close a dialog, by Escape; wait until the page has acted on that and put the focus back."""
        closed = """() => { window.closed = new Promise((done) => {
            document.addEventListener("close", () => setTimeout(done), {capture: true, once: true});
        }); }"""
        self.page.evaluate(closed)
        self.page.click(button) if button else self.page.keyboard.press("Escape")
        self.page.evaluate("() => window.closed")

    def count(self, selector: str) -> int:
        return self.page.locator(selector).count()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def site(chromium: Any) -> Iterator[Site]:
    yield from running(chromium, Site())


@pytest.fixture
def saving(chromium: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    """A server that saves images into a folder, and prefers a syntax of prompts."""
    yield from running(chromium, Site(tmp_path / "out", getattr(request, "param", "plain")))


def running(chromium: Any, site: Site) -> Iterator[Site]:
    with served(site) as site.url:
        context = chromium.new_context()
        context.set_default_timeout(15_000)
        site.use(context.new_page())
        yield site
        site.page.context.close()
    assert not site.faults


def encoded(image: Image.Image, settings: Mapping[str, Any]) -> bytes:
    """A PNG with these settings."""
    out = io.BytesIO()
    image.save(out, "png", **save_keywords("PNG", settings))
    return out.getvalue()


def decoded(text: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(text.partition(",")[2])))


@browser_only
def test_draws_with_previews(site: Site) -> None:
    site.engine.pace = 0.3
    site.draw("a red apple", wait=False)
    site.page.wait_for_selector('.tile.busy img[src^="data:image/jpeg"]', state="visible")
    assert "/ 4" in site.page.inner_text(".tile.busy .status")
    site.idle()
    assert site.count(".tile[data-id] img") == 1
    assert site.bodies[0]["previews"] is True
    assert "seed" not in site.bodies[0]


@browser_only
def test_transparency_shows_wherever_an_image_does(site: Site) -> None:
    site.draw("a red apple")
    shown = "(query) => getComputedStyle(document.querySelector(query)).backgroundImage"
    places = [".tile[data-id] .frame img"]
    for key, picture in (("Enter", "#viewer-image"), ("p", "#mask-picture")):
        site.key(key)
        site.page.wait_for_selector(picture)
        places.append(picture)
        assert all("conic" in site.page.evaluate(shown, place) for place in places)
        site.page.click("#mask-use") if key == "p" else site.close()
    site.page.wait_for_selector("#input-canvas")
    assert "conic" in site.page.evaluate(shown, "#input-canvas")


@browser_only
def test_several_jobs_queue_and_one_is_cancelled(site: Site) -> None:
    site.engine.pace = 0.4
    site.draw("a dog", wait=False)
    site.draw("a cat", wait=False)
    site.page.wait_for_selector(".tile.drawing")
    assert "in 2 jobs" in site.page.inner_text("#queue-text")
    site.page.locator(".tile.busy", has_text="a cat").locator(".cancel").click()
    site.idle()
    assert site.page.locator(".tile[data-id] .caption").all_inner_texts() == ["a dog"]
    assert sorted(job.status for job in site.engine.accepted) == ["cancelled", "done"]


@thorough
def test_ten_jobs_leave_a_connection_for_cancelling(site: Site) -> None:
    site.engine.pace = 3.0  # so long that none is done before the last is asked for
    for number in range(10):
        site.draw(f"dog {number}", wait=False)
    site.page.wait_for_selector(".tile.busy >> nth=9")
    site.page.locator(".tile.busy", has_text="dog 9").locator(".cancel").click()
    until(lambda: "cancelled" in [job.status for job in site.engine.accepted], seconds=8)
    site.page.click("#queue-cancel")
    site.idle()
    until(lambda: all(job.status.over for job in site.engine.accepted))  # the page is ahead of the server


@browser_only
def test_history_survives_a_reload(site: Site) -> None:
    for prompt in ("a red apple", "a dog face"):
        site.draw(prompt)
    site.page.hover(".tile")
    site.page.click(".tile .favourite")
    site.page.wait_for_selector(".tile .favourite[aria-pressed=true]", state="attached")
    site.open()
    assert site.page.locator(".tile .caption").all_inner_texts() == ["a dog face", "a red apple"]
    site.page.fill("#search", "apple")
    assert site.page.locator(".tile .caption").all_inner_texts() == ["a red apple"]
    assert site.page.inner_text("#history-count") == "1 of 2"
    site.page.fill("#search", "")
    site.page.click("#favourites")
    assert site.page.locator(".tile .caption").all_inner_texts() == ["a dog face"]


@browser_only
def test_history_is_the_folder_of_images(saving: Site) -> None:
    """Another browser shows the same images; their settings, favourites, deletions and actions work there."""
    site, folder = saving, saving.folder
    for prompt in ("a red apple", "a dog face", "an old cat"):
        site.draw(prompt)
    captions = site.page.locator(".tile .caption")
    before = captions.all_inner_texts()
    site.open()
    assert captions.all_inner_texts() == before  # each of them once
    site.another_browser()
    captions = site.page.locator(".tile .caption")
    assert captions.all_inner_texts() == before
    assert site.page.evaluate("document.querySelector('.tile img').naturalWidth") == 64
    site.key("r", 2)
    assert site.page.input_value("#prompt") == "a red apple"
    label = site.page.locator(".tile .open").nth(2).get_attribute("aria-label")
    assert label == f"a red apple, seed {site.page.input_value('#seed')}"
    site.key("Shift+V", 1)
    site.images(4)
    assert decoded(site.bodies[-1]["image"]).size == (64, 64)
    (folder / "deleted").mkdir()
    for path in folder.glob("*.png"):  # others of the same names
        (folder / "deleted" / path.name).touch()
    site.key("Delete", 3)
    site.page.wait_for_selector(".toast >> text=folder")
    until(lambda: len(list(folder.glob("*.png"))) == 3)
    site.page.keyboard.press("z")
    site.images(4)
    assert len(list(folder.glob("*.png"))) == 4
    site.key("f", 3)
    site.page.wait_for_selector(".tile .favourite[aria-pressed=true]", state="attached")
    site.open()
    site.page.click("#favourites")
    assert captions.all_inner_texts() == before[2:]
    site.page.click("#favourites")
    site.key("e")
    site.images(5)
    site.open()
    assert site.count(".tile") == 5  # also the image whose file has no prompt


@thorough
def test_nothing_is_said_of_a_folder_before_it_is_read(saving: Site) -> None:
    saving.draw("a red apple")
    context = saving.page.context.browser.new_context()
    page, held = context.new_page(), []
    page.route("**/api/images", lambda route: held.append(route))
    page.goto(saving.url)
    while not held:
        page.wait_for_timeout(20)
    assert page.locator("#empty").is_hidden()
    held[0].continue_()
    page.wait_for_selector(".tile[data-id]")
    context.close()


@pytest.mark.parametrize("answer", [7, 20])  # of 20 images three fill the page exactly
@thorough
def test_older_images_of_the_folder_come_when_they_are_asked_for(
    saving: Site, monkeypatch: pytest.MonkeyPatch, answer: int
) -> None:
    monkeypatch.setattr(history, "PAGE", answer)
    folder = saving.folder
    folder.mkdir()
    for number in range(80):
        settings = {"prompt": "apple" if number else "the first pear", "seed": number}
        os.utime(save_numbered(folder, Image.new("RGB", (8, 8)), settings, number), (number, number))
    saving.open()
    assert 60 <= saving.count(".tile") < 70
    assert saving.page.inner_text("#history-count").endswith("+")
    assert saving.page.is_visible("#older")
    saving.page.fill("#search", "pear")
    saving.page.wait_for_selector(".tile >> text=the first pear")
    saving.page.fill("#search", "")
    saving.page.click("#older")
    assert saving.count(".tile") == 80


@thorough
def test_undo_waits_for_the_deletion(saving: Site) -> None:
    """However late the server moves the file, it is back in the end."""
    folder, asked, held = saving.folder, [], []
    saving.draw("a red apple")

    def late(route: Any) -> None:
        asked.append(route.request.method)
        held.append(route) if route.request.method == "DELETE" else route.continue_()

    saving.page.route("**/api/images/*", late)
    saving.page.locator(".tile .open").focus()
    saving.page.keyboard.press("Delete")
    saving.page.wait_for_selector(".toast >> text=folder")
    saving.page.keyboard.press("z")
    saving.page.wait_for_timeout(200)
    assert "POST" not in asked
    held[0].continue_()
    saving.page.wait_for_selector(".tile[data-id]")
    assert len(list(folder.glob("*.png"))) == 1


@thorough
def test_a_running_job_survives_a_reload(site: Site) -> None:
    site.engine.pace = 0.5
    site.draw("a red apple", wait=False)
    site.page.wait_for_selector(".tile.drawing")
    site.open()
    site.images(1)
    assert len(site.bodies) == 1
    assert site.page.input_value("#prompt") == "a red apple"


@thorough
def test_a_job_that_the_server_forgot_keeps_its_seeds_and_what_is_done(site: Site) -> None:
    """As after Ctrl-C and a new start: one of three images is there, and the job is not."""

    def one_image(route: Any) -> None:
        address = route.request.url.removesuffix("/events")
        while not (image := httpx.get(address).json()["images"][0])["url"]:
            time.sleep(0.05)
        event = f"event: image\ndata: {json.dumps(image)}\n\n"
        route.fulfill(status=200, content_type="text/event-stream", body=event)

    forgotten = {"error": {"message": "No such job.", "code": "job_not_found"}}
    site.page.route("**/events", one_image, times=1)
    site.page.route(
        re.compile(r"/api/jobs/[0-9a-f]{32}$"), lambda route: route.fulfill(status=404, json=forgotten), times=1
    )
    site.page.fill("#count", "4")
    site.draw("a red apple")
    first, rest = site.bodies
    assert (first["n"], first.get("seed")) == (4, None)
    seeds = [picture.seed for picture in site.engine.accepted[0].pictures]
    assert (rest["n"], rest["seed"]) == (3, seeds[1])
    assert site.count(".tile[data-id]") == 4
    site.open()
    site.idle()
    assert site.count(".tile[data-id]") == 4
    assert len(site.bodies) == 2


# A large image takes the browser a moment to read, and the user may send the form before that.
SLOW_IMAGES = """() => {
  const read = window.createImageBitmap;
  window.createImageBitmap = async (...all) => {
    await new Promise((go) => setTimeout(go, 500));
    return read(...all);
  };
}"""


def with_mask(site: Site) -> None:
    """Generate an image, and take it as input under a mask."""
    site.draw("a red apple")
    under_a_mask(site)


def under_a_mask(site: Site) -> None:
    """Take the newest image as input under a mask."""
    site.key("p")
    site.page.keyboard.press("Space")
    site.page.click("#mask-use")
    site.page.wait_for_selector("text=Change the mask")


@browser_only
def test_mask_and_inpaint(site: Site) -> None:
    site.draw("a red apple")
    site.page.click(".tile .open")
    site.page.click("#viewer-actions >> text=Paint a mask")
    site.page.wait_for_selector("#mask[open]")
    box = site.page.locator("#mask-canvas").bounding_box()
    for x, down in ((0.25, True), (0.5, False)):
        site.page.mouse.move(box["x"] + box["width"] * x, box["y"] + box["height"] / 2, steps=5)
        if down:
            site.page.mouse.down()
    site.page.mouse.up()
    site.page.evaluate(SLOW_IMAGES)
    site.page.click("#mask-use")
    site.draw("a pear")
    body = site.bodies[1]
    mask = decoded(body["mask"]).convert("L")
    assert mask.size == decoded(body["image"]).size == (64, 64)
    assert set(mask.tobytes()) == {0, 255}
    assert [mask.getpixel(at) for at in ((16, 32), (24, 32), (32, 32), (16, 8), (56, 32))] == [255, 255, 255, 0, 0]
    assert 0 < body["strength"] <= 1
    assert body["options"] == {"mask_blur": 2}  # a soft edge, unless it is switched off
    site.page.click("#input-remove")
    site.key("r")
    site.page.wait_for_selector("text=Change the mask")
    site.draw("a pear")
    assert decoded(site.bodies[2]["mask"]).convert("L").tobytes() == mask.tobytes()
    assert site.bodies[2]["seed"] == site.engine.accepted[1].pictures[0].seed


@thorough
def test_options_of_a_mask_go_with_it(site: Site) -> None:
    """They are not sent, shown or kept without a mask."""
    page = site.page
    with_mask(site)
    site.draw("a pear")
    assert site.bodies[-1]["options"] == {"mask_blur": 2}
    site.key("Shift+V")  # of the image alone
    site.images(3)
    assert "mask_blur" not in site.bodies[-1].get("options", {})
    site.key("r", 1)
    page.wait_for_selector("text=Change the mask")
    page.wait_for_selector('[aria-label="Leave out mask_blur"]', state="attached")
    page.click("#input-remove")
    page.wait_for_selector("#other-field", state="hidden")
    assert "mask" not in page.inner_text("#more-text")
    site.draw("a pear")
    assert "mask_blur" not in site.bodies[-1].get("options", {})
    keep = """() => {
        const draft = JSON.parse(localStorage["canvax.draft"]);
        const before = draft.options;
        localStorage["canvax.draft"] = JSON.stringify({...draft, options: {...before, mask_blur: 2}});
        return before;
    }"""
    assert "mask_blur" not in page.evaluate(keep)
    site.open()  # with the form as an older page kept it
    site.draw("a pear")
    assert "mask_blur" not in site.bodies[-1].get("options", {})


@thorough
def test_only_the_masked_part(site: Site) -> None:
    """The box is there again after a reload. The settings of a restored image take its place."""
    page = site.page
    with_mask(site)
    page.click("#input-mask")
    page.check("#mask-only")
    page.click("#mask-use")
    site.draw("a pear")
    site.open()
    site.draw("a pear")
    assert [body["options"] for body in site.bodies[-2:]] == [{"mask_blur": 2, "padding_mask_crop": 4}] * 2
    site.key("r")
    leave_out = page.locator('[aria-label="Leave out padding_mask_crop"]')
    leave_out.wait_for(state="attached")
    page.wait_for_selector("text=Change the mask")
    leave_out.evaluate("node => node.click()")
    site.draw("a pear")
    assert site.bodies[-1]["options"] == {"mask_blur": 2}
    site.key("p")  # for a new mask it is as it was left
    assert page.is_checked("#mask-only")


@browser_only
def test_the_images_of_the_form_survive_a_reload(site: Site) -> None:
    """The input image, its mask and the control image are there again, and removed ones are not."""
    site.card(controls=NETS[:1])
    page = site.page
    with_mask(site)
    page.fill("#strength", "0.8")
    page.select_option("#size", "96x64")
    site.drop("#control", Image.new("RGB", (64, 64)))
    page.wait_for_selector("#control-remove", state="visible")
    site.draw("a pear")
    site.open()
    site.draw("a pear")
    names = ("image", "mask", "strength", "width", "height", "control", "options")
    before, after = ({name: body[name] for name in names} for body in site.bodies[-2:])
    assert before == after
    assert page.locator("#other-field").is_hidden()  # the soft edge has its box
    page.click("#input-remove")
    page.wait_for_selector("#input", state="hidden")
    site.open()
    site.draw("a pear")
    assert {"image", "mask", "control"} & site.bodies[-1].keys() == {"control"}


@thorough
@pytest.mark.parametrize("action", ["u", "p"])
def test_a_typed_prompt_outlives_an_input_image(site: Site, action: str) -> None:
    """The image's prompt is offered; it is taken where none was typed."""
    page = site.page

    def use(index: int) -> None:
        site.key(action, index)
        if action == "p":
            page.keyboard.press("Space")
            page.click("#mask-use")
        page.wait_for_selector("#input", state="visible")
        page.locator("#prompt:focus").wait_for()

    site.draw("a red apple")
    site.draw("a blue pear")
    page.fill("#prompt", "a pizza")
    use(0)
    assert page.input_value("#prompt") == "a pizza"
    page.click(".toast >> text=Use the image's prompt")
    assert page.input_value("#prompt") == "a blue pear"
    use(1)  # over a prompt that the page wrote
    assert page.input_value("#prompt") == "a red apple"
    page.fill("#prompt", "")
    use(0)
    assert page.input_value("#prompt") == "a blue pear"


@thorough
@pytest.mark.parametrize("how", ["Cancel", "Escape", "X"])
def test_a_cancelled_mask_leaves_the_form_alone(site: Site, how: str) -> None:
    """No input image stays behind that the next job would begin from, and one that was there comes back."""
    site.draw("a red apple")
    site.draw("a blue pear")
    site.page.fill("#prompt", "a pizza")

    def cancel() -> None:
        site.page.wait_for_selector("#mask[open]")
        site.close({"Cancel": "#mask >> text=Cancel", "X": "#mask .dialog-head [data-close]"}.get(how))
        site.page.wait_for_selector("#mask", state="hidden")

    def paint(index: int) -> None:
        site.key("p", index)

    paint(1)
    cancel()
    site.page.wait_for_selector("#input", state="hidden")
    assert site.page.input_value("#prompt") == "a pizza"
    site.draw("a pizza")
    assert "image" not in site.bodies[-1]
    site.key("u", 2)
    site.page.wait_for_selector("#input", state="visible")
    site.page.fill("#strength", "0.45")
    site.draw("a plum")
    before = site.bodies[-1]
    paint(0)
    cancel()
    site.draw("a plum")
    assert {name: site.bodies[-1][name] for name in ("image", "strength")} == {
        name: before[name] for name in ("image", "strength")
    }
    assert "mask" not in site.bodies[-1]


@thorough
def test_a_mask_begins_at_full_strength(site: Site) -> None:
    site.draw("a red apple")
    site.key("p")
    site.page.keyboard.press("Space")
    site.page.click("#mask-use")
    site.page.wait_for_selector("text=Change the mask")
    assert site.page.input_value("#strength") == "1"
    site.page.fill("#strength", "0.8")
    site.page.click("text=Change the mask")
    site.page.wait_for_selector("#mask[open]")
    site.page.keyboard.press("Space")
    site.page.click("#mask-use")
    site.page.wait_for_selector("#mask", state="hidden")
    site.draw("a red apple")
    assert site.bodies[-1]["strength"] == 0.8  # which was chosen for this mask
    site.page.fill("#strength", "1")
    site.key("u")
    site.page.wait_for_selector("text=Add mask")
    assert site.page.input_value("#strength") == "0.6"  # without a mask 1 would keep nothing of the image


@thorough
def test_a_mask_keeps_the_chosen_size(site: Site) -> None:
    site.drop("body", Image.new("RGB", (64, 64)))
    site.page.wait_for_selector("#input", state="visible")
    site.page.select_option("#size", "96x64")
    site.page.click("#input-mask")
    site.page.locator("#mask-canvas:focus").wait_for()
    site.page.keyboard.press("Space")
    site.page.click("#mask-use")
    site.page.wait_for_selector("text=Change the mask")
    assert site.page.input_value("#size") == "96x64"
    site.draw("a red apple")
    body = site.bodies[-1]
    assert decoded(body["mask"]).size == decoded(body["image"]).size == (body["width"], body["height"]) == (96, 64)
    shown = "() => { const {width, height} = document.getElementById('input-canvas'); return [width, height]; }"
    assert site.page.evaluate(shown) == [96, 64]
    assert site.page.inner_text("#input-hint") == "cut at its edges to fit the size"
    site.page.select_option("#size", "64x64")
    assert (site.page.evaluate(shown), site.page.inner_text("#input-hint")) == ([64, 64], "")
    site.draw("a red apple")
    boxes = [decoded(body["mask"]).convert("L").getbbox() for body in site.bodies]
    wide, square = ([box[2] - box[0], box[3] - box[1]] for box in boxes)  # of a dab, in the middle of both
    assert [sum(box[::2]) // 2 for box in boxes] == [48, 32]
    np.testing.assert_allclose(square, np.divide(wide, 1.5), atol=1)  # it stays round, on the same part of the image


@thorough
@pytest.mark.parametrize(
    ("width", "size", "kept"),
    [(64, "96x64", (16, 0, 80, 64)), (64, "64x64", (8, 8, 56, 56)), (72, "64x64", (8, 10, 56, 53))],
)
def test_an_input_image_is_extended(site: Site, width: int, size: str, kept: tuple[int, int, int, int]) -> None:
    """All of it stays, in the middle; what is around it is generated."""
    photo = Image.new("RGB", (width, 64), "blue")
    photo.paste("red", (0, 0, width, 32))
    photo.paste("green", (width - 16, 0, width, 64))
    site.drop("body", photo)
    site.page.wait_for_selector("#input", state="visible")
    site.page.select_option("#size", size)
    site.page.click("#input-extend")
    site.page.wait_for_selector("text=Change the mask")
    assert site.count(".toast >> text=a quarter smaller") == (size == "64x64")
    assert site.page.locator("#input-extend").is_hidden()
    site.draw("a house")
    body = site.bodies[-1]
    image, mask = decoded(body["image"]).convert("RGB"), decoded(body["mask"]).convert("L")
    assert image.size == mask.size == (body["width"], body["height"])
    assert ImageChops.invert(mask).getbbox() == kept
    small = image.crop(kept)
    assert [small.getpixel((2, y)) for y in (0, small.height - 1)] == [(255, 0, 0), (0, 0, 255)]
    (left, top, right, bottom), (wide, tall) = kept, image.size  # around it are the colours of its edge
    around = np.pad(np.asarray(small), ((top, tall - bottom), (left, wide - right), (0, 0)), mode="edge")
    np.testing.assert_allclose(np.asarray(image, int), around, atol=1)
    assert body["strength"] == 1


@thorough
def test_an_extended_image_is_extended_again_for_another_size(site: Site) -> None:
    """The picture from before, also after a reload; once the mask is painted, the canvas is the picture."""
    page = site.page

    def kept() -> list[Any]:
        site.draw("a house")
        body = site.bodies[-1]
        image, mask = decoded(body["image"]).convert("RGB"), decoded(body["mask"]).convert("L")
        assert image.size == mask.size == (body["width"], body["height"])
        box = ImageChops.invert(mask).getbbox()
        assert box is not None
        small = image.crop(box)
        assert [small.getpixel((2, y)) for y in (0, small.height - 1)] == [(255, 0, 0), (0, 0, 255)]
        return [box, body["strength"], page.inner_text("#input-hint")]

    photo = Image.new("RGB", (64, 64), "blue")
    photo.paste("red", (0, 0, 64, 32))
    site.drop("body", photo)
    page.wait_for_selector("#input", state="visible")
    page.click("#input-extend")
    page.wait_for_selector("text=Change the mask")
    page.fill("#strength", "0.9")
    page.select_option("#size", "96x64")
    assert kept() == [(16, 0, 80, 64), 0.9, ""]
    page.select_option("#size", "64x64")
    assert kept() == [(8, 8, 56, 56), 0.9, ""]
    site.open()
    page.wait_for_selector("text=Change the mask")
    page.select_option("#size", "96x64")
    assert kept() == [(16, 0, 80, 64), 0.9, ""]
    page.click("#input-mask")
    page.locator("#mask-canvas:focus").wait_for()
    page.keyboard.press("e")
    page.keyboard.press("Space")
    page.click("#mask-use")
    page.wait_for_selector("#mask", state="hidden")
    page.select_option("#size", "64x64")
    assert kept() == [(0, 0, 64, 64), 0.9, "cut at its edges to fit the size"]


@thorough
@pytest.mark.parametrize(("width", "fits"), [("", False), ("100000", False), ("64", True)])
def test_a_width_that_is_none_is_not_asked_for(site: Site, width: str, fits: bool) -> None:
    site.card(any_size=True)
    site.page.select_option("#size", "other")
    site.page.fill("#width", width)
    site.draw("a red apple", wait=fits)
    site.page.wait_for_selector(".field:has(#width) #form-error", state="hidden" if fits else "visible")
    assert len(site.bodies) == fits


@thorough
def test_what_the_sampler_s_note_leaves_out(site: Site) -> None:
    """Steps beside the model's own sampler, which has them, and options that the form does not have."""
    site.card(sampler="ddim", samplers=("ddim", "euler_a"))
    note = site.page.locator("#sampler-when")
    assert not re.search("steps|eta", note.inner_text())
    assert note.inner_text()
    site.page.select_option("#sampler", "euler_a")
    assert "steps" in note.inner_text()


@thorough
def test_a_file_without_settings_and_a_damaged_one(site: Site) -> None:
    """One short sentence each, and only the first becomes the input image."""
    page = site.page
    data = encoded(Image.new("RGB", (64, 64)), {})
    for name, content in (("photo", data), ("damaged", data[:40])):
        site.open()
        site.give(data=content)
        text = page.inner_text(".toast p")
        assert len(text) < 90
        assert ":" not in text
        assert ("Added" in text) == (name == "photo")


@thorough
def test_the_last_seed_is_offered_kept_and_let_go(site: Site) -> None:
    site.draw("a red apple")
    assert site.page.input_value("#seed") == ""
    assert site.page.get_attribute("#seed-lock", "aria-pressed") == "false"
    site.page.click("#seed-lock")
    first = site.page.input_value("#seed")
    assert first in (site.page.locator(".tile .open").first.get_attribute("aria-label") or "")
    site.draw("a red apple")
    assert str(site.bodies[-1]["seed"]) == first
    site.page.click("#more summary")
    site.page.click("#reset")
    site.draw("a red apple")
    assert "seed" not in site.bodies[-1]


@thorough
def test_what_the_viewer_says(site: Site) -> None:
    """A sampler has one name, however it got into the form; what is upscaled says how strongly."""
    site.draw("a red apple")
    site.page.select_option("#sampler", "dpmpp_2m")
    site.draw("a red apple")
    said = []
    for _ in range(2):
        site.key("Enter", len(said))
        said.append(site.page.inner_text("#viewer-settings"))
        site.close()
    assert "DPM++ 2M" in said[0]
    assert "Euler a" in said[1]
    site.key("e")
    site.images(3)
    assert site.bodies[-1]["strength"] == 0.3
    site.key("Enter")
    said.append(site.page.inner_text("#viewer-settings"))
    assert re.search(r"strength\s+0\.3", said[2], re.IGNORECASE)


@thorough
@pytest.mark.parametrize(
    ("side", "width", "times"), [(64, 1280, 8), (256, 1280, 2.5), (256, 390, 1.3), (1024, 1280, 0.6)]
)
def test_the_viewer_fills_the_window(site: Site, side: int, width: int, times: float) -> None:
    """Icons by whole multiples, other images up to three times; large ones are made smaller."""
    site.engine.paint = lambda ask, picture: encoded(Image.new("RGB", (side, side), "navy"), {})
    site.card(native=(side, side), sizes=((side, side),))
    site.page.set_viewport_size({"width": width, "height": 900})
    site.draw("a red apple")
    site.page.click(".tile .open")
    box = site.page.locator("#viewer-image").bounding_box()
    assert box["width"] == box["height"] >= times * side
    assert box["width"] <= site.page.locator(".stage").bounding_box()["width"]


@thorough
def test_a_phone_s_viewer_keeps_its_buttons_apart(site: Site) -> None:
    site.page.set_viewport_size({"width": 390, "height": 600})
    for prompt in ("a red apple", "a blue pear"):
        site.draw(prompt)
    site.page.locator(".tile .open").first.click()
    apart = """() => {
        document.getElementById("viewer").scrollTop += 20;
        const box = (one) => document.querySelector(one).getBoundingClientRect();
        const [next, close] = [box("#viewer-next"), box("#viewer [data-close]")];
        return next.top >= close.bottom || next.right <= close.left || next.bottom <= close.top;
    }"""
    assert all(site.page.evaluate(apart) for _ in range(20))
    assert site.page.evaluate("document.getElementById('viewer').scrollTop") > 100


@thorough
def test_generate_shows_the_new_image_where_the_gallery_was_scrolled(site: Site) -> None:
    site.page.set_viewport_size({"width": 1280, "height": 500})
    for number in range(9):
        site.draw(f"dog {number}")
    site.page.mouse.move(900, 300)
    site.page.mouse.wheel(0, 3000)

    def top() -> float:
        site.page.wait_for_timeout(600)  # of smooth scrolling
        return site.page.evaluate("document.querySelector('.tile').getBoundingClientRect().top")

    assert top() < -100
    site.page.fill("#prompt", "a cat")
    site.page.click("#draw")
    assert top() >= 0
    assert site.page.evaluate("document.activeElement.id") in ("prompt", "draw")


@thorough
@pytest.mark.parametrize("saving", ["a1111"], indirect=True)
def test_the_syntax_of_a_new_form_is_the_server_s(saving: Site) -> None:
    saving.draw("a (red:1.2) apple")
    assert saving.bodies[0]["options"] == {"prompt_syntax": "a1111"}
    saving.page.click("#more > summary")
    saving.page.select_option("#syntax", "plain")
    saving.draw("a (red:1.2) apple")
    saving.open()
    assert saving.page.input_value("#syntax") == "plain"  # the draft has the user's choice


@browser_only
def test_a_schedule_type_stands_beside_the_sampler(site: Site) -> None:
    page = site.page
    assert page.locator("#sampler option").all_inner_texts()[1:] == [
        spec.label for spec in SAMPLERS if spec.name != INVERSE
    ]
    assert page.locator("#sigmas option").all_inner_texts()[1:] == [curve.also[0] for curve in CURVES]
    page.select_option("#sigmas", "karras")
    assert next(curve.when for curve in CURVES if curve.name == "karras") in page.inner_text("#sampler-when")
    site.draw("a red apple")
    page.click("#more summary")
    page.click("#reset")
    site.draw("a red apple")
    assert [body.get("options", {}).get("sigmas") for body in site.bodies] == ["karras", None]
    restored = {"prompt": "a fox", "sampler": "dpmpp_2m", "options": {"sigmas": "karras"}}
    site.give(restored)
    page.wait_for_selector("text=Settings restored")
    assert (page.input_value("#sampler"), page.input_value("#sigmas")) == ("dpmpp_2m", "karras")
    assert page.locator("#other-options li").count() == 0
    site.draw("a fox")
    assert site.bodies[-1]["options"] == {"sigmas": "karras"}
    listed = {"prompt": "a fox", "options": {"sigmas": [14.6, 2.0, 0.0]}}  # which no field shows
    site.give(listed)
    page.wait_for_selector("#other-options li", state="attached")
    assert page.input_value("#sigmas") == ""


@thorough
def test_the_keys_are_listed_above_an_open_image(site: Site) -> None:
    """And act on nothing below the list."""
    site.draw("a red apple")
    site.page.click(".tile .open")
    site.page.keyboard.press("?")
    site.page.wait_for_selector("#help[open]")
    site.page.keyboard.press("Delete")
    site.close()
    assert site.count("#viewer[open]") == site.count(".tile[data-id]") == 1


@thorough
@pytest.mark.parametrize("width", [820, 1280])
def test_the_seed_is_above_generate(site: Site, width: int) -> None:
    """Also with an input image, styles and a sampler of many words."""
    site.page.set_viewport_size({"width": width, "height": 800})
    site.card(styles=("noto", "twemoji"))
    site.draw("a red apple")
    site.key("u")
    site.page.wait_for_selector("#input:not([hidden]) canvas")
    site.page.evaluate("document.getElementById('sampler-when').textContent = 'word '.repeat(14)")
    seed, actions = (site.page.locator(name).bounding_box() for name in ("#seed", ".actions"))
    assert seed["y"] + seed["height"] <= actions["y"]


@thorough
def test_two_selected_are_compared_unless_one_is_a_sheet(site: Site) -> None:
    for prompt in ("a red apple", "a blue pear", "a plum"):
        site.draw(prompt)
    for index in (0, 2):
        site.key("x", index)
    site.page.keyboard.press("c")
    site.page.wait_for_selector("#compare[open]")
    assert {site.page.inner_text("#compare-left"), site.page.inner_text("#compare-right")} == {"a red apple", "a plum"}
    site.close()
    site.page.click("#open-sheet")
    site.page.fill("#sheet-x-values", "2, 3")
    site.page.click("#sheet-draw")
    site.images(4)
    site.page.click("#selection-clear")
    for index in (0, 1):
        site.key("x", index)
    for act in (lambda: site.page.keyboard.press("c"), lambda: site.page.click("#selection-compare")):
        act()
        site.page.wait_for_selector(".toast >> text=sheet")
        site.page.click(".toast [aria-label=Dismiss]")
    assert not site.count("#compare[open]")


@thorough
def test_what_an_image_waits_for_is_on_its_tile(site: Site) -> None:
    """Loading and compiling have no time left that anybody knows."""
    turn = site.engine.turn
    with turn:
        site.draw("a red apple", wait=False)
        site.page.wait_for_selector(".tile.busy >> text=Waiting")
        job = site.engine.accepted[0]
        job.waits_for, job.seconds_left = "compiling, 2 of 5 programs", 60.0
        job.tell(Changed(Status.QUEUED))
        site.page.wait_for_selector(".tile.busy >> text=Compiling, 2 of 5 programs")
        assert site.page.inner_text("#queue-text") == "1 image in 1 job: compiling, 2 of 5 programs"
        job.waits_for = ""
        job.tell(Changed(Status.QUEUED))
        site.page.wait_for_selector(".tile.busy >> text=Waiting")
    site.idle()


@thorough
def test_a_server_that_gets_ready(site: Site) -> None:
    """The page is there at once, with the images that it kept, and says how far the models are."""
    site.draw("a red apple")
    starting = ["loading its models (1 of 7 programs)", "loading (3 of 7 programs); try again soon"]

    def models() -> Sequence[ModelCard]:
        if starting:
            raise Rejected(503, "starting", starting.pop(0), retry_after=1)
        return (CARD,)

    site.engine.models = models  # type: ignore[method-assign]
    site.page.goto(site.url)
    assert not site.page.locator("#examples-text").is_visible()
    site.images(1)
    site.page.wait_for_selector("#starting >> text=1 of 7")
    site.page.wait_for_selector("#starting >> text=3 of 7")
    assert "again" not in site.page.inner_text("#starting")  # the page does that
    site.page.wait_for_selector("#starting", state="hidden")
    site.page.wait_for_selector("body[data-ready]")
    site.draw("a blue pear")
    assert site.count(".tile[data-id]") == 2


@thorough
def test_a_job_from_before_the_models_are_known_is_shown_once(site: Site) -> None:
    """Until then the model's fields wait, and typing loses no settings of the last visit."""
    engine, known = site.engine, site.engine.models
    site.page.fill("#steps-number", "7")
    engine.refusal = Rejected(503, "starting", "loading (1 of 7)", retry_after=1)

    def models() -> Sequence[ModelCard]:
        if engine.refusal:
            raise engine.refusal
        return known()

    engine.models = models  # type: ignore[method-assign]
    site.page.goto(site.url)
    site.draw("a red apple", wait=False)
    site.page.wait_for_selector(".tile.waits >> text=loading (1 of 7)")
    fields = ("#size", "#sampler", "#sigmas", "#steps", "#guidance")
    assert all(site.page.locator(field).is_disabled() for field in fields)
    with engine.paused():
        engine.refusal = None
        site.page.wait_for_selector("body[data-ready]")
        site.page.wait_for_selector(".tile.drawing")
        assert site.count(".tile") == len(engine.accepted) == 1
        site.page.click(".tile .cancel")
        site.idle()
    assert (site.count(".tile"), engine.accepted[0].status) == (0, Status.CANCELLED)
    assert (site.page.input_value("#prompt"), site.page.input_value("#steps-number")) == ("a red apple", "7")
    assert site.page.locator("#steps-number").is_enabled()


@thorough
def test_a_model_is_chosen_while_the_server_starts(site: Site) -> None:
    """The models are known before the first is loaded; the job waits, and is for the model that was chosen."""
    engine = site.engine
    engine.cards = (CARD, replace(CARD, id="other"))
    engine.shelf = {"stub": (), "other": ()}
    engine.starting, engine.refusal = "1 of 7 programs", Rejected(503, "starting", "loading (1 of 7)", retry_after=1)
    site.open()
    site.page.wait_for_selector("#starting >> text=1 of 7")
    site.page.select_option("#model", "other")
    site.draw("a red apple", wait=False)
    site.page.wait_for_selector(".tile.waits >> text=loading (1 of 7)")
    assert "Next try" not in site.page.inner_text(".tile.waits")  # the page asks until the server is ready
    engine.starting, engine.refusal = "", None
    site.page.wait_for_selector("#starting", state="hidden")
    site.idle()
    assert engine.accepted[-1].request.model == "other"


@thorough
def test_hints_stand_below_the_prompt(site: Site) -> None:
    site.engine.hints = ("stub has never seen: elephant", "(red:1.5) is read as text")
    site.draw("a (red:1.5) elephant")
    assert site.page.inner_text("#hints").split("\n") == [*site.engine.hints]
    site.page.press("#prompt", "x")
    assert site.page.inner_text("#hints") == ""
    site.engine.hints = ()
    site.draw("an apple")
    assert site.page.inner_text("#hints") == ""


@browser_only
def test_words_that_the_model_has_never_seen_lead_to_other_models(site: Site) -> None:
    cure = "canvax info stub --prompts lists what it knows; other pictures need another model"
    site.engine.hints = (f"prompt has words that stub has never seen: elephant; {cure}", "(red:1.5) is read as text")
    site.draw("a (red:1.5) elephant")
    assert "canvax info" not in site.page.inner_text("#hints")
    site.page.click("#hints >> text=Other models")
    assert site.page.locator("#other-models[open] code").first.is_visible()


@browser_only
def test_brackets_are_read_as_the_syntax_that_is_chosen(site: Site) -> None:
    page = site.page
    page.fill("#prompt", "a (red:1.5) apple")
    assert "(red:1.5)" in page.inner_text("#syntax-note")
    page.click("#syntax-use")
    assert page.locator("#syntax-note").is_hidden()
    site.draw("a (red:1.5) apple")
    assert site.bodies[-1]["options"] == {"prompt_syntax": "a1111"}
    assert page.locator("#quality-why").is_hidden()
    page.check("#quality")
    assert page.locator("#quality-why").is_visible()
    page.click("#more summary")
    page.fill("#clip-skip", "2")
    page.select_option("#syntax", "plain")
    site.draw("a pear")
    assert site.bodies[-1]["options"] == {"clip_skip": 2, "quality": "fast"}
    site.key("r", 1)
    assert [page.input_value(f"#{name}") for name in ("syntax", "clip-skip")] == ["a1111", "0"]
    assert not page.is_checked("#quality")
    site.key("r", 0)
    assert page.is_checked("#quality")


@thorough
@pytest.mark.parametrize(
    ("syntax", "text", "heavier", "lighter"),
    [
        ("plain", "a red apple", "a red (apple:1.1)", "a red (apple:0.9)"),
        ("compel", "a red apple", "a red (apple)1.1", "a red (apple)0.9"),
        ("a1111", "a (red apple:1.2)", "a (red apple:1.3)", "a (red apple:1.1)"),
    ],
)
def test_arrows_change_the_weight_of_words(site: Site, syntax: str, text: str, heavier: str, lighter: str) -> None:
    page = site.page
    page.evaluate("for (const node of document.querySelectorAll('details')) node.open = true")
    page.select_option("#syntax", syntax)
    page.fill("#prompt", text)
    page.press("#prompt", "End")
    for _ in range(2 if text.endswith(")") else 0):
        page.press("#prompt", "ArrowLeft")
    if text.endswith(")"):
        for _ in range(4):  # in front of the weight
            page.press("#prompt", "ArrowLeft")
    page.press("#prompt", "Control+ArrowUp")
    assert page.input_value("#prompt") == heavier
    assert page.input_value("#syntax") == ("a1111" if syntax == "plain" else syntax)
    page.press("#prompt", "Control+ArrowDown")
    page.press("#prompt", "Control+ArrowDown")
    assert page.input_value("#prompt") == lighter
    page.press("#prompt", "Control+z")
    assert page.input_value("#prompt") != lighter


@thorough
def test_names_of_adapters_are_completed(site: Site) -> None:
    page = site.page
    files = ("drink", "thin line", "ink", "a/inky")
    torn = AdapterCard("inert", "inert", "inert.safetensors", fault="inert.safetensors is damaged")
    site.engine.shelf = {CARD.id: (*(AdapterCard(name, name, f"{name}.safetensors") for name in files), torn)}
    site.open()
    assert page.locator("#adapter-add option:disabled").get_attribute("title") == torn.fault
    page.click("#prompt")
    page.keyboard.type("a fox <lora:in")
    assert page.locator("#completions li").all_inner_texts() == ["ink", "a/inky", "drink", "thin line"]
    page.keyboard.press("Enter")
    assert page.input_value("#prompt") == "a fox <lora:ink:1>"
    assert page.locator("#completions").is_hidden()
    assert not site.bodies  # Enter has chosen the name and has not generated


@browser_only
def test_embeddings_of_the_folder(site: Site) -> None:
    """A chip writes a name into the text that was last written in; what a name is, is said under the prompt."""
    page = site.page
    page.fill("#prompt", "a fox")
    page.fill("#negative", "blurry")
    assert page.inner_text("#words-note") == ""
    page.click("#embeddings summary")
    page.click("#embeddings-left summary")
    assert page.locator("#embedding-list button").all_inner_texts() == ["wool"]
    assert (page.inner_text("#embeddings-left dt"), page.inner_text("#embeddings-left dd")[:5]) == ("yarn", "yarn.")
    page.click("#embedding-list button:text('wool')")
    assert (page.input_value("#prompt"), page.input_value("#negative")) == ("a fox", "blurry, wool")
    page.fill("#prompt", "woolly yarn")
    notes = page.locator("#words-note li").all_inner_texts()
    assert [note.split()[0] for note in notes] == ["yarn"]
    assert "yarn.safetensors" in notes[0]
    assert page.locator("#negative-words-note li").count() == 1
    assert page.inner_text("#negative-words-note").split(":")[0] == "wool"
    assert page.inner_text("#embeddings-text") == "wool"
    page.fill("#negative", "")
    page.fill("#prompt", "a fox")
    assert page.inner_text("#words-note") == page.inner_text("#negative-words-note") == ""


@thorough
def test_selected_images_are_saved_as_one_zip(site: Site) -> None:
    page = site.page
    for prompt in ("an apple", "an apple", "a pear"):
        site.draw(prompt)
    site.key("x")
    page.click("#selection-all")
    with page.expect_download() as download:
        page.click("#selection-save")
    with zipfile.ZipFile(download.value.path()) as archive:
        assert archive.testzip() is None
        assert len(set(archive.namelist())) == 3
        with archive.open(archive.namelist()[0]) as file:
            assert Image.open(file).size == (64, 64)


@thorough
def test_mask_undo_erase_and_keys(site: Site) -> None:
    site.draw("a red apple")
    site.page.focus(".tile .open")
    press = site.page.keyboard.press
    press("p")
    site.page.wait_for_selector("#mask[open]")
    press("Space")
    assert site.page.inner_text("#mask-use") == "Use the mask"
    press("Control+z")
    assert site.page.inner_text("#mask-use") == "Use without a mask"
    press("Control+Shift+z")
    press("e")
    press("Space")
    assert site.page.inner_text("#mask-use") == "Use without a mask"
    site.close()
    assert site.count("dialog[open]") == 0


@thorough
def test_a_dropped_image_brings_its_settings(site: Site) -> None:
    site.card(controls=NETS[:1])
    site.draw("a red apple")
    data = site.engine.accepted[0].pictures[0].data
    under_a_mask(site)
    site.drop("#control", Image.new("RGB", (64, 64)))
    site.page.wait_for_selector("#control-remove", state="visible")
    site.page.click("#adapters summary")
    site.page.select_option("#adapter-add", "ink")
    assert "Trained with ink. Made for sampler LCM, steps 4." in site.page.inner_text("#adapter-list")
    site.page.fill("#prompt", "")
    site.give(data=data)
    site.page.wait_for_selector("text=Settings restored")
    assert site.page.input_value("#prompt") == "a red apple"
    assert site.page.get_attribute("#seed-lock", "aria-pressed") == "true"
    site.draw("a red apple")
    assert not {"image", "mask", "control", "adapters"} & site.bodies[1].keys()
    site.give({"prompt": "a fox", "options": {"clip_skip": 1}})
    site.page.wait_for_selector("#more-text >> text=clip skip", state="attached")
    assert site.page.input_value("#clip-skip") == "1"
    site.drop("body", Image.new("RGB", (64, 64)))
    site.page.wait_for_selector("#input", state="visible")
    assert site.page.locator("#drop").is_hidden()


@browser_only
def test_models_that_a_controlnet_does_not_fit(site: Site) -> None:
    """The list names the network, and the choice of the model the reason."""
    page = site.page
    alien = ControlCard("alien", fault="alien is for Stable Diffusion XL.")
    site.engine.cards = (CARD, replace(CARD, id="other", controls=(NETS[0], alien)))
    site.open()
    first, other = page.locator("#model option").all_inner_texts()
    assert "alien" not in first
    assert "other" in other
    assert "alien" in other
    page.select_option("#model", "other")
    assert "alien is for Stable Diffusion XL" in page.locator(".toast").inner_text()
    page.click("#control summary")
    assert page.locator("#control-network option:disabled").get_attribute("value") == "alien"
    site.drop("#control", Image.new("RGB", (64, 64)))
    page.wait_for_selector("#control-remove", state="visible")
    site.draw("a red apple")
    assert isinstance(site.bodies[0]["control"], str)
    assert "controlnet" not in site.bodies[0]


@browser_only
def test_controlnets_of_the_folder(site: Site) -> None:
    """Beside those of the start; those of another family are listed and cannot be chosen."""
    page = site.page
    alien = ControlCard("alien", fault="alien is for Stable Diffusion XL")
    site.card(controlnets=(alien,))
    assert page.locator("#control").is_hidden()
    site.card(controls=NETS, controlnets=(ControlCard("depth"), ControlCard("edges"), alien))
    page.click("#control summary")
    assert page.locator("#control-network option").all_inner_texts()[:3] == ["edges", "all", "depth"]
    assert page.locator("#control-network option:disabled").get_attribute("value") == "alien"
    site.drop("#control", Image.new("RGB", (64, 64)))
    page.wait_for_selector("#control-remove", state="visible")
    page.select_option("#control-network", "depth")
    site.draw("a red apple")
    body = site.bodies[0]
    assert body["controlnet"] == "depth"
    assert decoded(body["control"]).size == (64, 64)
    page.select_option("#control-network", "edges")
    site.draw("a red apple")
    assert "controlnet" not in site.bodies[1]
    assert [shown is None for shown in site.bodies[1]["control"]] == [False, True]
    site.open()
    page.locator(".tile .open").nth(1).click()
    page.click("#viewer-actions >> text=Restore settings")
    page.wait_for_selector("#control-remove", state="visible")
    assert page.input_value("#control-network") == "depth"


@browser_only
def test_adapters_and_images_beside_the_prompt(site: Site) -> None:
    page = site.page
    assert page.locator("#control").is_hidden()
    assert page.locator("#image-prompt").is_hidden()
    site.card(controls=NETS, ip_adapters=("plain", "plus-face"))
    page.click("#adapters summary")
    page.select_option("#adapter-add", "ink")
    page.fill("#adapter-ink", "0.6")
    for kind, colour in (("control", "blue"), ("image-prompt", "red")):
        page.click(f"#{kind} summary")
        wide = io.BytesIO()
        Image.new("RGB", (2048, 1024), colour).save(wide, "png")
        page.set_input_files(f"#{kind}-file", {"name": "a.png", "mimeType": "image/png", "buffer": wide.getvalue()})
        page.wait_for_selector(f"#{kind}-remove", state="visible")
        page.fill(f"#{kind}-scale", "0.5")
    page.select_option("#control-network", "all")
    page.select_option("#control-type", "canny")
    page.select_option("#control-from", "canny")
    page.select_option("#image-prompt-network", "plus-face")
    assert (page.inner_text("#adapters-text"), page.inner_text("#control-text")) == ("ink 0.6", "canny 0.5")
    assert page.inner_text("#image-prompt-text") == "plus-face 0.5"
    page.wait_for_selector("#control-prepared-canvas", state="visible")
    size = "document.getElementById('control-prepared-canvas')"
    assert page.evaluate(f"[{size}.width, {size}.height]") == [64, 64]
    site.draw("a red apple")
    body = site.bodies[0]
    assert (body["adapters"], body["control_scale"], body["control"][0]) == ({"ink": 0.6}, 0.5, None)
    assert body["control_from"] == "canny"
    assert decoded(body["control"][1]["canny"]).size == (64, 64)  # cropped, as an input image is
    assert {**body["image_prompt"], "image": None} == {"scale": 0.5, "adapter": 1, "image": None}
    assert decoded(body["image_prompt"]["image"]).size == (1024, 512)  # whole, as the pipeline has it
    page.click('[aria-label="Remove ink"]')
    page.click("#control-remove")
    page.click("#image-prompt-remove")
    site.draw("a pear")
    beside = {"adapters", "control", "control_scale", "steered", "image_prompt", "prompted"}
    assert not beside & site.bodies[1].keys()
    site.open()  # what is kept with an image outlives the page
    page.locator(".tile .open").nth(1).click()
    assert {"ink 0.6", "canny 0.5", "plus-face 0.5"} <= set(page.locator("#viewer-settings dd").all_inner_texts())
    page.click("#viewer-actions >> text=Restore settings")
    page.wait_for_selector("#image-prompt-remove", state="visible")
    site.draw("a plum")
    again = site.bodies[2]
    assert {name: again[name] for name in beside & again.keys()} == {name: body[name] for name in beside & body.keys()}


@thorough
def test_a_second_pass(site: Site) -> None:
    """It is offered where its size is ready; what is made of its image begins from all of its pixels."""
    site.card(sizes=((64, 64), (96, 64), (128, 128)), hires_strength=0.1)
    page = site.page
    page.click("#hires-fold summary")
    assert page.locator("#hires option").all_inner_texts() == ["None", "2 ×, 128 × 128"]
    assert page.input_value("#hires-strength") == "0.1"  # the model's own
    page.select_option("#hires", "2")
    page.select_option("#hires-method", "latent")
    page.fill("#hires-steps", "7")
    site.draw("a red apple")
    options = {"hires": 2, "hires_strength": 0.7, "hires_method": "latent", "hires_steps": 7}
    assert site.bodies[0]["options"] == options
    page.select_option("#size", "96x64")
    assert page.locator("#hires option").count() == 1
    site.key("e")
    site.images(2)
    assert "hires" not in site.bodies[1].get("options", {})
    site.key("r", -1)
    site.draw("a red apple")
    again, before = ({name: body[name] for name in ("width", "height", "options")} for body in site.bodies[::2])
    assert again == before


@thorough
def test_reference_images(site: Site) -> None:
    """They are added, reordered and removed, also out of the history; a mask asks for inpainting with the first."""
    site.card(references=3)
    page = site.page

    def colours() -> list[Any]:
        body = site.bodies[-1]
        sent = [text for text in (body.get("image"), *body.get("references", ())) if text]
        return [decoded(text).convert("RGB").getpixel((0, 0)) for text in sent]

    red, green, blue = (255, 0, 0), (0, 128, 0), (0, 0, 255)
    for colour in ("red", "green", "blue", "red"):  # there is no room for the last one
        site.drop("#input", Image.new("RGB", (96 if colour == "green" else 64, 64), colour))
    page.wait_for_selector(".toast >> text=At most 3")
    page.wait_for_timeout(100)
    assert page.inner_text("#live").startswith("At most 3")
    assert page.inner_text("#input-hint") == "read together with the prompt"
    assert [li.inner_text().split() for li in page.locator("#references li").all()] == [["2", "cut"], ["3"]]
    page.select_option("#size", "96x64")
    assert page.inner_text("#input-hint").endswith("number 1 is cut at its edges to fit the size")
    page.wait_for_selector("#references li:nth-child(2) >> text=cut")
    assert page.locator("#references li").nth(0).inner_text().split() == ["2"]
    page.select_option("#size", "64x64")
    site.draw("a red apple")
    assert colours() == [red, green, blue]
    assert "strength" not in site.bodies[-1]
    page.click('[aria-label="Move reference image 2 forward"]')
    page.click('[aria-label="Remove reference image 3"]')
    page.wait_for_selector("#references li >> nth=1", state="detached")
    site.draw("a red apple")
    assert colours() == [green, red]
    site.key("u")
    page.wait_for_selector("#references li >> nth=1")
    site.draw("a red apple")
    assert colours()[:2] == [green, red]
    assert len(colours()) == 3
    site.key("r", -1)
    site.draw("a red apple")
    assert colours() == [red, green, blue]
    page.click("#input-mask")
    page.locator("#mask-canvas:focus").wait_for()  # the editor opens when the image is decoded
    page.keyboard.press("Space")
    page.click("#mask-use")
    page.wait_for_selector("#strength-field", state="visible")
    assert "2 more reference images" in page.inner_text("#input-hint")  # which a mask leaves out
    site.draw("a red apple")
    assert colours() == [red]
    assert "mask" in site.bodies[-1]


@thorough
def test_a_model_that_needs_an_image_asks_for_one(site: Site) -> None:
    """Its card is there from the start, and takes one image; a damaged one is not announced as added."""
    site.card(tasks=CARD.tasks[1:])
    page = site.page
    assert page.locator("#input-add").is_visible()
    assert "add one" in page.inner_text("#input-hint")
    assert page.locator("#strength-field").is_hidden()
    good = encoded(Image.new("RGB", (64, 64)), {})
    for data, announced in ((b"none", "cannot read"), (good, "Added as input image")):
        file = {"name": "a.png", "mimeType": "image/png", "buffer": data}
        page.set_input_files("#input-file", file)
        page.wait_for_function("(text) => document.getElementById('live').textContent.includes(text)", arg=announced)
        page.wait_for_timeout(100)
        assert announced in page.inner_text("#live")
    assert page.locator("#input-add").is_hidden()
    assert not page.inner_text("#input-hint")
    site.draw("a red apple")
    assert "image" in site.bodies[0]


@thorough
def test_a_model_that_fills_masks_asks_for_one(site: Site) -> None:
    site.card(tasks=("inpainting", "image-to-image", "upscaling"))
    page, hint = site.page, site.page.locator("#input-hint")
    assert "mask" not in hint.inner_text()
    site.drop("#input", Image.new("RGB", (64, 64)))
    page.wait_for_selector("#input-mask", state="visible")
    assert "paint one" in hint.inner_text()
    page.click("#input-extend")
    page.wait_for_selector("text=Change the mask")
    assert not hint.inner_text()


@thorough
def test_sizes_above_the_limit_are_not_chosen(site: Site) -> None:
    """A server compiles sizes of up to four times the pixels of its largest one; the model's may be larger."""
    site.card(any_size=True, native=(1024, 1024), sizes=((64, 64),))
    page = site.page
    assert page.input_value("#size") == "64x64"
    listed = [option.get_attribute("value") for option in page.locator("#size option").all()]
    sides = [[int(side) for side in text.split("x")] for text in listed if text != "other"]
    assert len(sides) > 3
    assert all(wide * tall <= 4 * 64 * 64 for wide, tall in sides)
    assert [option.get_attribute("value") for option in page.locator("#hires option").all()] == ["1", "1.5", "2"]
    site.drop("body", Image.new("RGB", (1600, 1200)))
    page.wait_for_selector("#input", state="visible")
    assert page.input_value("#size") in listed[:-1]
    site.give({"prompt": "a fox", "width": 1024, "height": 1024})
    page.wait_for_selector(".toast >> text=the size 1024 × 1024 (now 64 × 64)")
    sides = [size_of(site.engine.cards[0], Image.new("L", (side, side))) for side in (1024, 128)]
    assert sides == [(64, 64), (128, 128)]


@thorough
def test_fields_that_the_model_cannot_use_are_not_there(site: Site) -> None:
    site.card(guided=False, negative_prompt=False, prompt_weights=False, clip_skip=0, samplers=("ddim",))
    page = site.page
    for name in ("negative", "guidance", "syntax", "clip-skip", "style"):
        assert page.locator(f"#{name}-field").is_hidden()
    assert page.locator("#sampler option").count() == 2
    site.draw("a (red:1.5) apple")
    assert page.locator("#syntax-note").is_hidden()
    assert not {"guidance_scale", "negative_prompt", "options"} & site.bodies[0].keys()
    site.card(no_guidance=0.0, guidance_scale=0.0)
    page.wait_for_selector("#negative:disabled")
    page.fill("#guidance-number", "0.5")
    page.fill("#negative", "grey")
    site.draw("a red apple")
    assert (site.bodies[1]["guidance_scale"], site.bodies[1]["negative_prompt"]) == (0.5, "grey")


@browser_only
def test_vaes_of_the_folder(site: Site) -> None:
    """One is sent with each job, stays chosen, and comes back from images, by whatever ending they name it."""
    page = site.page
    assert page.locator("#vae-field").is_hidden()
    site.card(vaes={"vae-ft-mse": "", "xl": "xl.safetensors makes other latents"})
    assert page.locator("#vae option:disabled").evaluate_all("nodes => nodes.map(node => node.value)") == ["xl"]
    site.draw("a red apple")
    page.select_option("#vae", "vae-ft-mse")
    site.draw("a red apple")
    assert [body.get("vae") for body in site.bodies] == [None, "vae-ft-mse"]
    site.open()
    assert page.input_value("#vae") == "vae-ft-mse"
    for name, chosen, said in (("", "", False), ("VAE-ft-mse.ckpt", "vae-ft-mse", False), ("gone", "", True)):
        site.give({"prompt": "a fox", **({"vae": name} if name else {})})
        toast = page.locator(".toast", has_text="Settings restored").last
        toast.wait_for()
        assert (page.input_value("#vae"), "the VAE" in toast.inner_text()) == (chosen, said)
        toast.locator("[aria-label=Dismiss]").click()


@thorough
def test_two_models(site: Site) -> None:
    """What belongs to a model stays with its images, whichever is chosen meanwhile."""
    page, engine = site.page, site.engine
    engine.cards = (CARD, replace(CARD, id="other", sampler="DDIM", no_guidance=0.0, styles=("flat",)))
    engine.shelf = {"other": engine.shelf["stub"], "stub": ()}
    site.open()
    page.select_option("#model", "other")
    page.click("#adapters summary")
    page.select_option("#adapter-add", "ink")
    page.select_option("#style", "flat")
    listed = engine.adapters

    def slowly(model: str | None) -> Sequence[AdapterCard]:
        time.sleep(0.2 if model == "other" else 0)
        return listed(model)

    engine.adapters = slowly
    site.open()
    assert (page.input_value("#style"), page.inner_text("#adapters-text")) == ("flat", "ink 1")
    with engine.turn:
        site.draw("a red apple", wait=False)
        page.wait_for_selector(".tile.busy >> text=Waiting")
        page.select_option("#model", "stub")
    site.idle()
    site.key("Enter")
    assert {"other", "DDIM", "ink 1"} <= set(page.locator("#viewer-settings dd").all_inner_texts())
    page.click("#viewer-actions >> text=Restore settings")
    site.draw("a red apple")
    assert (site.bodies[1]["model"], site.bodies[1]["adapters"]) == ("other", {"ink": 1})
    site.open()
    assert page.inner_text("#adapters-text") == "ink 1"
    engine.shelf["stub"] = engine.shelf["other"]
    page.click("#adapters summary")
    page.fill("#adapter-ink", "0.5")
    page.select_option("#model", "stub")
    page.focus(".tile .open")
    page.keyboard.press("r")  # which waits for the list of the other model
    page.wait_for_function("document.getElementById('model').value === 'other'")
    page.select_option("#model", "stub")
    page.wait_for_timeout(400)
    assert page.inner_text("#adapters-text") == "ink 0.5"
    site.key("e")
    site.images(3)
    assert (site.bodies[2]["model"], site.bodies[2]["guidance_scale"]) == ("other", 0)


@browser_only
def test_another_model_keeps_what_was_chosen(site: Site) -> None:
    """The rest becomes the model's; what it cannot do is changed and said; a reload changes nothing of it."""
    page, engine = site.page, site.engine
    fast = replace(
        CARD, id="fast", steps=2, guidance_scale=1.0, max_steps=8, samplers=("ddim", "euler_a"), sampler="ddim",
        sizes=((96, 96),), native=(96, 96),
    )  # fmt: skip
    large = replace(CARD, id="large", steps=30, guidance_scale=5.0, any_size=True, size_step=16)
    engine.cards = (CARD, fast, large)
    engine.shelf = {card.id: () for card in engine.cards}
    site.open()

    def form() -> list[str]:
        names = ("steps-number", "guidance-number", "sampler", "width", "height")
        return [page.input_value(f"#{name}") for name in names]

    def change(model: str) -> list[str]:
        page.select_option("#model", model)
        before = form()
        site.open()
        assert form() == before
        return before

    assert change("large") == ["30", "5", "", "64", "64"]
    assert change("stub") == ["4", "7.5", "", "64", "64"]
    page.fill("#steps-number", "7")
    assert change("large") == ["7", "5", "", "64", "64"]
    page.select_option("#sampler", "euler_a")
    page.select_option("#sigmas", "karras")
    page.fill("#guidance-number", "3")
    page.select_option("#size", "other")
    page.fill("#width", "112")
    page.fill("#height", "80")
    assert change("fast") == ["7", "3", "euler_a", "96", "96"]
    assert page.input_value("#sigmas") == "karras"
    page.select_option("#model", "large")
    page.select_option("#sampler", "dpmpp_2m")
    page.fill("#steps-number", "20")
    page.select_option("#model", "fast")
    said = page.locator(".toast p", has_text="steps 20 (now 8)").inner_text()
    assert [word in said for word in ("DPM++ 2M", "guidance")] == [True, False]
    assert form() == ["8", "3", "", "96", "96"]
    page.evaluate("document.getElementById('reset').click()")
    assert change("large") == ["30", "5", "", "64", "64"]
    made = {"prompt": "a fox", "num_inference_steps": 30, "sampler": "ddim", "width": 88, "height": 64}
    site.give(made)
    page.wait_for_function("() => document.getElementById('prompt').value === 'a fox'")
    page.select_option("#model", "stub")
    assert form() == ["30", "7.5", "ddim", "96", "64"]  # though 30 steps are what the other model has


@browser_only
def test_use_of_a_twin_changes_the_model_alone(site: Site) -> None:
    """What did not fit before is tried again, and what was changed meanwhile stays."""
    page, engine = site.page, site.engine
    twin = replace(CARD, steps=50, sizes=((64, 64), (128, 64)))
    engine.cards = (CARD, replace(twin, id="a/twin"), replace(twin, id="b/twin"))
    engine.shelf = {card.id: () for card in engine.cards}
    site.open()
    settings = {
        "prompt": "a fox", "model": "twin", "num_inference_steps": 4, "guidance_scale": 7, "sampler": "ddim",
        "width": 128, "height": 64, "options": {"sigmas": "karras"},
    }  # fmt: skip
    data = encoded(Image.new("RGB", (64, 64)), settings)
    names = ("model", "steps-number", "guidance-number", "sampler", "sigmas", "size")
    for written, steps in ((None, "4"), ("9", "9")):
        page.select_option("#model", "stub")
        site.give(data=data)
        notice = page.locator(".toast", has_text="without the model twin")
        notice.wait_for()
        assert "without" in notice.inner_text()
        if written:
            page.fill("#steps-number", written)
        notice.locator("text=Use b/twin").click()
        notice.wait_for(state="detached")
        assert [page.input_value(f"#{name}") for name in names] == ["b/twin", steps, "7", "ddim", "karras", "128x64"]
        assert "without" not in "".join(page.locator(".toast").all_inner_texts())


@browser_only
def test_loras_of_a_restored_prompt_are_offered(site: Site) -> None:
    """The notice says what is left, closes with the last of it, and leaves Generate free on a phone."""
    page, engine = site.page, site.engine
    files = ("ink", "a/twin", "b/twin", "wash", "cold")
    engine.shelf = {CARD.id: tuple(AdapterCard(name, name, f"{name}.safetensors") for name in files)}
    page.set_viewport_size({"width": 390, "height": 700})
    site.open()
    missing = dict.fromkeys(("<lora:ink:0.5>", "<lora:twin:1>", "<lora:old/cold:0.7>"), "")
    made: dict[str, Any] = {
        "prompt": "a fox, , red, ,",
        "adapters": {"wash": {"weight": 0.2, "file": "a"}},
        "other": missing,
    }
    site.give(made)
    notice = page.locator(".toast p", has_text="without")
    notice.wait_for()
    assert page.input_value("#prompt") == "a fox, red"
    offers = page.locator(".toast .link").all_inner_texts()
    assert offers == ["Use a/twin", "Use b/twin", "Use cold", "Add as input too"]  # ink is there and fits
    assert page.locator("#adapters-text").text_content() == "wash 0.2, ink 0.5"
    page.evaluate("document.getElementById('fold').open = true")  # so that Generate stands at the bottom
    toast, generate = page.locator(".toast").bounding_box(), page.locator("#draw").bounding_box()
    assert toast["y"] + toast["height"] <= generate["y"]
    page.click(".toast >> text=Use cold")
    page.wait_for_selector(".toast p:not(:has-text('cold'))")
    assert "twin" in notice.inner_text()
    page.click(".toast >> text=Use b/twin")
    notice.wait_for(state="detached")
    assert page.locator(".toast .link").all_inner_texts() == ["Add as input too"]
    assert page.locator("#adapters-text").text_content() == "wash 0.2, ink 0.5, cold 0.7, b/twin 1"
    page.reload()
    page.wait_for_selector("body[data-ready]")
    site.draw("a red apple")
    assert site.bodies[0]["adapters"] == {"wash": 0.2, "ink": 0.5, "cold": 0.7, "b/twin": 1}
    made["adapters"]["gone"] = {"weight": 1, "file": "a"}
    site.give({**made, "prompt": "", "model": CARD.id, "other": {"<lora:ink>": "", "<lora:cold:1:0.3>": ""}})
    page.wait_for_selector(".toast p:has-text('gone')")  # of canvax's own images too
    assert page.locator("#adapters-text").text_content() == "wash 0.2, ink 1"
    assert page.input_value("#prompt") == "a red apple <lora:cold:1:0.3>"  # the form has one weight


@thorough
def test_images_of_comfyui(site: Site) -> None:
    """A LoRA with two strengths goes into the prompt, one of another folder if wanted; the program of settings that
    cannot be read is named."""
    page, others = site.page, json.loads((Path(__file__).parent / "data/images_of_others.json").read_text())
    graph = next(row["texts"]["prompt"] for row in others if row["from"] == "ComfyUI")
    unread = graph | {"6": {"class_type": "Wildcards", "inputs": {}}}
    for name, each, shown in (
        ("ink", graph | {"13": graph["3"]}, "ComfyUI"),
        ("ink", unread, "prompt: cannot be read"),
        ("ink", graph, "Settings restored"),
        ("old/ink", graph, "ink:1.0"),
    ):
        site.engine.shelf = {CARD.id: (AdapterCard(name, name, "ink.safetensors"),)}
        site.open()
        info, file = PngInfo(), io.BytesIO()
        info.add_text("prompt", json.dumps(each))
        Image.new("RGB", (64, 64)).save(file, "png", pnginfo=info)
        site.give(data=file.getvalue())
        page.wait_for_selector(f".toast p:has-text('{shown}')")
        if name == "old/ink":
            page.click(f".toast >> text=Use {name}")
        if each is graph:
            assert not page.locator(".toast p:has-text('ink')").count()
            assert page.input_value("#prompt") == f"a (castle:1.2) <lora:{name}:1.0:0.7>"
            assert page.input_value("#negative") == "text, watermark"


@thorough
def test_an_image_beside_the_prompt_is_dropped_or_pasted_where_it_belongs(site: Site) -> None:
    site.card(controls=NETS[:1], ip_adapters=("plain",))
    site.drop("#control", Image.new("RGB", (64, 64)))
    site.page.wait_for_selector("#control-remove", state="visible")
    site.drop("#image-prompt", Image.new("RGB", (48, 64)), ("paste",))
    site.page.wait_for_selector("#image-prompt-remove", state="visible")
    for name in ("input", "control-network-field", "image-prompt-network-field"):
        assert site.page.locator(f"#{name}").is_hidden()
    site.draw("a red apple")
    body = site.bodies[0]
    assert decoded(body["control"]).size == (64, 64)
    assert decoded(body["image_prompt"]["image"]).size == (48, 64)
    site.key("Shift+V")
    site.images(2)
    assert {"image", "control", "image_prompt"} <= site.bodies[1].keys()
    site.card()
    site.key("r")  # a server without the networks takes the rest of the settings
    site.page.wait_for_selector("#input", state="visible")
    site.draw("a pear")
    assert {"image", "control", "image_prompt"} & site.bodies[2].keys() == {"image"}


@thorough
def test_vary_and_compare(site: Site) -> None:
    site.draw("a red apple")
    site.key("v")
    site.images(2)
    site.key("Shift+V")
    site.images(3)
    assert "image" not in site.bodies[1]
    assert decoded(site.bodies[2]["image"]).size == (64, 64)
    for tile in range(2):
        site.key("x", tile)
    site.page.click("#selection-compare")
    site.page.keyboard.press("Home")
    assert site.page.evaluate("document.getElementById('compare-over').style.clipPath") == "inset(0px 100% 0px 0px)"


@thorough
def test_upscale(site: Site) -> None:
    site.draw("a red apple")
    site.page.click(".tile .open")
    site.page.click("#viewer-actions >> text=Upscale 2 ×")
    site.images(2)
    first = site.bodies[1]
    assert (first["upscale"], first.get("width"), decoded(first["image"]).size) == (2, None, (64, 64))
    assert first["prompt"] == ""  # a part of an apple is no apple
    assert site.page.inner_text(".tile[data-id] .caption >> nth=0") == "a red apple"
    site.key("e")  # what was upscaled can be again
    site.images(3)
    assert decoded(site.bodies[2]["image"]).size == (128, 128)
    site.key("v")  # a new seed begins from the same image
    site.images(4)
    assert (site.bodies[3]["upscale"], decoded(site.bodies[3]["image"]).size) == (2, (128, 128))
    site.key("Shift+V")
    site.images(5)
    assert (site.bodies[4]["upscale"], decoded(site.bodies[4]["image"]).size) == (1, (256, 256))
    site.page.click(".tile .open")
    assert "256 × 256" in site.page.inner_text("#viewer-settings")
    site.page.click("#viewer-actions >> text=Restore settings")
    site.page.wait_for_selector(".toast >> text=upscaled")
    site.page.wait_for_timeout(200)  # what closes the viewer leaves the focus where it is
    assert site.page.evaluate("document.activeElement.id") == "prompt"
    assert site.page.input_value("#prompt") == "a red apple"
    assert site.page.locator("#input").is_hidden()  # an upscale begins from no input of the form
    assert site.page.input_value("#seed") == str(site.engine.accepted[0].pictures[0].seed)  # of the image before
    assert site.page.input_value("#size") == "64x64"
    site.page.click(".toast >> text=Upscale again")
    site.images(6)
    assert site.bodies[5]["upscale"] == 1


@thorough
@pytest.mark.parametrize("how", ["the folder", "a file"])
def test_an_upscaled_image_of_elsewhere(saving: Site, how: str) -> None:
    """Its size is that before it was upscaled; the seed of that image is not in the file."""
    made = {"prompt": "", "seed": 7, "width": 192, "height": 128, "upscale": {"scale": 2.0, "prompt": "a fox"}}
    assert saving.folder
    saving.folder.mkdir()
    image = Image.new("RGB", (192, 128))
    save_numbered(saving.folder, image, made, 7)
    saving.open()
    page = saving.page
    if how == "the folder":
        saving.key("r")
    else:
        saving.give(data=encoded(image, made))
    page.wait_for_selector(".toast >> text=upscaled 2 ×")
    assert (page.input_value("#size"), page.input_value("#seed")) == ("96x64", "")
    assert page.input_value("#prompt") == "a fox"


@thorough
def test_an_outpainted_image_of_elsewhere(saving: Site) -> None:
    """It is not outpainted once more; the form leaves that out and says so."""
    made = {
        "prompt": "a fox",
        "seed": 7,
        "width": 96,
        "height": 64,
        "options": {"outpaint": [32, 0, 0, 0], "clip_skip": 1},
    }
    assert saving.folder
    saving.folder.mkdir()
    save_numbered(saving.folder, Image.new("RGB", (96, 64)), made, 7)
    saving.open()
    for key, count in (("Shift+V", 1), ("e", 2)):
        saving.key(key, count - 1)  # of the oldest tile
        saving.images(count + 1)
    assert [body["options"] for body in saving.bodies] == [{"clip_skip": 1}] * 2
    saving.key("r", 2)
    saving.page.wait_for_selector(".toast >> text=without outpaint")
    saving.page.click("#draw")
    saving.images(4)
    assert saving.bodies[2]["options"] == {"clip_skip": 1}


@thorough
def test_a_sheet_is_one_file(saving: Site) -> None:
    """Another browser shows it, in place of its images, with what varies."""
    site, folder = saving, saving.folder
    site.engine.pace = 0.01
    site.page.fill("#prompt", "a red apple")
    site.page.click("#open-sheet")
    site.page.fill("#sheet-x-values", "1, 4")
    site.page.fill("#sheet-y-values", "2, 3")
    site.page.click("#sheet-draw")
    site.images(1)
    asked = {(body["guidance_scale"], body["steps"]) for body in site.bodies}
    assert asked == {(x, y) for x in (1, 4) for y in (2, 3)}
    assert len({body["seed"] for body in site.bodies}) == 1
    (file,) = folder.glob("*.png")
    assert len(read_metadata(file)["grid"]) == len(list(file.with_suffix("").iterdir())) == 4
    site.open()
    assert site.count(".tile") == 1
    site.another_browser()
    assert site.page.locator(".tile .caption").all_inner_texts() == ["Sheet: a red apple"]
    site.page.click(".tile .open")
    shown = site.page.inner_text("#viewer-settings").split("\n")
    assert shown[shown.index("Guidance") + 1] == "1, 4"
    assert shown[shown.index("Steps") + 1] == "2, 3"
    site.page.keyboard.press("Delete")
    site.page.wait_for_selector("#empty", state="visible")
    site.page.keyboard.press("z")
    site.images(1)
    assert len(list(file.with_suffix("").iterdir())) == 4


@thorough
def test_what_a_sheet_varies(site: Site) -> None:
    """Sizes, models and the weights of the form's adapters, beside settings."""
    site.card(sizes=((64, 64), (96, 64)))
    site.page.fill("#prompt", "a red apple")
    site.page.evaluate("document.getElementById('adapters').open = true")
    site.page.select_option("#adapter-add", "ink")
    site.page.click("#open-sheet")
    site.page.select_option("#sheet-x", "size")
    site.page.fill("#sheet-x-values", "65x64")
    assert site.page.locator("#sheet-draw").is_disabled()
    site.page.fill("#sheet-x-values", "64x64, 96x64")
    site.page.select_option("#sheet-y", label="Weight of ink")
    site.page.fill("#sheet-y-values", "0, 0.5")
    site.page.click("#sheet-draw")
    site.images(1)
    asked = {(body["width"], body["adapters"]["ink"]) for body in site.bodies}
    assert asked == {(64, 0), (96, 0), (64, 0.5), (96, 0.5)}


@thorough
def test_a_sheet_of_samplers_and_schedule_types(site: Site) -> None:
    """A sampler may end with a schedule type, as in A1111; one without keeps that of the form, or of the other axis."""
    page = site.page
    page.fill("#prompt", "a red apple")

    def asked(x: str, y: str) -> set[tuple[str | None, str | None]]:
        before, images = len(site.bodies), site.count(".tile[data-id]")
        page.click("#open-sheet")
        page.select_option("#sheet-x", "sampler")
        page.fill("#sheet-x-values", x)
        page.select_option("#sheet-y", "sigmas" if y else "none")
        if y:
            page.fill("#sheet-y-values", y)
        page.click("#sheet-draw")
        site.images(images + 1)
        bodies = site.bodies[before:]
        return {(body.get("sampler"), body.get("options", {}).get("sigmas")) for body in bodies}

    assert asked("dpm++ 2m karras, DDIM", "") == {("dpmpp_2m", "karras"), ("ddim", None)}
    assert asked("DDIM, euler_a", "Automatic, karras") == {
        (sampler, curve) for sampler in ("ddim", "euler_a") for curve in ("automatic", "karras")
    }
    page.click("#open-sheet")
    for wrong in ("DPM++ 2M Lineal", "DDIM Karras"):  # no such type; types on both axes
        page.fill("#sheet-x-values", wrong)
        assert page.locator("#sheet-draw").is_disabled()
    page.select_option("#sheet-y", "none")
    assert page.locator("#sheet-draw").is_enabled()


@thorough
def test_a_sheet_waits_fails_and_is_cancelled(site: Site) -> None:
    page, engine = site.page, site.engine
    engine.refusal = Rejected(429, "queue_full", "The queue is full.", retry_after=1)
    page.fill("#prompt", "a red apple")
    page.click("#open-sheet")
    page.fill("#sheet-x-values", "1, 2, 3")
    page.fill("#sheet-y-values", "2, 3")
    page.click("#sheet-draw")
    page.wait_for_selector(".tile.waits >> text=The queue is full.")
    engine.fails, engine.refusal = ("out_of_memory", "No memory is left."), None
    page.wait_for_selector(".tile.failed >> text=No memory is left.")
    engine.fails, engine.pace = None, 0.3
    page.click("text=Try again")
    page.wait_for_selector(".tile.drawing")
    page.click("#queue-cancel")
    page.wait_for_selector("#empty", state="visible")
    asked = len(site.bodies)
    page.wait_for_timeout(1000)
    assert len(site.bodies) == asked


@thorough
def test_keyboard_only(site: Site) -> None:
    press = site.page.keyboard.press
    site.engine.pace = 0.4
    press("/")
    site.page.keyboard.type("a red apple")
    press("Enter")
    site.page.wait_for_selector(".tile.drawing")
    press("Control+Enter")
    site.page.wait_for_selector(".tile.busy >> nth=1")
    site.page.evaluate("document.activeElement.blur()")
    press("c")
    site.idle()
    assert site.count(".tile[data-id]") == 1
    press("h")
    press("Enter")
    site.page.wait_for_selector("#viewer[open]")
    site.close()
    press("Delete")
    site.page.wait_for_selector("#empty", state="visible")
    press("z")
    site.images(1)
    press("Shift+?")
    assert site.count("#help[open]") == 1


@thorough
def test_a_full_queue_is_tried_again(site: Site) -> None:
    site.engine.refusal = Rejected(503, "draining", "the server is shutting down", retry_after=1)
    site.draw("a red apple", wait=False)
    site.page.wait_for_selector(".tile >> text=the server is shutting down")
    site.engine.refusal = Rejected(429, "queue_full", "2 images wait", retry_after=1)
    site.page.wait_for_selector(".tile >> text=The queue is full. Next try in")
    site.engine.refusal = None
    site.images(1)


@thorough
def test_a_key_is_asked_for(site: Site) -> None:
    site.secret = "secret"
    site.draw("a red apple", wait=False)
    site.page.wait_for_selector("#key[open]")
    site.page.fill("#key-value", "secret")
    site.page.press("#key-value", "Enter")
    site.images(1)
    site.open()
    assert site.count("dialog[open]") == 0


@thorough
def test_the_folder_is_shown_once_the_key_is_there(saving: Site) -> None:
    saving.draw("a red apple")
    saving.secret = "secret"
    saving.another_browser()
    saving.page.wait_for_selector("#key[open]")
    assert saving.count(".tile") == 0
    saving.page.fill("#key-value", "secret")
    saving.page.press("#key-value", "Enter")
    saving.page.wait_for_selector(".tile img[src^=blob]")


@thorough
def test_the_server_is_gone_and_comes_back(site: Site) -> None:
    site.page.route("**/*", lambda route: route.abort())
    site.draw("a red apple", wait=False)
    site.page.wait_for_selector("#banner", state="visible")
    assert site.page.input_value("#prompt") == "a red apple"
    site.page.unroute("**/*")
    site.images(1)
    assert site.page.locator("#banner").is_hidden()


@thorough
def test_a_failed_job_says_why(site: Site) -> None:
    site.engine.fails = ("out_of_memory", "No memory is left.")
    site.draw("a red apple", wait=False)
    site.page.wait_for_selector(".tile.failed >> text=No memory is left.")
    site.engine.fails = None
    site.page.click("text=Try again")
    site.images(1)


@thorough
@pytest.mark.parametrize("width", [320, 390, 820])
def test_nothing_is_wider_than_the_window(site: Site, width: int) -> None:
    page = site.page
    page.set_viewport_size({"width": width, "height": 700})
    wide = "document.scrollingElement.scrollWidth > innerWidth"
    outside = """name => {
        const box = document.getElementById(name).getBoundingClientRect();
        return box.left < 0 || box.top < 0 || box.right > innerWidth || box.bottom > innerHeight;
    }"""
    cut = "(node => node.scrollWidth > node.clientWidth)(document.querySelector('dialog[open]'))"
    assert not page.evaluate(wide)
    site.draw("a very long prompt " * 20 + "w" * 200)
    site.draw("a dog")
    assert not page.evaluate(wide)
    for name in site.dialogs():
        assert not page.evaluate(outside, name), name
        assert not page.evaluate(cut), name


@thorough
def test_themes(site: Site) -> None:
    page = site.page
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    page.click("#open-theme")
    assert page.evaluate(paper) != light
    site.open()
    assert page.evaluate(paper) != light
    assert page.get_attribute("#open-theme", "aria-label") == "Light theme"


@thorough
def test_a_refused_setting_is_pointed_at(site: Site) -> None:
    site.engine.refusal = Rejected(422, "invalid_value", "steps=20 is too many.", param="steps")
    site.draw("a red apple", wait=False)
    site.page.wait_for_selector("#form-error >> text=steps=20 is too many.")
    assert site.page.get_attribute("#steps-number", "aria-invalid") == "true"
    assert site.page.evaluate("document.activeElement.id") == "steps-number"
    assert site.page.locator(".field:has(#steps-number) #form-error").is_visible()
    assert site.count(".tile") == 0
    assert site.count(".toast") == 0  # it is said once, in the form
    site.page.fill("#guidance-number", "0.5")
    site.draw("a red apple", wait=False)  # which need not be asked for
    site.page.wait_for_selector(".field:has(#guidance-number) #form-error", state="visible")
    assert len(site.bodies) == 1


@thorough
@pytest.mark.parametrize("width", [390, 1280])
def test_a_refused_adapter_is_in_view(site: Site, width: int) -> None:
    page = site.page
    site.engine.refusal = Rejected(422, "invalid_value", "adapters: 'gone' is not here.", param="adapters")
    free = """() => {
        const [error, bar] = ["form-error", "draw"].map((id) => document.getElementById(id).getBoundingClientRect());
        return error.height > 0 && error.top >= 0 && error.bottom <= Math.min(innerHeight, bar.top);
    }"""
    hidden = []
    for height in range(520, 860, 30):
        page.set_viewport_size({"width": width, "height": height})
        page.evaluate("for (const node of document.querySelectorAll('details')) node.open = node.id === 'fold'")
        page.evaluate("document.getElementById('composer').scrollTop = document.scrollingElement.scrollTop = 0")
        site.draw("a red apple <lora:gone:1>", wait=False)
        page.wait_for_function("() => document.activeElement.id === 'adapter-add'")
        hidden += [] if page.evaluate(free) else [height]
    assert not hidden


def axe_script() -> str | None:
    """axe-core's file: where AXE says, or in the package axe-playwright-python."""
    spec = importlib.util.find_spec("axe_playwright_python")
    found = os.environ.get("AXE") or (spec and spec.origin and Path(spec.origin).parent / "axe.min.js")
    return Path(found).read_text() if found and Path(found).is_file() else None


def findings(page: Any, axe: str) -> list[str]:
    page.evaluate(axe)
    results = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{one['id']}: {node['target']} {node['failureSummary']}"
        for one in results["violations"]
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]


@thorough
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_axe_finds_nothing_serious(site: Site, theme: str, width: int) -> None:
    axe = axe_script()
    if axe is None:
        pytest.skip("wants axe-core: its file in AXE, or the package axe-playwright-python")
    page = site.page
    page.emulate_media(color_scheme=theme, reduced_motion="reduce")
    page.set_viewport_size({"width": width, "height": 800})
    beside = {"controls": NETS, "ip_adapters": ("plain", "plus-face")}
    site.card(sizes=((64, 64), (128, 128)), **beside)
    found = {"empty": findings(page, axe)}
    site.draw("a red apple")
    site.draw("a dog face")
    page.evaluate("for (const node of document.querySelectorAll('details')) node.open = true")
    page.select_option("#adapter-add", "ink")
    found["done"] = findings(page, axe)
    site.card(references=3, **beside)
    for _ in range(2):
        site.drop("#input", Image.new("RGB", (64, 64)))
    page.wait_for_selector("#references li")
    found["references"] = findings(page, axe)
    found |= {name: findings(page, axe) for name in site.dialogs()}
    site.engine.refusal = Rejected(429, "queue_full", "The queue is full.", retry_after=60)
    site.draw("a cat", wait=False)
    page.wait_for_selector(".tile.waits")
    site.key("x")
    found["waits and selected"] = findings(page, axe)
    site.engine.refusal = None
    site.engine.fails = ("out_of_memory", "No memory is left.")
    site.draw("a fox", wait=False)
    page.wait_for_selector(".tile.failed")
    found["failed"] = findings(page, axe)
    assert not any(found.values()), found
