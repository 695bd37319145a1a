"""Make the gallery of reports: the quickstart's model with three routers, trained, inspected, photographed.

    python docs/make_gallery.py [--seconds 60] [--only NAME]

Writes docs/gallery/NAME.html (the report as `moesaic inspect` makes it), docs/gallery/NAME.png (the page in a browser)
and, for the first model, docs/images/report.png.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROUTERS = {
    "top-k": {},
    "dynamic-top-p": {"model.router": "{name: dynamic_top_p, target: 2}"},
    "principal-subspace": {"model.router": "{name: principal_subspace, top_k: 2, basis_lr: 0.001}"},
}
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", choices=ROUTERS)
    options = parser.parse_args()
    (HERE / "gallery").mkdir(exist_ok=True)
    (HERE / "images").mkdir(exist_ok=True)
    for name, changes in ROUTERS.items():
        if options.only in (None, name):
            page = make(name, changes, options.seconds)
            photograph(page, HERE / "gallery" / f"{name}.png", height=None)
            if name == "top-k":
                photograph(page, HERE / "images" / "report.png", height=900)


def make(name: str, changes: dict[str, str], seconds: float) -> Path:
    """Train one model and write its report."""
    from moesaic.training.recipes import recipe

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / name
        settings = {"train.seconds": str(seconds), **changes}
        sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        moesaic("train", str(recipe("moe")), "--out", str(run), *sets)
        written = Path(folder) / f"{name}.html"
        moesaic("inspect", str(run), "--tokens", "8192", "--html", str(written))  # its plots as PNG stay in the folder
        return Path(shutil.move(written, HERE / "gallery" / f"{name}.html"))  # may be another file system


def moesaic(*arguments: str) -> None:
    """One command in a process of its own."""
    subprocess.run([sys.executable, "-m", "moesaic.cli.main", *arguments], check=True)


def photograph(page: Path, target: Path, height: int | None) -> None:
    """The page as a browser shows it, whole or its first ``height`` pixels."""
    from playwright.sync_api import sync_playwright

    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path, args=FLAGS)
        view = browser.new_page(viewport={"width": 1000, "height": height or 900})
        view.goto(page.as_uri())
        view.screenshot(path=str(target), full_page=height is None)
        browser.close()


if __name__ == "__main__":
    main()
