"""A real headless Chromium, driven over its debugging pipe: JSON with a NUL after each message."""

import contextlib
import fcntl
import json
import os
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

from waiting import wait_until

Json = dict[str, Any]
# Generous: a busy machine may need long to start it.
PATIENCE = 60.0
OPTIONS = (
    "--headless",
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--password-store=basic",
)
# Its key, its code and what it types.
KEYS = {
    "Tab": (9, ""),
    "Enter": (13, "\r"),
    "Escape": (27, ""),
    " ": (32, " "),
}


class Page:
    """One tab. What the page did wrong is in `complaints`: exceptions, console, CSP, network."""

    def __init__(self, browser: "Browser", target: str, session: str) -> None:
        self._browser, self._target, self._session = browser, target, session
        self.events: list[Json] = []
        browser.pages[session] = self
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Json:
        return self._browser.call(method, self._session, **params)

    def happened(self, method: str) -> list[Json]:
        """The parameters of all events of this name so far."""
        return [event["params"] for event in list(self.events) if event["method"] == method]

    @property
    def complaints(self) -> list[str]:
        logged = [
            f"{entry['entry']['source']}: {entry['entry']['text']}"
            for entry in self.happened("Log.entryAdded")
            if entry["entry"]["level"] in ("error", "warning")
        ]
        thrown = [
            f"exception: {event['exceptionDetails']}"
            for event in self.happened("Runtime.exceptionThrown")
        ]
        said = [
            f"console.{event['type']}: {[argument.get('value') for argument in event['args']]}"
            for event in self.happened("Runtime.consoleAPICalled")
        ]
        return logged + thrown + said

    def requests(self) -> list[Json]:
        """Every request that the page made: method, url, headers."""
        return [event["request"] for event in self.happened("Network.requestWillBeSent")]

    def open(self, url: str) -> None:
        self.events.clear()
        self.call("Page.navigate", url=url)
        wait_until(lambda: self.happened("Page.loadEventFired"), PATIENCE, f"{url} to be loaded")

    def js(self, expression: str) -> Any:
        """What the expression is in the page (a promise is waited for)."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector: str = "body") -> str:
        """What a person can read there; empty if there is no such thing."""
        found = self.js(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        return str(found)

    def wait_text(self, text: str, selector: str = "body", timeout: float = PATIENCE) -> None:
        wait_until(
            lambda: text in self.text(selector),
            timeout,
            f"{text!r} in {selector}",
            lambda: f"It says: {self.text(selector)!r}; {self.complaints}",
        )

    def screen(
        self, width: int, height: int = 900, *, dark: bool = False, phone: bool = False
    ) -> None:
        """The size of the window, the colours that a person prefers."""
        size: Json = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of what is really there."""
        box = self.js(
            f"""(() => {{ const node = document.querySelector({json.dumps(selector)});
                node.scrollIntoView({{block: "center", behavior: "instant"}});
                const box = node.getBoundingClientRect();
                return [box.x + box.width / 2, box.y + box.height / 2]; }})()"""
        )
        where = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, **where)

    def press(self, key: str) -> None:
        code, text = KEYS[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def tab_to(self, selector: str, most: int = 100) -> None:
        """Press Tab until this has the focus."""
        for _ in range(most):
            self.press("Tab")
            if self.js(f"document.activeElement.matches({json.dumps(selector)})"):
                return
        raise AssertionError(f"{selector} cannot be reached by Tab: {self.focused()}")

    def focused(self) -> str:
        """The beginning of the element that has the focus."""
        return str(self.js("document.activeElement.outerHTML.slice(0, 300)"))

    def close(self) -> None:
        if self._browser.pages.pop(self._session, None):
            self._browser.call("Target.closeTarget", targetId=self._target)


class Browser:
    """A Chromium of its own, with a profile of its own."""

    def __init__(self) -> None:
        program = shutil.which("chromium")
        assert program, "the package chromium is missing"
        self.pages: dict[str, Page] = {}
        self._answers: dict[int, queue.SimpleQueue[Json]] = {}
        self._last = 0
        self._directory = tempfile.TemporaryDirectory(
            prefix="serversync-browser-", ignore_cleanup_errors=True
        )
        home = Path(self._directory.name)
        there, self._to = self._pipe()
        self._from, back = self._pipe()
        self._log = home / "log"
        # Its pipe is at 3 and 4: put there by a shell, which becomes Chromium.
        command = ["bash", "-c", f'exec "$@" 3<&{there} 4>&{back}', "chromium", program, *OPTIONS]
        if os.geteuid() == 0:
            command.append("--no-sandbox")  # its sandbox cannot be had as root
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, f"--user-data-dir={home / 'profile'}", "about:blank"],
                env={"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8"},
                pass_fds=(there, back),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        os.close(there)
        os.close(back)
        self._reader = threading.Thread(target=self._read, name="browser", daemon=True)
        self._reader.start()

    @staticmethod
    def _pipe() -> tuple[int, int]:
        """A pipe whose ends are not 3 or 4, which the child fills."""
        ends = os.pipe()
        high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
        for end in ends:
            os.close(end)
        return high[0], high[1]

    def _read(self) -> None:
        rest = b""
        while data := os.read(self._from, 1 << 20):
            *messages, rest = (rest + data).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._answers[message["id"]].put(message)
                elif page := self.pages.get(message.get("sessionId", "")):
                    page.events.append(message)

    def call(self, method: str, session: str | None = None, **params: Any) -> Json:
        """Ask and wait for the answer."""
        self._last += 1
        message: Json = {"id": self._last, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        answers = self._answers[self._last] = queue.SimpleQueue()
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        try:
            answer = answers.get(timeout=PATIENCE)
        except queue.Empty:
            log = self._log.read_text(errors="replace")[-2000:]
            raise AssertionError(f"no answer to {method}. Chromium says:\n{log}") from None
        finally:
            del self._answers[message["id"]]
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: Json = answer["result"]
        return result

    def page(self) -> Page:
        """A new tab, visible, as if it was in front."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        return Page(self, target, attached["sessionId"])

    def close(self) -> None:
        os.close(self._to)  # it ends when its pipe does
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
        self._reader.join(10)
        os.close(self._from)
        self._directory.cleanup()
