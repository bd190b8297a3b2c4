"""The dashboard in a real Chromium over real processes with the real model: what it shows, and the chat box.

The tests share one mesh and go in their order: the last one kills a node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from browser import PHONE, WIDE, Browser, chromium
from node_fleet import NodeFleet, node_fleet
from smollm2 import gguf_path

pytestmark = [pytest.mark.real_model, pytest.mark.long, pytest.mark.timeout(900)]

KEY = "a-key-for-the-dashboard-1"
LAYERS = {"attic": "0-17", "cellar": "14-29"}
MESH, MESSAGE, LOG = "section[aria-label='The mesh']", "textarea[aria-label='Message']", "[role='log']"
TRIES = 10
ANSWER = f"{LOG} [data-who='Answer']"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeFleet]:
    gguf_path()
    with node_fleet(tmp_path_factory.mktemp("fleet"), LAYERS) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def base(fleet: NodeFleet) -> str:
    """Where the gateway is."""
    return fleet.start_gateway("--api-key", KEY).removesuffix("/v1")


@pytest.fixture(scope="module")
def page(base: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser, not logged in."""
    with chromium(tmp_path_factory.mktemp("browser")) as browser:
        browser.resize(WIDE)
        browser.open(f"{base}/dashboard")
        yield browser


@pytest.fixture(scope="module")
def board(page: Browser) -> Browser:
    """The browser once more, logged in."""
    if not page.all(MESH):
        enter(page, KEY)
    page.one(MESH)
    return page


def enter(page: Browser, key: str) -> None:
    field = page.one("input[aria-label='API key']")
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys(key, Keys.ENTER)


def ask(page: Browser, question: str) -> None:
    page.one(MESSAGE).send_keys(question, Keys.ENTER)


def ask_for_long(page: Browser, question: str, enough: Callable[[], bool], what: str) -> None:
    """Ask in a new chat until ``enough`` holds while an answer is written: they are drawn, so one may end at once."""
    for _ in range(TRIES):
        page.button("New chat").click()
        page.until(lambda: not page.all(ANSWER) and not ended(page), "the chat is a new one")
        ask(page, question)
        page.until(lambda: enough() or ended(page), what)
        if enough():
            return
    pytest.fail(f"it did not come to that in {TRIES} answers: {what}")


def ended(page: Browser) -> bool:
    """Whether the newest answer ended by itself."""
    return " tokens, " in page.text(".mn-note")


def set_longest(page: Browser, tokens: int) -> None:
    field = page.one("input[aria-label^='Longest answer']")
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys(str(tokens), Keys.TAB)


def test_without_a_key_there_is_a_login_and_no_word_of_the_mesh(page: Browser) -> None:
    page.one("input[aria-label='API key']")
    enter(page, "a-key-that-nobody-has")
    page.says("not taken here", "[role='alert']")
    source = page.driver.page_source
    assert not [name for name in (*LAYERS, "smollm2") if name in source.lower()]
    page.picture("login")


def test_with_the_key_it_shows_the_machines_and_their_layers(board: Browser) -> None:
    board.says("layers 0-17", MESH)
    board.says("layers 14-29", MESH)
    mesh = board.text(MESH)
    assert "Whole: 30 layers" in mesh
    assert "14-17 on more than one machine" in mesh
    assert all(name in mesh for name in LAYERS)
    board.picture("mesh")


def test_the_key_stays_with_the_tab_over_a_reload(board: Browser) -> None:
    board.driver.refresh()
    board.says("layers 14-29", MESH)
    assert not board.all("input[aria-label='API key']")


def test_the_chat_box_answers_and_the_route_lights_up(board: Browser) -> None:
    set_longest(board, 200)

    def lit() -> bool:
        both = len(board.all(".mn-lit")) == len(LAYERS) and "attic → cellar" in board.text(".mn-live")
        return both and len(board.text(ANSWER)) > 200

    ask_for_long(board, "Write a long story about a lighthouse and its keeper.", lit, "both hops light up, it grows")
    board.picture("generation")
    board.says("tokens/s, over attic → cellar", ".mn-note")
    board.until(lambda: not board.all(".mn-lit"), "the route goes dark again")


