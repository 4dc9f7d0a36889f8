"""Checks the contents of a wheel and an sdist, installs the wheel in a bare environment and draws without a network.

    python .ci/check_wheel.py FOLDER [--resolution highest|lowest-direct] [--python 3.11]

FOLDER is what `uv build` wrote. Only the wheel's required dependencies are installed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

LARGEST = 30_000_000
"""Bytes of a wheel, of which the bundled model has 24 million."""

NEEDED = ("canvax/py.typed", "canvax/assets/emoji/model_index.json", "canvax/server/page/index.html", "licenses/NOTICE")


def check_contents(wheel: Path, sdist: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    stray = [name for name in names if not name.startswith("canvax") or "__pycache__" in name]
    missing = [name for name in NEEDED if not any(path.endswith(name) for path in names)]
    if stray or missing or wheel.stat().st_size > LARGEST:
        sys.exit(f"{wheel}: stray {stray}, missing {missing}, {wheel.stat().st_size:,} bytes")
    with tarfile.open(sdist) as archive:
        folders = {Path(name).parts[1] for name in archive.getnames() if len(Path(name).parts) > 1}
    allowed = {"src", "README.md", "CHANGELOG.md", "NOTICE", "LICENSE", "PKG-INFO", "pyproject.toml", ".gitignore"}
    if folders - allowed:
        sys.exit(f"{sdist}: stray {sorted(folders - allowed)}")


def run(*words: str | Path, **environment: str) -> str:
    command = [str(word) for word in words]
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resolution", default="highest")
    parser.add_argument("--python", default=sys.executable)
    arguments = parser.parse_args()
    (wheel,), (sdist,) = arguments.folder.glob("*.whl"), arguments.folder.glob("*.tar.gz")
    check_contents(wheel, sdist)
    # The commands run in an empty folder: in a checkout, Python would import the sources instead of the wheel.
    with tempfile.TemporaryDirectory() as folder:
        uv, environment = [sys.executable, "-m", "uv"], Path(folder, "venv")
        run(*uv, "venv", "--quiet", "--python", arguments.python, environment)
        python = environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        how = ["--quiet", "--python", python, "--resolution", arguments.resolution, "--requirements", "pyproject.toml"]
        run(*uv, "pip", "install", *how, wheel.resolve())
        os.chdir(folder)
        nowhere = "http://127.0.0.1:9"
        offline = {"http_proxy": nowhere, "https_proxy": nowhere, "no_proxy": "", "XDG_CACHE_HOME": folder}
        print(run(python, "-m", "canvax", "--version", **offline), end="")
        words = ("generate", "a red apple", "--seed", "1", "--steps", "8", "-o", "apple.png")
        print(run(python, "-m", "canvax", *words, **offline), end="")
        read = (
            "from PIL import Image; i = Image.open('apple.png').convert('RGB'); print(i.size, len(i.getcolors(4096)))"
        )
        size, colours = run(python, "-c", read).rsplit(" ", 1)
        if size != "(64, 64)" or int(colours) < 100:
            sys.exit(f"apple.png is no picture: {size}, {colours} colours")
    print(f"{wheel.name}: installed and drew")


if __name__ == "__main__":
    main()
