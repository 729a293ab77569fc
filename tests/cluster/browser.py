"""A headless Chromium, told what to do over its debugging pipe: no driver, no package, no port."""

import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOUND = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_WAIT_S = 30.0
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--remote-debugging-pipe",
)  # fmt: skip
# Looks at the page again whenever it changes, until the condition holds.
_UNTIL = """
new Promise((done) => {
  const look = () => {
    let found = null;
    try { found = %s } catch {}
    if (found) { seen.disconnect(); done(found) }
  };
  const seen = new MutationObserver(look);
  seen.observe(document, { subtree: true, childList: true, characterData: true, attributes: true });
  look();
})
"""


class Browser:
    """One page of a Chromium, and every address that it asked for."""

    def __init__(self, to_chromium: int, from_chromium: int) -> None:
        self.asked: list[str] = []  # URLs
        self.complaints: list[str] = []  # uncaught errors, and what its policy forbade
        self._to, self._from = to_chromium, from_chromium
        self._readable = select.poll()  # select() takes no descriptor above 1,023
        self._readable.register(self._from, select.POLLIN)
        self._read = b""
        self._number = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """What a method of the DevTools protocol returns."""
        self._number += 1
        asked: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._to, json.dumps(asked).encode() + b"\0")
        while (message := self._next()).get("id") != self._number:
            self._note(message)
        assert "error" not in message, message
        return message["result"]

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def until(self, condition: str) -> Any:
        """The condition's value in the page, once it is a true one."""
        found = self.call("Runtime.evaluate", expression=_UNTIL % condition, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"]["value"]

    def run(self, script: str) -> Any:
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def write(self, text: str) -> None:
        """As if it was typed where the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text=text)

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2, mobile=False)

    def _note(self, message: dict[str, Any]) -> None:
        said = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.asked.append(said["request"]["url"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(said["exceptionDetails"]["text"])
        elif message.get("method") == "Log.entryAdded" and said["entry"]["source"] == "security":
            self.complaints.append(said["entry"]["text"])

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _WAIT_S
        while b"\0" not in self._read:
            ready = self._readable.poll(1e3 * max(0.0, deadline - time.monotonic()))
            assert ready, f"Chromium said nothing for {_WAIT_S:.0f} s"
            piece = os.read(self._from, 1 << 16)
            assert piece, "Chromium has ended"
            self._read += piece
        message, _, self._read = self._read.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


@contextlib.contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile in this folder; it ends with the block."""
    assert FOUND is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    high = [fcntl.fcntl(each, fcntl.F_DUPFD, 64) for each in (theirs_in, theirs_out)]  # neither is 3 or 4
    command = [FOUND, *_FLAGS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{high[0]} 4>&{high[1]}', "bash", *command],
        pass_fds=high, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    for each in (theirs_in, theirs_out, *high):
        os.close(each)
    try:
        browser = Browser(ours_out, ours_in)
        yield browser
        browser.call("Browser.close")
    finally:
        os.close(ours_out)
        os.close(ours_in)
        process.kill()
        process.wait(10.0)
