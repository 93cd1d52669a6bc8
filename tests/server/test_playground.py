"""The playground's files, as vLLM's real app serves them, without an engine or a browser."""

import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from vllm.entrypoints.launchers.app import build_app

from exitserve.server.command import parse_vllm_args
from exitserve.server.playground.routes import PAGE, PATH

FILES = sorted(file.name for file in PAGE.iterdir())


def client_of(model: Path, *, playground: bool) -> TestClient:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_PLUGINS", "exitserve")
        args = parse_vllm_args(str(model), ["--api-key", "open sesame"])
        args.playground = playground
        return TestClient(build_app(args, ("generate", "render")))


@pytest.fixture(scope="module")
def client(bundled: Path) -> TestClient:
    return client_of(bundled, playground=True)


def test_only_servers_that_were_told_to_have_it(bundled: Path) -> None:
    without = client_of(bundled, playground=False)
    assert {without.get(path).status_code for path in (PATH, f"{PATH}/main.js")} == {404}


def test_every_file_is_served_under_a_strict_policy(client: TestClient) -> None:
    answers = [client.get(PATH)]
    answers += [client.get(f"{PATH}/{name}") for name in FILES if name != "index.html"]
    for answer in answers:
        assert answer.status_code == 200, "no key is needed: the page asks for it"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy
        assert "unsafe" not in policy and "http" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    kinds = {answer.headers["content-type"].partition(";")[0] for answer in answers}
    assert kinds == {"text/html", "text/css", "text/javascript", "image/svg+xml"}


def test_nothing_else_is_served(client: TestClient) -> None:
    for name in ("routes.py", "index.html", "..%2Froutes.py", "%2e%2e/routes.py", "nothing.js"):
        assert client.get(f"{PATH}/{name}").status_code == 404, name


def test_the_page_has_no_inline_script_or_style() -> None:
    page = (PAGE / "index.html").read_text()
    assert re.findall(r"<script[^>]*>", page) == ['<script type="module" src="playground/main.js">']
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:|https?:", page)


def test_text_never_becomes_html() -> None:
    for name in FILES:
        code = (PAGE / name).read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", code)


def test_modules_import_what_is_there() -> None:
    imported = set()
    for name in FILES:
        imported |= set(re.findall(r'from "\./([\w-]+\.js)"', (PAGE / name).read_text()))
    assert imported and imported < set(FILES)
    assert {name for name in FILES if name.endswith(".js")} == imported | {"main.js"}
