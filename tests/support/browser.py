"""A headless Chromium driven through its DevTools protocol: what a person does to a page, and everything the page complains about."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import websocket

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
LIMIT_S = 60.0
BUTTONS = {"none": 0, "left": 1}
MODIFIERS = {"shift": 8}


def find() -> str | None:
    """The browser: MPK_TEST_CHROMIUM if set, else the first of the usual names."""
    return os.environ.get("MPK_TEST_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def running(binary: str) -> Iterator[Browser]:
    """A browser with an empty profile, ended on leaving."""
    with tempfile.TemporaryDirectory(prefix="mpk-chromium-", ignore_cleanup_errors=True) as profile:
        command = [binary, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
                   "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--remote-debugging-port=0",
                   "--remote-allow-origins=*", f"--user-data-dir={profile}", "about:blank"]
        with open(Path(profile) / "log.txt", "wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
            try:
                yield Browser(_address(Path(profile) / "DevToolsActivePort", process))
            finally:
                process.terminate()
                process.wait(timeout=LIMIT_S)


def _address(file: Path, process: subprocess.Popen[bytes]) -> str:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end and process.poll() is None:
        if file.exists() and len(lines := file.read_text().splitlines()) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        time.sleep(0.02)
    raise RuntimeError(f"{process.args[0]} did not start: exit code {process.poll()}")  # type: ignore[index]


class Browser:
    """One connection for the browser and all its pages."""

    def __init__(self, address: str) -> None:
        self.socket = websocket.create_connection(address, timeout=LIMIT_S, suppress_origin=True)
        self.number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """One command and its result; events that come meanwhile are kept."""
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": params, **({"sessionId": session} if session else {})}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == self.number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return dict(message["result"])
            self.events.append(message)

    def open(self, path: Path, width: int = 1440, height: int = 900, dark: bool = False, scale: float = 1.0) -> Page:
        """A page that shows a local file; it may be loading still."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False)
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        page.call("Page.navigate", url=path.resolve().as_uri())
        return page


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser, self.session = browser, session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    def evaluate(self, expression: str) -> Any:
        """The JSON value of an expression, awaited; raises RuntimeError with what the page threw."""
        out = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in out:
            raise RuntimeError(out["exceptionDetails"].get("exception", {}).get("description", out["exceptionDetails"]["text"]))
        return out["result"].get("value")

    def wait_for(self, expression: str, limit_s: float = LIMIT_S) -> None:
        """Until the expression is true."""
        end = time.monotonic() + limit_s
        while not self.evaluate(expression):
            if time.monotonic() > end:
                raise TimeoutError(f"{expression} is not true after {limit_s:g} s; the page says {self.complaints()}")
            time.sleep(0.02)

    def front(self) -> None:
        """Make this the page that is shown: others draw nothing."""
        self.call("Page.bringToFront")

    def settle(self) -> None:
        """Until the page has drawn what was asked of it."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def key(self, key: str, *modifiers: str) -> None:
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        held = sum(MODIFIERS[m] for m in modifiers)
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, modifiers=held, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, modifiers=held)
        self.settle()

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def mouse(self, kind: str, x: float, y: float, button: str = "none", clicks: int = 0, held: bool = False, **more: Any) -> None:
        """One `mouseMoved`, `mousePressed`, `mouseReleased` or `mouseWheel` at a point of the window; `held`: the left button is down."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=clicks, buttons=int(held), **more)

    def click(self, x: float, y: float, times: int = 1) -> None:
        for n in range(1, times + 1):
            self.mouse("mousePressed", x, y, "left", n, held=True)
            self.mouse("mouseReleased", x, y, "left", n)
        self.settle()

    def drag(self, start: tuple[float, float], end: tuple[float, float], *modifiers: str) -> None:
        held = sum(MODIFIERS[m] for m in modifiers)
        self.mouse("mousePressed", *start, "left", 1, held=True, modifiers=held)
        for share in (0.3, 0.7, 1.0):
            self.mouse("mouseMoved", start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1]), "left", held=True, modifiers=held)
        self.mouse("mouseReleased", *end, "left", 1, modifiers=held)
        self.settle()

    def screenshot(self, path: Path, whole: bool = False) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]))

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, exceptions nobody caught, and requests beyond the file itself."""
        out = []
        self.call("Runtime.evaluate", expression="0")  # brings what is still on its way
        for event in self.browser.events:
            if event.get("sessionId") != self.session:
                continue
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                out.append(details.get("exception", {}).get("description", details["text"]))
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                out.append(f"{params['type']}: {[a.get('value', a.get('description')) for a in params['args']]}")
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                out.append(f"{params['entry']['level']}: {params['entry']['text']}")
            elif event["method"] == "Network.requestWillBeSent" and not params["request"]["url"].startswith(("file:", "data:")):
                out.append(f"request: {params['request']['url']}")
        return out
