"""The playground in a real browser, on real servers."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exitserve.cli import main
from exitserve.evaluation.settings import TRACED_TOKENS as TRACED

from ..forks import LocalServer

pytestmark = pytest.mark.nightly

PROMPT = "def read_lines(path):\n    with open(path"
HTML = "<img src=x onerror=alert(1)><script>alert(2)</script>&amp;"
SOON = 60_000
"""Milliseconds within which two answers come."""

OpenPage = Callable[..., Any]


@pytest.fixture
def expect(browser: Any) -> Any:
    from playwright.sync_api import expect

    return expect


@pytest.fixture
def page(open_page: OpenPage, server: LocalServer, expect: Any) -> Any:
    """The page of an uncalibrated checkpoint, ready to run with a threshold."""
    made = open_page(server)
    expect(made.locator("#by")).to_have_value("threshold")
    made.locator("#threshold").fill("0.4")
    made.locator("#max-tokens").fill("32")
    return made


def run(page: Any, expect: Any, prompt: str = PROMPT) -> None:
    """Types a prompt, and waits for both answers."""
    page.locator("#prompt").fill(prompt)
    page.locator("#prompt").press("Control+Enter")
    expect(page.locator("#parting")).not_to_be_empty(timeout=SOON)


def test_both_answers_come_coloured_and_compared(page, expect, complete) -> None:
    shown: list[str] = []
    for _ in range(3):  # a busy browser gets several tokens as one piece
        run(page, expect)
        shown = page.locator("#early .token").all_inner_texts()
        if len(shown) == 32:
            break
    answer = complete(PROMPT, 32, exit_threshold=0.4)["choices"][0]
    assert len(shown) == len(answer["exit_layers"]) == 32
    assert page.locator("#early .text").inner_text() == PROMPT + answer["text"]
    classes = [one.get_attribute("class") for one in page.locator("#early .token").all()]
    colour = {6: "depth-0 lined", 12: "depth-2", 18: "depth-5 lined", 24: "depth-7"}
    assert classes[:20] == [f"token {colour[depth]}" for depth in answer["exit_layers"][:20]]
    assert page.locator("#full .token.depth-7").count() == 32
    for pane in ("#early", "#full"):
        figures = page.locator(f"{pane} .figures")
        expect(figures).to_have_text(re.compile(r"^[\d.]+ tokens/s · 32 tokens · mean depth "))
    expect(page.locator("#live-text")).to_have_text(re.compile(r"^[\d,]+ tokens · mean depth"))


def test_where_the_texts_part(page, expect, complete) -> None:
    page.locator("#by").select_option("layer")
    run(page, expect)
    early, full = (complete(PROMPT, 32, **f)["choices"][0]["token_ids"] for f in FIXED_AND_FULL)
    same = next(at for at, pair in enumerate(zip(early, full, strict=True)) if pair[0] != pair[1])
    expect(page.locator("#parting")).to_contain_text(f"part after {same} tokens")
    for pane in ("early", "full"):
        assert page.locator(f"#{pane} .parts").get_attribute("id") == f"{pane}-{same}"


FIXED_AND_FULL: tuple[dict[str, Any], ...] = ({"exit_layer": 6}, {"exit_mode": "off"})


def test_a_piece_of_several_tokens_shows_the_depth_of_each(page, expect) -> None:
    """As a step with accepted drafts gives it."""

    def answer(route: Any) -> None:
        ids = [1, 2, 4 if "off" in route.request.post_data else 3]
        choice = {"index": 0, "text": "ab", "token_ids": ids, "exit_layers": [6, 6, 24]}
        event = json.dumps({"choices": [choice | {"finish_reason": "length"}]})
        route.fulfill(body=f"data: {event}\n\n", content_type="text/event-stream")

    page.route("**/v1/completions", answer)
    run(page, expect)
    piece = page.locator("#early-0")
    drawn = piece.evaluate("(piece) => getComputedStyle(piece).backgroundImage")
    shallow, again, full = re.findall(r"rgb\([^)]*\)", drawn)[::2]
    assert shallow == again != full
    assert piece.get_attribute("aria-label") == "ab: layer 6, full depth (24)"
    expect(page.locator("#parting")).to_contain_text("part after 2 tokens: “ab” here, “ab” at")
    assert page.locator(".parts").count() == 2


def test_why_here_by_keyboard(page, expect, trace_file) -> None:
    page.locator("#file").set_input_files(trace_file)
    expect(page.locator("#early .token")).to_have_count(TRACED)
    first, tip, why = page.locator("#early-0"), page.locator("#tip"), page.locator("#why")
    first.focus()
    expect(tip).to_contain_text("full depth (24), confidence")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#early-1")).to_be_focused()
    expect(tip).to_contain_text(re.compile("layer 6|layer 12|layer 18|full depth"))
    expect(why).to_be_hidden()
    page.keyboard.press("Enter")
    expect(why).to_be_visible()
    expect(page.locator("#early-1")).to_have_attribute("aria-selected", "true")
    assert page.locator("#why-layers tbody tr").count() == 4
    assert page.locator("#why-map tbody tr").count() == 4
    assert page.locator("#why-map thead th").count() == 40
    page.keyboard.press("End")
    expect(page.locator("#why-map thead .chosen")).to_have_text(
        page.locator(f"#early-{TRACED - 1}").get_attribute("aria-label").rpartition(": ")[0]
    )
    page.keyboard.press("Escape")
    expect(why).to_be_hidden()


def test_the_slider_is_a_promise_behind_an_api_key(open_page, judging, expect) -> None:
    page = open_page(judging)
    expect(page.locator("#key")).to_be_visible()
    for key, problem in (("wrong", "did not take this key"), ("none", None)):
        page.locator("#key-text").fill(key)
        page.locator("#key-text").press("Enter")
        if problem:
            expect(page.locator("#key-problem")).to_contain_text(problem)
    expect(page.locator("#key")).to_be_hidden()
    slider, meaning = page.locator("#promise"), page.locator("#meaning")
    expect(meaning).to_contain_text("At least 75 % of the tokens are those of full depth")
    asked = []
    page.on("request", lambda one: asked.append(one) if one.method == "POST" else None)
    page.locator("#advanced summary").click()
    page.locator("#max-tokens").fill("4")
    run(page, expect)
    slider.press("ArrowRight")
    expect(meaning).to_have_text("Lossless: every token runs all layers.")
    assert slider.get_attribute("aria-valuetext") == meaning.inner_text()
    run(page, expect, "x = 1\ny =")
    fields = [json.loads(one.post_data)["vllm_xargs"] for one in asked]
    assert [one.pop("exit_trace") for one in fields] == [True] * 4
    full_depth = {"exit_mode": "off"}
    assert fields == [{"exit_target": 0.75}, full_depth, full_depth, full_depth]
    page.reload()
    expect(page.locator("#model")).not_to_be_empty()  # the tab has kept the key


def say_of(page: Any, change: Callable[[dict[str, Any]], Any]) -> list[dict[str, Any]]:
    """Changes what the server says of itself; returns what it will be asked."""

    def answer(route: Any) -> None:
        stats = route.fetch().json()
        change(stats)
        route.fulfill(json=stats)

    asked: list[dict[str, Any]] = []
    page.route("**/exitserve/stats", answer)
    page.on("request", lambda one: asked.append(one.post_data_json) if one.post_data else None)
    page.reload()
    return asked


def test_a_chat_goes_on(page, expect) -> None:
    asked = say_of(page, lambda stats: stats["offers"].update(chat=True))
    expect(page.locator("#prompt-label")).to_have_text("Message")
    page.locator("#max-tokens").fill("4")
    for message in ("x = 1", "y = 2"):
        run(page, expect, message)
        expect(page.locator("#prompt")).to_be_empty()
    roles = [[turn["role"] for turn in one["messages"]] for one in asked]
    assert roles == [["user"]] * 2 + [["user", "assistant", "user"]] * 2
    page.locator("#new-chat").click()
    expect(page.locator("#prompt")).to_have_value("x = 1")


def test_a_checkpoint_without_exits_says_so(page, expect) -> None:
    asked = say_of(page, lambda stats: stats.update(exit_layers=[]))
    expect(page.locator("#meaning")).to_contain_text("has no exits")
    page.locator("#run").click()
    expect(page.locator("#early .figures")).to_contain_text("tokens", timeout=SOON)
    expect(page.locator("#full")).to_be_hidden()
    assert len(asked) == 1


def test_an_error_of_the_server_is_shown(page, expect) -> None:
    page.locator("#max-tokens").fill("4000")
    page.locator("#run").click()
    expect(page.locator("#problem")).to_contain_text("max_tokens")
    expect(page.locator("#stop")).to_be_hidden()


def test_what_a_model_says_is_text(page, expect) -> None:
    """The server is made to answer with HTML, to a prompt of HTML."""

    def force(route: Any) -> None:
        body = json.loads(route.request.post_data)
        body["structured_outputs"] = {"choice": [HTML]}
        route.continue_(post_data=json.dumps(body))

    page.on("dialog", lambda dialog: pytest.fail(f"it ran: {dialog.message}"))
    page.route("**/v1/completions", force)
    page.locator("#max-tokens").fill("64")
    run(page, expect, f"print('{HTML}')")
    assert page.locator("#early .text").inner_text() == f"print('{HTML}'){HTML}"
    page.locator("#early-3").click()
    expect(page.locator("#why")).to_be_visible()
    assert page.locator("main img, main script").count() == 0


@pytest.fixture(scope="module")
def trace_file(bundled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace by the oracle."""
    out = tmp_path_factory.mktemp("trace")
    arguments = ["--prompt", PROMPT, "--thresholds", "0.4", "--out", str(out), "--overwrite"]
    assert main(["eval", str(bundled), *arguments]) == 0
    (file,) = out.glob("trace-*.json")
    return file


