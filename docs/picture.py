"""Takes the picture of the playground in the documentation.

    .venv/bin/exitserve serve models/exit-py-19m --port 8000 --playground --mode confidence
    .venv/bin/python docs/picture.py http://localhost:8000

It is what a browser shows of a server that runs, after one prompt and a click on a token. Wants a
headless Chromium of the system. In mode confidence, pieces of a stream are single tokens.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from PIL import Image

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PROMPT = (
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
)
MAX_TOKENS = 64
SOON = 120_000
"""Milliseconds within which two answers come."""
COLOURS = 256
PICTURE = Path(__file__).parent / "playground.png"


def take(
    browser: Any, url: str, out: Path, *, width: int = 1280, scheme: str = "light", runs: int = 2
) -> None:
    """Writes a picture of the playground.

    Args:
        browser: Playwright's.
        url: of a server with the playground, without an API key.
        out: a PNG file.
        width: of the window, in pixels.
        scheme: light or dark.
        runs: of the prompt; the first answers of a server are slower than all others.
    """
    view = {"width": width, "height": 900}
    page = browser.new_page(viewport=view, color_scheme=scheme)
    page.goto(f"{url}/exitserve/playground")
    page.locator("#live-text").wait_for()
    page.locator("#prompt").fill(PROMPT)
    page.locator("#advanced").evaluate("shown => (shown.open = true)")
    page.locator("#max-tokens").fill(str(MAX_TOKENS))
    page.locator("#advanced").evaluate("shown => (shown.open = false)")
    for _ in range(runs):
        page.locator("#run").click()
        page.locator("#stop").wait_for(state="hidden", timeout=SOON)
    # The first token that stopped early because a check said so is worth a look.
    early = page.locator("#early .token:not(.depth-7)")
    (early if early.count() else page.locator("#early .token")).first.click()
    page.mouse.move(0, 0)
    page.wait_for_timeout(2500)  # the counts at the top are asked for every two seconds
    page.screenshot(path=out, full_page=True)
    page.close()
    # Few colours, so that the file is a third as large.
    Image.open(out).quantize(COLOURS, dither=Image.Dither.NONE).save(out, optimize=True)


def find_browser() -> str | None:
    """A headless Chromium of the system."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def main() -> None:
    """Takes it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url", help="of a server with --playground")
    parser.add_argument("--out", type=Path, default=PICTURE, help="a PNG file")
    parser.add_argument("--width", type=int, default=1280, help="of the window, in pixels")
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    args = parser.parse_args()
    if (program := find_browser()) is None:
        parser.error(f"no browser: install one of {', '.join(BROWSERS)}.")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Without its sandbox, which root may not use; it opens this one page only.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        take(browser, args.url, args.out, width=args.width, scheme=args.scheme)
        browser.close()


if __name__ == "__main__":
    main()
