"""The status page in a real Chromium, before the real admin process and a real agent."""

import re
import socket
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from agent import Agent, AgentFactory
from backend import Backend
from browser import Browser, Page
from desk import BURIED_MANY, CLOCK, MOMENT
from frontend import Frontend, Reply
from ledger import dead, dead_letters
from pg import Database
from proxy import Proxy
from waiting import wait_until
from web import start_admin

EVIL = "<img src=x onerror=alert(1)>"
TURNED = "safe\u202etxt.exe"
REFUSED = Reply(400, body={"error": f"no such caller {EVIL} {'W' * 600}"})

# The contrast (WCAG 2) of all text that can be seen, with the background that is really behind it.
POOR_CONTRAST = """(() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      if (colour.length < 4 || colour[3] > .5) return colour;
    }
    return parse(getComputedStyle(document.body).backgroundColor);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), poor = [];
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
    if (!text || !node.checkVisibility() || node.closest("script, style, title")) continue;
    const style = getComputedStyle(node), svg = node instanceof SVGElement;
    const pair = [light(parse(svg ? style.fill : style.color)), light(behind(node))].sort();
    const ratio = (Math.max(...pair) + .05) / (Math.min(...pair) + .05);
    if (ratio < 4.5) poor.push(`${ratio.toFixed(2)} ${text}`);
  }
  return poor;
})()"""
BRIGHTNESS = """getComputedStyle(document.body).backgroundColor
    .match(/[\\d.]+/g).slice(0, 3).reduce((sum, c) => sum + Number(c), 0)"""
TOO_LOW = """[...document.querySelectorAll("button, summary")].filter((node) =>
    node.checkVisibility() && node.getBoundingClientRect().height < 40).map((n) => n.textContent)"""

LOOKED = "looks.then(() => true)"  # all that was asked for has been shown
NAME = socket.gethostname()

pytestmark = pytest.mark.slow  # a Chromium for each test run is enough

Desk = Callable[..., tuple[Agent, str]]
Refuse = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with closing(Browser()) as running:
        yield running


@pytest.fixture
def tab(browser: Browser) -> Iterator[Page]:
    with closing(browser.page()) as page:
        page.screen(1280)
        yield page


@pytest.fixture
def desk(agent: AgentFactory, tab: Page) -> Iterator[Desk]:
    """Starts the admin process beside a running agent, and a tunnel to it as ssh makes one: that
    process and the tunnel's address; or once more at the end of that tunnel. When the test is over
    Chromium has nothing to complain of, but what a test expects and clears."""
    tunnels: dict[str, Proxy] = {}

    def start(beside: Agent | None, at: str = "", **more: Any) -> tuple[Agent, str]:
        listen = tunnels[at].target[0] if at else ""
        more |= {"runtime_dir": beside.runtime_dir} if beside else {}
        admin, web = start_admin(agent, listen, **more)
        tunnel = tunnels.get(at) or Proxy(web.address, 0)
        url = f"http://127.0.0.1:{tunnel.port}/"
        tunnels[url] = tunnel
        return admin, url

    yield start
    complaints = tab.complaints
    for tunnel in tunnels.values():
        tunnel.stop()
    assert complaints == []


@pytest.fixture
def running(agent: AgentFactory) -> Agent:
    """An agent that has made its schema and waits."""
    running = agent()
    running.wait_sentence("all delivered")
    return running


@pytest.fixture
def page(tab: Page, running: Agent, desk: Desk) -> Page:
    """The page of a running agent, open."""
    tab.open(desk(running)[1])
    tab.wait_text("Updated")
    tab.js(LOOKED)
    return tab


@pytest.fixture
def refuse(page: Page, backend: Backend, frontend: Frontend, db: Database) -> Refuse:
    """An entry that the frontend refuses for good: the seq and the entity of its dead letter, which
    is to be seen."""

    def refuse(**kind: Any) -> tuple[int, str]:
        entity = str(uuid.uuid4())
        frontend.poison[entity] = REFUSED
        seq = backend.enqueue(entity_id=entity, **kind)
        wait_until(lambda: seq in dead(db), what="the dead letter")
        refresh(page)
        page.wait_text(f"Entry {seq}", "#list")
        return seq, entity

    return refuse