DROP = """(text) => {
  const data = new DataTransfer();
  data.items.add(new File([text], "trace.json", { type: "application/json" }));
  return data;
}"""


def test_a_trace_is_opened_by_drop_and_by_choice(page, expect, trace_file) -> None:
    text = trace_file.read_text()
    dropped = page.evaluate_handle(DROP, text)
    page.dispatch_event("main", "drop", {"dataTransfer": dropped})
    expect(page.locator("#early .token")).to_have_count(TRACED)
    expect(page.locator("#early-title")).to_contain_text("exit-py-19m)")
    expect(page.locator("#full")).to_be_hidden()
    early = next(token for token in json.loads(text)["tokens"] if token["depth"] < 24)
    page.locator(f"#early-{early['index']}").click()
    rows = page.locator("#why-layers tbody tr")
    expect(rows.first).to_contain_text("not reached")
    expect(rows.first.locator(".bar")).to_be_visible()  # the oracle tells that layer too
    for wrong in (b"{}", b"<html>", text.replace('"stopped"', '"flew"').encode()):
        file = {"name": "odd.json", "mimeType": "application/json", "buffer": wrong}
        page.locator("#file").set_input_files(file)
        expect(page.locator("#problem")).to_contain_text("odd.json is no")
    page.locator("#file").set_input_files(trace_file)
    expect(page.locator("#problem")).to_be_hidden()


def test_a_narrow_screen(open_page, server, expect) -> None:
    page = open_page(server, width=390)
    page.locator("#max-tokens").fill("48")
    run(page, expect)
    page.locator("#early-20").click()
    expect(page.locator("#why")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    early, full = (page.locator(one).bounding_box() for one in ("#early", "#full"))
    assert full["y"] >= early["y"] + early["height"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(open_page, server, expect, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = open_page(server, color_scheme=scheme)
    page.locator("#max-tokens").fill("24")
    run(page, expect)
    page.locator("#early-3").click()
    found = Axe().run(page).response["violations"]
    serious = [
        (one["id"], [node["html"] for node in one["nodes"]][:3])
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
    assert serious == []