def test_an_answer_can_be_stopped(board: Browser) -> None:
    for _ in range(TRIES):
        ask_for_long(board, "Write a long story.", lambda: len(board.text(ANSWER)) > 20, "the answer begins")
        board.button("Stop").click()
        board.until(lambda: "Stopped." in board.text(".mn-note") or ended(board), "it stops")
        if not ended(board):  # by itself, just before
            break
    board.says("Stopped.", ".mn-note")
    board.until(lambda: not board.all(".mn-lit"), "its sessions end")


def test_it_is_used_by_keyboard_alone(board: Browser) -> None:
    """Tab goes from the top through every control; Enter sends."""
    board.button("New chat").click()
    board.run("document.activeElement.blur()")
    seen: list[str] = []
    for _ in range(12):
        ActionChains(board.driver).send_keys(Keys.TAB).perform()
        active = board.driver.switch_to.active_element
        seen.append(active.get_attribute("aria-label") or active.text)
        if seen[-1] == "Message":
            break
    assert seen == ["Theme: system", "Log out", "Model", "Conversation", "Message"]
    ActionChains(board.driver).send_keys("Say hello.", Keys.ENTER).perform()
    board.until(lambda: bool(board.text(ANSWER)), "it answers")
    board.says("over attic", ".mn-note")


def test_every_control_has_a_name(board: Browser) -> None:
    nameless = board.run(
        "return [...document.querySelectorAll('button, input, textarea, select')].filter(one => one.offsetParent"
        " && !(one.innerText || one.getAttribute('aria-label') || one.labels?.length)).map(one => one.outerHTML)"
    )
    assert nameless == []


def test_it_fits_a_phone(board: Browser) -> None:
    board.resize(PHONE)
    try:
        board.until(
            lambda: board.run("return document.documentElement.scrollWidth <= innerWidth"), "no sideways scroll"
        )
        assert board.one(MESSAGE).size["width"] > 150
        board.picture("phone")
    finally:
        board.resize(WIDE)


def test_it_is_dark_where_the_system_is(board: Browser) -> None:
    def ground() -> float:
        colour = board.run("return getComputedStyle(document.body).backgroundColor")
        return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(",")))

    assert ground() > 600
    board.prefer("dark")
    try:
        board.until(lambda: ground() < 150, "the ground is dark")
        board.picture("dark")
    finally:
        board.prefer("light")
    board.until(lambda: ground() > 600, "the ground is light again")


def test_nothing_comes_from_elsewhere_and_nothing_is_complained_of(base: str, board: Browser) -> None:
    assert board.hosts() == {base.removeprefix("http://")}
    assert board.complaints() == []


def test_a_nodes_death_shows_its_gap(fleet: NodeFleet, board: Browser) -> None:
    set_longest(board, 2000)
    question = "Write a very long story about a lighthouse."
    ask_for_long(board, question, lambda: len(board.all(".mn-lit")) == len(LAYERS), "an answer is being written")
    fleet.kill("cellar")
    board.says("Gap: layers 18-29 of 30 layers are on no machine.", MESH)
    assert board.all(".mn-gap")
    board.until(lambda: "does not answer" in board.text(MESH) or "gone" in board.text(MESH), "the dead one is marked")
    board.picture("death")
    board.until(lambda: "gone" in board.text(MESH), "its lease ends, and it is remembered")
    board.says("Gap: layers 18-29", MESH)
    board.picture("gone")
    board.until(lambda: bool(board.all("[data-who='Error']")), "the answer tells why it ended")
    fleet.start("cellar")
    fleet.wait_ready("cellar")
    board.says("Whole: 30 layers", MESH)