def refresh(page: Page) -> None:
    page.click("#refresh")


def wait_empty(page: Page, selector: str = "#list") -> None:
    wait_until(lambda: page.text(selector) == "", what=f"{selector} to be empty")


def assert_fits_a_phone(page: Page) -> None:
    page.screen(320, phone=True)
    assert page.js("document.documentElement.scrollWidth") == 320


def assert_made_nothing(page: Page) -> None:
    """Of text from outside."""
    assert page.js("document.querySelectorAll('img, b, [onclick], [onerror]').length") == 0


def number(page: Page, tile: str) -> str:
    return page.text(f'[aria-label="{tile}"] .big')


def look_until(page: Page, condition: Callable[[], bool], what: str) -> None:
    """Refresh it until it is so; by itself it looks again only after 10 s."""

    def is_so() -> bool:
        refresh(page)
        return condition()

    wait_until(is_so, 40, what, page.text)


def wait_state(page: Page, word: str) -> None:
    look_until(page, lambda: page.text("#state") == word, f"the page to say {word}")


def icon(page: Page) -> str:
    """What the tab shows beside its title."""
    return unquote(page.js("document.querySelector('link[rel=icon]').href"))


def details(page: Page, tile: str) -> dict[str, str]:
    """The lines of a tile."""
    lines = page.text(f'[aria-label="{tile}"] dl').split("\n")
    return dict(zip(lines[::2], lines[1::2], strict=True))


def test_a_running_agent_is_shown_with_all_that_it_did(
    page: Page, backend: Backend, frontend: Frontend, db: Database
) -> None:
    assert page.js("document.title") == f"{NAME}: all well"
    assert "✓" in icon(page)
    assert page.text("#head").split() == ["✓", NAME, "all", "well"]
    assert "nothing was sent yet" in page.text("#sentence")
    page.wait_text("0 in the last 24 hours", "#day")
    assert number(page, "Waiting") == number(page, "Delivered") == "0"
    assert details(page, "Delivered")["Last"] == "never"
    assert not page.js("document.querySelector('#dead').checkVisibility()")

    backend.end_call()
    frontend.wait(lambda: frontend.files, what="the recording")
    # Nobody clicks: it looks again by itself.
    page.wait_text("4", '[aria-label="Delivered"] .big')
    wait_state(page, "all well")
    assert " and 1 recording at " in page.text("#sentence")
    assert "test-device" in page.text("#who") and frontend.url in page.text("#who")
    assert number(page, "Waiting") == number(page, "Recordings") == "0"
    shown = details(page, "Delivered")
    counts = {"Recordings": "1", "Entries, 24 h": "4", "Recordings, 24 h": "1"}
    assert shown == counts | {key: shown[key] for key in ("Last", "Size", "Size, 24 h")}
    assert re.fullmatch(MOMENT, shown["Last"])
    used = page.js("document.querySelector('meter').value")
    assert details(page, "Recordings")["Disk used"] == f"{100 * used:.0f} %"
    # Times are those of the machine's clock, as in the sentence.
    page.call("Emulation.setTimezoneOverride", timezoneId="Pacific/Kiritimati")
    page.open(page.js("location.href"))
    page.wait_text("all well", "#state")
    assert details(page, "Delivered")["Last"] in page.text("#sentence")
    # The last day is drawn, and told in words.
    db.execute("UPDATE serversync.deliveries SET started_at = started_at - interval '5 hours'")
    page.open(page.js("location.href"))
    page.wait_text("4 in the last 24 hours", "#day")
    labels = page.js("[...document.querySelectorAll('svg')].map((n) => n.ariaLabel)")
    assert labels[0].startswith("Delivered per 15 min: 4 in the last 24 hours, at most ")
    assert re.fullmatch(r"Waiting: at most \d+", labels[1])
    assert page.js("document.querySelectorAll('.entries').length") >= 1
    assert len(re.findall(r"\b\d\d:(?:00|15|30|45)\b", page.text("#day"))) == 5


