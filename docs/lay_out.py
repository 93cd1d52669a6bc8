"""Lays out the pages of the documentation site, for `make docs`.

    python docs/lay_out.py build/pages

A site's links cannot leave its folder, and ours do: pages link to measurements, recipes and code.
So the folder has README.md, everything in `docs`, and every file that these link to, each at its
place in the repository. Links then lead on the site where they do in a checkout. What is written
as the name of a page, as in "see serving.md", reads there as the page's title.

KaTeX, which draws the formulas, comes from the environment of `make docs`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<!\\)\[[^\]]*\]\(([^()\s#]+)")
NAMED = re.compile(r"\[[\w./-]+\.md\]\(([\w./-]+\.md)\)")
KATEX = ".venv-docs/lib/python*/site-packages/sphinxcontrib/*.min.js"
SCHEME = re.compile(r"[a-z]+:")


def tracked_files() -> set[str]:
    """What git knows, or would after `git add`, relative to the root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {name for name in listed.splitlines() if (ROOT / name).is_file()}


def linked_from(page: str) -> set[str]:
    """The files that a page links to, relative to the root; nothing for what is no page."""
    if not page.endswith(".md"):
        return set()
    targets = LINK.findall((ROOT / page).read_text(encoding="utf-8"))
    folder = (ROOT / page).parent
    paths = ((folder / one).resolve() for one in targets if not SCHEME.match(one))
    return {str(path.relative_to(ROOT)) for path in paths if path.is_relative_to(ROOT)}


def site_files(tracked: Iterable[str]) -> set[str]:
    """README.md, the files in `docs` and, again and again, what pages among them link to."""
    known = set(tracked)
    found: set[str] = set()
    border = {name for name in known if name.startswith("docs/") and not name.endswith(".py")}
    border.add("README.md")
    while border:
        found |= border
        border = {target for page in border for target in linked_from(page)} & known - found
    return found


def titled(page: str) -> str:
    """The text of a page, in which links to pages have their titles instead of their names."""
    path = ROOT / page

    def link(found: re.Match[str]) -> str:
        target = path.parent / found[1]
        first = target.read_text("utf-8").partition("\n")[0] if target.is_file() else ""
        return f"[{first.removeprefix('# ')}]({found[1]})" if first.startswith("# ") else found[0]

    return NAMED.sub(link, path.read_text("utf-8"))


def lay_out(folder: Path) -> None:
    """Fills `folder`, which may exist and is emptied, with the files of the site."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in site_files(tracked_files()):
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.suffix == ".md":
            place.write_text(titled(name), "utf-8")
        else:
            place.symlink_to(ROOT / name)
    for script in ROOT.glob(KATEX):
        (folder / script.name).symlink_to(script)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="an empty or new folder, or an earlier layout")
    lay_out(parser.parse_args().folder)


if __name__ == "__main__":
    main()
