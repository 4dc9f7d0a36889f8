"""Put the pages of the repository's root into the site, and let links reach them."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
SITE = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, with links as their places in the site need them; links to other files become text."""
    for name, page in SITE.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        text = re.sub(r"\]\(docs/", "](", text)
        text = re.sub(r"\]\((\w+\.md)", lambda link: f"]({SITE.get(link[1], link[1])}", text)
        text = re.sub(r"\[([^\]]*)\]\((?:benchmarks|examples|recipes)/[^)]*\)", r"\1", text)
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to files of the repository's root, for example ``../CHANGELOG.md``, at their pages on the site."""
    return re.sub(r"\]\(\.\./([A-Z]+\.md)", lambda link: f"]({SITE.get(link[1], link[0])}", markdown)
