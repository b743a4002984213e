"""Drives a headless Chromium over its DevTools protocol: as little of it as the tests here need."""

import contextlib
import json
import pathlib
import re
import shutil
import subprocess
import tempfile
import time
import urllib.request

import websocket

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --disable-quic --remote-debugging-port=0"
).split()


def find() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextlib.contextmanager
def browser():
    """Yields a function that opens a new page."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen([find(), *FLAGS, f"--user-data-dir={profile}"], stderr=subprocess.DEVNULL)
        try:
            port_file = pathlib.Path(profile, "DevToolsActivePort")
            wait(lambda: port_file.exists() and port_file.read_text().count("\n"), 30, "Chromium to start")
            port = port_file.read_text().split()[0]
            yield lambda: Page(port)
        finally:
            process.terminate()
            process.wait(10)


def wait(condition, seconds: float, what: str):
    """Returns the first true value of `condition()`; fails when there is none within `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.1)
    return value


class Navigated(RuntimeError):
    """The page went away while an expression was evaluated."""


class Page:
    """One tab. `errors` and `requests` collect what the console and the network saw."""

    def __init__(self, port: str):
        request = urllib.request.Request(f"http://127.0.0.1:{port}/json/new", method="PUT")
        with urllib.request.urlopen(request) as answer:
            address = json.load(answer)["webSocketDebuggerUrl"]
        self._socket = websocket.create_connection(address, timeout=30, suppress_origin=True)
        self._sent = 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.wait(f"document.readyState == 'complete' && location.href.startsWith({url!r})", f"{url} to load")

    def resize(self, width: int, height: int) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=True)

    def evaluate(self, expression: str):
        """The value of a JavaScript expression; a promise is awaited."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{expression}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def wait(self, expression: str, what: str, seconds: float = 20):
        """Returns the first true value of `expression`, on this page or on one that it leads to."""

        def condition():
            try:
                return self.evaluate(expression)
            except Navigated:
                return None

        return wait(condition, seconds, what)

    def _call(self, method: str, **params) -> dict:
        self._sent += 1
        self._socket.send(json.dumps({"id": self._sent, "method": method, "params": params}))
        while (message := json.loads(self._socket.recv())).get("id") != self._sent:
            self._note(message["method"], message["params"])
        if "error" in message:
            text = f"{method}: {message['error']['message']}"
            raise (Navigated if re.search("navigated|context", text) else RuntimeError)(text)
        return message["result"]

    def _note(self, event: str, params: dict) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif event == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(" ".join(str(arg.get("value", arg.get("description"))) for arg in params["args"]))
