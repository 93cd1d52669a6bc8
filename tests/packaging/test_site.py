"""The documentation site: all pages are in its menu, and generated parts are what code gives."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ..scripts import ROOT, script

BUILDER = ROOT / ".venv-docs" / "bin" / "zensical"

generate, lay_out = (script(ROOT / "docs" / f"{name}.py") for name in ("generate", "lay_out"))


def configuration() -> dict[str, Any]:
    """`mkdocs.yml`, whose tags for Python objects and the environment become None."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    Loader.add_constructor("!ENV", lambda *_: None)
    loaded: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)
    return loaded


def in_menu(entry: Any) -> set[str]:
    """The pages below an entry of `nav`."""
    if isinstance(entry, str):
        return {entry}
    below = entry.values() if isinstance(entry, dict) else entry
    return {page for one in below for page in in_menu(one)}


def unspaced_lists(text: str) -> list[str]:
    """First items of lists that follow a paragraph: lists on GitHub, and not on the site."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"^(?![-*] |[|#<]|\d+\.|\s).+\n((?:[-*]|1\.) .*)", prose, flags=re.MULTILINE)


@pytest.mark.parametrize("page", generate.PARTS)
def test_generated_parts_are_current(page: str) -> None:
    written = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert written == generate.generated(page), "run: python docs/generate.py"


def test_every_page_is_in_the_menu() -> None:
    pages = {name for name in lay_out.site_files(lay_out.tracked_files()) if name.endswith(".md")}
    assert in_menu(configuration()["nav"]) == pages


def test_the_index_has_the_sections_of_the_menu() -> None:
    menu = {
        title: in_menu(pages) for one in configuration()["nav"][2:] for title, pages in one.items()
    }
    parts = re.split(r"^## (.+)\n", (ROOT / "docs" / "README.md").read_text(), flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert list(sections) == list(menu)
    for title, text in sections.items():
        links = (f"docs/{name}" for name in re.findall(r"\]\(([^)]+)\)", text))
        assert {name.replace("docs/../", "") for name in links} <= menu[title], title


def test_the_site_has_what_its_pages_link_to(tmp_path: Path) -> None:
    lay_out.lay_out(tmp_path)
    index = (tmp_path / "docs" / "README.md").read_text("utf-8")
    assert "[Truncate: the first layers as a model](truncate.md)" in index
    assert ".md](" not in index
    assert (tmp_path / "benchmarks" / "results" / "plan-against-bench.json").is_file()
    assert not (tmp_path / "docs" / "lay_out.py").exists()
    assert not (tmp_path / "exitserve").exists()


def test_lists_follow_an_empty_line() -> None:
    pages = lay_out.site_files(lay_out.tracked_files())
    texts = {name: (ROOT / name).read_text("utf-8") for name in pages if name.endswith(".md")}
    assert {name: found for name, text in texts.items() if (found := unspaced_lists(text))} == {}
    assert unspaced_lists("**One:**\n- a\n- b\n") == ["- a"]
    assert unspaced_lists("One:\n\n- a\n  b\n- c\n\n```\nd:\n- e\n```\n") == []


@pytest.mark.skipif(not BUILDER.exists(), reason="`make docs` has made no .venv-docs yet")
def test_the_site_builds_without_warnings() -> None:
    lay_out.lay_out(ROOT / "build" / "pages")
    command = [str(BUILDER), "build", "--clean", "--strict"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "propagation" in (ROOT / "build" / "site" / "search.json").read_text()