def test_beside_a_waiting_entry_that_failed_stands_nothing_green(
    page: Page, backend: Backend, frontend: Frontend
) -> None:
    entity = str(uuid.uuid4())
    frontend.poison[entity] = Reply(500, body={"error": "a bug of ours"})
    backend.enqueue(entity_id=entity)
    backend.enqueue_many(2)
    wait_state(page, "waiting")
    assert "1 retrying" in page.text("#sentence")
    assert details(page, "Waiting")["FRONTEND_5XX"] == "1"
    assert page.js("document.querySelectorAll('.good').length") == 0
    assert page.js("document.title") == f"{NAME}: waiting"


def test_settings_have_a_card_with_what_came_and_what_is_held_back(
    page: Page, db: Database
) -> None:
    assert number(page, "Settings") == "–"
    query = """
        INSERT INTO serversync.settings (section, position, counts, pulled_at, held)
        VALUES ('number-groups', 1, '{"groups": 3, "numbers": 12}', now(), '{}'),
               ('call-actions', 2, '{"rules": 4}', now(), '{"counts": {"rules": 0}}')
        ON CONFLICT (section) DO UPDATE SET counts = excluded.counts,
            pulled_at = excluded.pulled_at, held = excluded.held
    """
    db.execute(query)
    refresh(page)
    page.wait_text("19", '[aria-label="Settings"] .big')
    shown = details(page, "Settings")
    assert re.fullmatch(MOMENT, shown.pop("Asked"))
    assert shown == {"groups": "3", "numbers": "12", "rules": "4", "call-actions": "held back"}
    wait_state(page, "needs you")  # never "all well" beside it
    text = "settings: call-actions held back: 0 rules came, 4 rules are there"
    assert text in page.text("#sentence")


def test_it_fits_every_screen_and_can_be_read_by_eyes_and_by_screen_readers(
    page: Page, refuse: Refuse
) -> None:
    seq, _ = refuse()
    # On a phone what needs a person stands first, and the cards in two columns.
    page.screen(360, 740, phone=True)
    top = "document.querySelector('{}').getBoundingClientRect().{}"
    assert page.js(top.format("#list h3", "top")) < 370  # without scrolling
    assert page.js(top.format("#dead", "bottom")) <= page.js(top.format("#tiles", "top"))
    assert page.js(top.format("#tiles", "bottom")) <= page.js(top.format("#day", "top"))
    places = page.js(
        "[...document.querySelectorAll('#tiles > *')].map((n) => [n.offsetLeft, n.offsetTop])"
    )
    assert len({left for left, _ in places}) == len({top for _, top in places}) == 2

    page.js("document.querySelectorAll('details').forEach((node) => node.open = true)")
    page.wait_text('"id"', "#list pre")
    page.click("[data-do=delete]")  # the question has to fit as well
    for width in (320, 1280):
        bright = []
        for dark in (False, True):
            page.screen(width, dark=dark, phone=width == 320)
            assert page.js("document.documentElement.scrollWidth") <= width
            assert page.js(POOR_CONTRAST) == []
            bright.append(page.js(BRIGHTNESS))
        assert bright[0] > 2 * bright[1]
    page.screen(320, phone=True)
    assert page.js(TOO_LOW) == []
    page.click("[data-do=keep]")

    page.call("Accessibility.enable")
    nodes = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in page.call("Accessibility.getFullAXTree")["nodes"]
        if not node["ignored"]
    ]
    assert {"banner", "main", "contentinfo", "region"} <= {role for role, _ in nodes}
    named = {"button", "region", "meter", "image", "DisclosureTriangle"}
    assert [role for role, name in nodes if role in named and not name] == []
    assert {("heading", f"{NAME} needs you"), ("button", f"Retry entry {seq}")} <= {*nodes}
    assert page.js("document.documentElement.lang") == "en"


