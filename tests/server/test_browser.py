"""The page at / in a real browser: `make test-browser`. Skipped where playwright or Chromium is not there.

With SCREENSHOTS=FOLDER in the environment, pictures of the page are written there.
"""

import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-browser")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")

QUESTION = "What is a block table?"
HOSTILE = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        # Without a sandbox: as root there is none, and the page is our own.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, served) -> Iterator:
    """Returns a function that opens the page; no script may fail, and the policy may forbid nothing."""
    contexts, complaints = [], []

    def open_page(**options):
        context = browser.new_context(**{"viewport": {"width": 1440, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda line: complaints.append(line.text) if line.type == "error" else None)
        page.goto(str(served.client.base_url.join("/")))
        page.wait_for_selector(".state.works")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [c for c in complaints if "401" not in c] == []


def ask(page, text, *, answers=True):
    page.fill("#message", text)
    page.keyboard.press("Enter")  # which hides the button until the answer has ended
    if answers:
        page.wait_for_selector("#send", state="visible", timeout=60_000)


def settings(page, **values):
    if page.locator("details.settings[open]").count() == 0:
        page.click("summary")
    for name, value in values.items():
        page.fill(f"#{name}", str(value))


def test_a_conversation(open_page):
    page = open_page()
    settings(page, temperature=0)
    ask(page, QUESTION)
    answer = page.locator(".text").first.inner_text()
    assert answer.startswith("A block table")
    assert "tokens/s" in page.locator(".facts").first.inner_text()
    assert page.evaluate("document.activeElement.id") == "message"
    ask(page, "And what is a block?")
    assert page.locator(".user").count() == page.locator(".text").count() == 2
    page.click("#clear")
    assert page.locator(".user").count() == 0


def test_a_stopped_answer_keeps_what_came(open_page, steps, served):
    steps.delay_s = 0.03
    page = open_page()
    settings(page, max_tokens=200, temperature=1, seed=1)
    ask(page, QUESTION, answers=False)
    page.locator(".token").nth(3).wait_for()
    page.click("#stop")
    page.wait_for_selector("#send", state="visible")
    assert "stopped" in page.locator(".facts").first.inner_text()
    assert page.locator("#log .problem").count() == 0
    served.wait_until_idle()


def test_samples_side_by_side_and_which_one_goes_on(open_page):
    page = open_page()
    settings(page, n=3, temperature=2, seed=3, max_tokens=12)
    bodies = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.post_data else None)
    ask(page, QUESTION)
    texts = page.locator(".answer .text").all_inner_texts()
    assert len(texts) == 3
    assert len(set(texts)) > 1
    page.locator(".answer input").nth(2).check()
    ask(page, "Go on.")
    assert [m["role"] for m in bodies[-1]["messages"]] == ["user", "assistant", "user"]
    chosen = re.sub(r"\s", "", texts[2])
    assert chosen.startswith(re.sub(r"\s", "", bodies[-1]["messages"][1]["content"]))


def test_probabilities_by_mouse_and_by_keyboard(open_page):
    page = open_page()
    settings(page, temperature=0)
    ask(page, QUESTION)
    page.locator(".token").nth(2).hover()
    page.wait_for_selector("#tip", state="visible")
    assert page.locator("#tip .bar").count() >= 5
    assert page.locator("#tip .bar.sampled").count() == 1
    page.mouse.move(5, 5)
    page.locator(".text").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator(".token.here").count() == 1
    assert re.fullmatch(r".+: [\d.]+ %", page.locator("#said").inner_text())
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


def test_a_model_without_a_chat_template_completes(open_page, served):
    page = open_page()
    state = {**served.client.get("../ui/state").json(), "has_chat": False}
    page.route("**/ui/state", lambda route: route.fulfill(json=state))
    page.wait_for_selector("#chat-title:text-is('Completion')")
    settings(page, temperature=0, max_tokens=8)
    with page.expect_request("**/v1/completions") as asked:
        ask(page, "import os")
    assert asked.value.post_data_json["prompt"] == "import os"
    page.locator(".token").first.hover()
    page.wait_for_selector("#tip .bar.sampled", state="visible")


def test_texts_are_never_html(open_page):
    page = open_page()
    settings(page, max_tokens=5)
    ask(page, HOSTILE)
    assert page.locator(".user").first.inner_text() == HOSTILE
    assert page.locator("#log img, #log script").count() == 0
    assert page.title() == "pagelet – jax-paged"


def test_what_a_model_says_is_never_html(open_page):
    page = open_page()
    chunk = (
        '{"choices":[{"index":0,"delta":{"content":"<img src=x onerror=alert(1)>"},"finish_reason":"stop"}]}'
    )
    body = f"data: {chunk}\n\ndata: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream")
    )
    page.click("summary")
    page.uncheck("#logprobs")
    ask(page, "Hello")
    assert page.locator(".text").first.inner_text() == "<img src=x onerror=alert(1)>"
    assert page.locator("#log img").count() == 0


