"""Photograph the HTML pages that vfl writes, for the documentation.

    python scripts/draw_pages.py                     # docs/drawings/page_*.png; needs Chromium
    python scripts/draw_pages.py --browser BROWSER   # another Chromium or Chrome

The script runs `vfl demo --in-process` and `vfl grid quick` in a temporary folder. It then opens
their pages without a window and without a network, and stores the upper part of each page.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "drawings"
#: For each picture: the command of vfl that writes the page, and the file name of the page.
PAGES = {
    "page_run.png": (("demo", "--in-process"), "report.html"),
    "page_grid.png": (("grid", "quick", "--out", "grid"), "report.html"),
}
WIDTH, HEIGHT = 1000, 900


def written(command: Sequence[str], name: str, folder: Path) -> Path:
    """Run a command of vfl in an empty folder, and return the newest page with this name."""
    subprocess.run(
        [sys.executable, "-m", "vfl", *command],
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    pages = sorted(folder.rglob(name), key=lambda page: page.stat().st_mtime)
    if not pages:
        raise FileNotFoundError(f"vfl {' '.join(command)} wrote no {name}")
    return pages[-1]


def photograph(page: Path, picture: Path, browser: str) -> None:
    """Write the upper part of a page to a PNG file; the browser cannot reach a network."""
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--hide-scrollbars",
                "--host-resolver-rules=MAP * ~NOTFOUND",
                f"--user-data-dir={profile}",
                f"--window-size={WIDTH},{HEIGHT}",
                f"--screenshot={picture}",
                page.resolve().as_uri(),
            ],
            check=True,
            stderr=subprocess.DEVNULL,
            timeout=120,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw all pages; return 2 if there is no browser."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found = shutil.which("chromium") or shutil.which("google-chrome")
    parser.add_argument("--browser", default=found, help="program of Chromium or Chrome")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the pictures")
    asked = parser.parse_args(arguments)
    if not asked.browser:
        print("there is no Chromium: install it, or name a browser by --browser", file=sys.stderr)
        return 2
    for name, (command, page) in PAGES.items():
        with tempfile.TemporaryDirectory() as folder:
            photograph(written(command, page, Path(folder)), asked.out / name, asked.browser)
        print(asked.out / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