def test_a_retry_by_click_leads_to_the_delivery_or_says_why_not(
    page: Page, refuse: Refuse, db: Database, backend: Backend, frontend: Frontend
) -> None:
    seq, entity = refuse()
    assert "BAD_REQUEST" in page.text("#list")
    assert "1 dead letter needs you" in page.text("#sentence")
    page.click("[data-do=retry]")
    page.wait_text("retried 1 of 3", "#list")
    page.wait_text(f"Entry {seq} failed again", "#said")
    frontend.poison.clear()
    page.click("[data-do=retry]")
    page.wait_text(f"Entry {seq} was delivered", "#said")
    assert frontend.received(entity)
    assert dead_letters(db)[seq]["status"] == "RESOLVED"
    wait_empty(page)
    assert not page.js("document.querySelector('#dead').checkVisibility()")
    assert page.js("document.querySelector('#said').getAttribute('aria-live')") == "polite"
    asked = [request for request in page.requests() if request["method"] == "POST"]
    assert [each["headers"]["X-Requested-With"] for each in asked] == ["serversync"] * 2

    # What was overtaken is refused in words; what somebody else deletes only goes.
    seq, entity = refuse()
    frontend.poison.clear()
    newer = backend.enqueue(entity_id=entity)
    frontend.wait(lambda: frontend.received(entity))
    page.click("[data-do=retry]")
    page.wait_text("Not done", "#said")
    assert f"seq {newer}" in page.text("#said")
    assert dead_letters(db)[seq]["status"] == "PENDING"
    page.press("Escape")
    db.execute("DELETE FROM serversync.dead_letters")
    refresh(page)
    wait_empty(page)
    assert page.text("#lost") == page.text("#said") == ""
    # Chromium reports the 409 itself, and the 404 of a look at the letter; there is nothing else.
    assert all(re.search("409|404", complaint) for complaint in page.complaints)
    page.events.clear()