def test_an_error_is_shown_and_the_message_kept(open_page):
    page = open_page()
    settings(page, max_tokens=100000)
    page.on("console", lambda line: None)
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, body='data: {"error":{"message":"it broke"}}\n\n'),
    )
    ask(page, "Hello")
    assert page.locator("#log .problem").first.inner_text() == "it broke"
    assert page.locator("#message").input_value() == "Hello"


def test_a_key_is_asked_for_kept_and_sent(open_page):
    page = open_page()
    seen = []

    def guard(route):
        key = route.request.headers.get("authorization")
        seen.append(key)
        if key == "Bearer right":
            route.continue_()
        else:
            route.fulfill(status=401, body='{"error":{"message":"no key"}}', content_type="application/json")

    page.route("**/ui/state", guard)
    page.wait_for_selector("#key", state="visible")
    page.fill("#key", "right€")  # which no header can hold
    page.keyboard.press("Enter")
    page.wait_for_selector("text=only printable ASCII")
    assert page.evaluate("sessionStorage.getItem('jax-paged-key')") is None
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=has rejected this key")
    page.fill("#key", "right")
    with page.expect_response(lambda answer: answer.ok and "ui/state" in answer.url):
        page.keyboard.press("Enter")
    page.wait_for_selector("dialog", state="hidden")
    assert seen[0] is None
    assert "Bearer wrong" in seen
    assert seen[-1] == "Bearer right"
    assert page.evaluate("sessionStorage.getItem('jax-paged-key')") == "right"


def test_light_and_dark(open_page):
    page = open_page(color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.click("#theme")
    light = page.evaluate(ground)
    assert dark != light
    page.reload()
    page.wait_for_selector(".state.works")
    assert page.evaluate(ground) == light  # it is remembered


def test_every_control_has_a_name_and_is_reached_by_keyboard(open_page):
    page = open_page()
    page.click("summary")
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, input, textarea, select, canvas, progress')]"
        ".filter(e => !(e.labels?.length || e.ariaLabel || e.textContent.trim() || e.title))"
        ".map(e => e.outerHTML)"
    )
    assert unnamed == []
    reached = set()
    page.focus("#theme")
    for _ in range(14):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"clear", "log", "message", "send", "SUMMARY", "temperature", "n", "system", "logprobs"} <= reached


def test_a_narrow_page_does_not_scroll_sideways(open_page):
    page = open_page(viewport={"width": 360, "height": 740})
    settings(page, n=2, max_tokens=30)
    ask(page, QUESTION)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.fixture
def busy(served, steps):
    """Requests that run until the test ends, some with several samples and a prefix in common."""
    served.wait_until_idle()
    steps.delay_s = 0.012
    prompts = [f"def read_{i % 3}(self, path):\n    " * (2 + i) for i in range(7)]
    bodies = [
        {"prompt": prompt, "max_tokens": 400, "ignore_eos": True, "temperature": 1, "n": 1 + 2 * (i % 4 == 0)}
        for i, prompt in enumerate(prompts)
    ]
    threads = [threading.Thread(target=served.complete, kwargs=body) for body in bodies]
    for thread in threads:
        thread.start()
    yield
    steps.delay_s = 0
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("name", ["light", "dark", "narrow"])
def test_what_runs_is_shown(open_page, busy, served, name):
    size = {"width": 390, "height": 844} if name == "narrow" else {"width": 1440, "height": 900}
    page = open_page(viewport=size, color_scheme="dark" if name == "dark" else "light")
    settings(page, n=1 if name == "narrow" else 3, max_tokens=44, temperature=1, seed=2)
    ask(page, QUESTION if name == "narrow" else "How is memory shared?")
    if name == "narrow":
        page.click("summary")
    page.locator("#requests tr").nth(6).wait_for()
    page.wait_for_selector("#rate:not(:text-is('0'))")
    if name != "narrow":
        page.locator(".token").nth(5).hover()
    assert "in use" in page.locator("#pool-text").inner_text()
    used = page.evaluate(
        """() => {
            const canvas = document.getElementById("pool"), seen = new Set();
            const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            for (let i = 0; i < data.length; i += 4)
                if (data[i + 3] === 255) seen.add(data.slice(i, i + 3).join());
            return seen.size;
        }"""
    )
    assert used >= 7  # a colour per request at least
    folder = os.environ.get("SCREENSHOTS")
    if folder:
        page.wait_for_timeout(2500)  # for the curve of the last seconds
        file = Path(folder) / f"page-{name}.png"
        page.screenshot(path=file, full_page=name == "narrow")
        image = pytest.importorskip("PIL.Image")
        image.open(file).convert("RGB").quantize(192, dither=image.Dither.NONE).save(file, optimize=True)
        assert file.stat().st_size < 200_000