def test_the_keyboard_alone_retries_and_deletes_after_a_question(
    page: Page, refuse: Refuse, db: Database, frontend: Frontend
) -> None:
    first, entity = refuse()
    second, _ = refuse()
    frontend.poison.pop(entity)
    page.tab_to(f"[data-do=retry][aria-label='Retry entry {first}']")
    assert page.js("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.press("Enter")
    page.wait_text(f"Entry {first} was delivered", "#said")
    assert frontend.received(entity)
    page.press("Escape")
    assert page.text("#said") == ""
    # The letter is gone; the focus is with the other one.
    page.js(LOOKED)
    held = "document.activeElement.closest('li')?.innerText.split(' · ')[0]"
    assert page.js(held) == f"Entry {second}"
    page.tab_to(f"[data-do=delete][aria-label='Delete entry {second}']")
    page.press("Enter")
    assert "Cancel" in page.focused()  # the harmless one
    said = page.text("#list [role=alert]")
    assert f"entry {second}" in said and "the frontend will never get it" in said
    page.press("Escape")
    assert f"Delete entry {second}" in page.focused()
    assert page.text("#list [role=alert]") == "" and second in dead_letters(db)
    page.press(" ")
    assert "Cancel" in page.focused()
    page.tab_to("[data-do=drop]", most=1)
    page.press("Enter")
    wait_until(lambda: second not in dead_letters(db), what="the deletion")
    wait_empty(page)
    assert page.js("document.activeElement.id") == "head"
    page.wait_text("deleted", "#said")


def test_the_payload_is_opened_by_the_keyboard_and_shown_as_text(
    page: Page, refuse: Refuse, backend: Backend, frontend: Frontend
) -> None:
    payload = {"name": f"</script>{EVIL}", "turned": TURNED, "long": "W" * 1000}
    topic = "<b onclick=alert(1)>&amp;"
    refuse(payload=payload, entity_type=topic)
    page.tab_to("#list summary")
    page.press("Enter")
    page.wait_text("W" * 1000, "#list pre")
    shown = page.text("#list pre")
    assert EVIL in shown and "safe\\u202etxt.exe" in shown and "\u202e" not in shown
    assert topic in page.text("#list h3")
    assert EVIL in page.text("#list > li p"), "the frontend's own words"
    assert_made_nothing(page)
    assert_fits_a_phone(page)
    # It stays open, and where it is, when the page looks again.
    backend.enqueue()
    frontend.wait(lambda: len(frontend.entries) == 1)
    look_until(page, lambda: number(page, "Delivered") == "1", "the receipt")
    assert page.text("#list pre") == shown
    # One too large for the list can be had from the server.
    refuse(payload={"text": "x" * 10_000})
    page.click("#list summary")
    page.wait_text("10 kB", "#list a")
    page.click("#list a")
    page.wait_text("x" * 10_000)


def test_an_outage_is_told_by_title_icon_and_tile_and_in_the_survey_s_sentence(
    page: Page, backend: Backend, frontend: Frontend
) -> None:
    frontend.on_entries = lambda request: Reply(500, body={"error": f"{EVIL} {TURNED} {'W' * 300}"})
    backend.enqueue_many(3)
    wait_state(page, "outage")
    assert page.js("document.title") == f"{NAME}: outage"
    assert ">!<" in icon(page) and "✓" not in page.text()
    told = rf"nothing gets through since {CLOCK}: .*; next try {CLOCK}"
    assert re.fullmatch(told, page.text("#sentence"))
    assert page.text("#sentence") == page.js("latest.health")["sentence"]
    assert page.text().count("gets through") == page.text().count("next try") == 1
    assert number(page, "Waiting") == details(page, "Waiting")["call_log"] == "3"
    # The frontend's words are shown as text.
    assert EVIL in page.text("#sentence")
    assert "\u202e" not in page.js("document.body.textContent")
    assert_made_nothing(page)
    assert_fits_a_phone(page)


def test_an_upload_under_way_has_a_bar(page: Page, backend: Backend, frontend: Frontend) -> None:
    frontend.read_rate = 100_000
    backend.end_call(seconds=120)
    look_until(page, lambda: "MB" in page.text("#progress"), "the upload on the page")
    assert re.search(r"B of 3\.8 MB · .*/s", page.text("#progress"))
    bar = page.js("[...document.querySelectorAll('progress')].map((p) => [p.value, p.max])")[0]
    assert 0 <= bar[0] <= bar[1]
    frontend.read_rate = None


def test_a_stopped_or_hidden_agent_and_a_database_away_are_said_in_words(
    tab: Page, running: Agent, db: Database, proxy: Proxy, desk: Desk
) -> None:
    tab.open(desk(None)[1])  # without its state file
    tab.wait_text("waiting", "#state")
    assert "another session holds the lock" in tab.text("#sentence")
    _, url = desk(running, DATABASE_URL=db.url_through(proxy.port))
    tab.open(url)
    tab.wait_text("all well", "#state")
    tab.js(LOOKED)
    proxy.refuse()
    wait_state(tab, "outage")
    assert "the database is not there" in tab.text("#sentence")
    assert number(tab, "Waiting") == "–"
    tab.js(LOOKED)
    assert "old" in tab.js("document.querySelector('#day').className")
    proxy.resume()
    running.stop()
    wait_state(tab, "stopped")
    assert "systemctl start serversync" in tab.text("#sentence")
    assert number(tab, "Waiting") == "0"


def test_on_tcp_the_browser_asks_a_person_for_the_token_and_goes_on_with_it(
    tab: Page, agent: AgentFactory, running: Agent, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("a-long-token")
    more = {"runtime_dir": running.runtime_dir, "SYNC_ADMIN_TOKEN_FILE": token}
    _, web = start_admin(agent, "127.0.0.1:0", **more)
    tab.call("Fetch.enable", handleAuthRequests=True)
    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(tab.call, "Page.navigate", url=web.address)
        (request,) = wait_until(lambda: tab.happened("Fetch.requestPaused"), what="the request")
        tab.call("Fetch.continueRequest", requestId=request["requestId"])
        (asked,) = wait_until(lambda: tab.happened("Fetch.authRequired"), what="its question")
        assert asked["authChallenge"]["realm"] == "serversync"
        typed = {"response": "ProvideCredentials", "username": "me", "password": "a-long-token"}
        tab.call(
            "Fetch.continueWithAuth", requestId=asked["requestId"], authChallengeResponse=typed
        )
        opened.result()
    tab.call("Fetch.disable")
    tab.wait_text("all well", "#state")
    assert tab.text("#lost") == ""


def test_without_the_admin_process_the_last_data_stay_marked_as_old(
    tab: Page, running: Agent, desk: Desk
) -> None:
    admin, url = desk(running)
    tab.open(url)
    tab.wait_text("Updated")
    admin.stop()
    refresh(tab)
    tab.wait_text("The server does not answer", "#lost")
    assert "may be old" in tab.text("#lost")
    assert tab.js("document.querySelector('#lost').getAttribute('role')") == "alert"
    assert "old" in tab.js("document.body.className")
    assert tab.js("document.title") == f"{NAME}: no news"
    assert "all delivered" in tab.text("#sentence")
    assert "✓" not in tab.text() + icon(tab)
    assert "dashed" in tab.js("getComputedStyle(document.querySelector('.card')).borderStyle")
    desk(running, url)
    refresh(tab)
    wait_until(lambda: tab.text("#lost") == "", what="the news")
    wait_until(lambda: "old" not in tab.js("document.body.className"), what="all to be new")
    tab.events.clear()  # what was refused meanwhile


def test_only_the_newest_open_letters_are_listed_and_a_topic_is_retried_as_a_whole(
    page: Page, db: Database, frontend: Frontend
) -> None:
    for status, count in (("RESOLVED", 30), ("PENDING", 60)):
        db.execute(BURIED_MANY, {"count": count, "status": status})
    others = "original_topic <> 'call_log' AND outbox_id <> 2"
    db.execute(f"DELETE FROM serversync.dead_letters WHERE {others}")
    db.execute("UPDATE serversync.dead_letters SET status = 'PENDING' WHERE outbox_id = 2")
    refresh(page)
    page.wait_text("The newest 20 of 21", "#dead")
    seqs = page.js("[...document.querySelectorAll('#list h3')].map((n) => n.innerText)")
    listed = [int(re.findall(r"Entry (\d+) ", text)[0]) for text in seqs]
    newest = sorted((s for s, m in dead_letters(db).items() if m["status"] == "PENDING"))[1:]
    assert sorted(listed) == newest
    assert page.text("#topics").count("Retry all") == 1  # one alone has its own button
    page.wait_text("Retry all 20 of call_log", "#topics")
    page.click("[data-all=call_log]")
    frontend.wait(lambda: len(frontend.entries) == 20)
    wait_until(lambda: len(page.js("shown")) == 1, what="the others to go")
    states = [row["status"] for row in dead_letters(db).values()]
    assert sorted(states) == ["PENDING"] + ["RESOLVED"] * 30


def test_it_runs_only_its_own_script_and_asks_only_its_own_server_and_not_while_hidden(
    page: Page,
) -> None:
    url = page.js("location.href")
    assert all(request["url"].startswith((url, "data:")) for request in page.requests())
    page.js("Object.defineProperty(document, 'hidden', {configurable: true, get: () => true})")
    page.js("document.dispatchEvent(new Event('visibilitychange'))")
    asked = len(page.requests())
    page.js("refresh()")
    assert len(page.requests()) == asked
    page.js("delete document.hidden")
    page.js("document.dispatchEvent(new Event('visibilitychange'))")
    wait_until(lambda: len(page.requests()) > asked, what="it to ask again")

    page.js(
        """(() => { const script = document.createElement("script");
            script.textContent = "window.owned = 1"; document.body.append(script);
            const host = document.createElement("div"); document.body.append(host);
            host.innerHTML = '<p id=p style="color: red" onclick="window.owned = 2">x</p>'; })()"""
    )
    page.click("#p")
    assert page.js("window.owned") is None
    assert page.js("document.querySelector('#p').style.color") == ""
    wait_until(
        lambda: sum("Content Security Policy" in words for words in page.complaints) >= 3,
        what="Chromium's complaints about all three",
        state=lambda: str(page.complaints),
    )
    page.events.clear()
