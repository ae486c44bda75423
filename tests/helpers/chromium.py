"""Chromium without a window, told what to do through a pipe (its DevTools protocol)."""

import base64
import json
import shutil
import subprocess
import time

BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """A page at an address, to use in a `with`.

    Args:
      url: of the page.
      folder: for what the browser keeps; a new one.
    """

    def __init__(self, url, folder):
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        # It reads commands from descriptor 3 and writes to 4.
        command = [
            "sh",
            "-c",
            'exec "$@" 3<&0 4>&1 >/dev/null 2>&1',
            "sh",
            BINARY,
            *options,
            f"--user-data-dir={folder}",
        ]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._count, self._session, self._url, self._read = 0, {}, url, b""

    def __enter__(self):
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        self.send("Page.navigate", url=self._url)
        self.wait("document.readyState == 'complete' && location.href != 'about:blank'")
        return self

    def __exit__(self, *error):
        self._process.kill()
        self._process.communicate()

    def send(self, method, **params):
        """Sends a command, and waits for its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params} | self._session
        self._process.stdin.write(json.dumps(message).encode() + b"\0")
        self._process.stdin.flush()
        reply = {}
        while reply.get("id") != self._count:  # events come between
            reply = self._receive()
        return reply["result"]

    def _receive(self):
        while b"\0" not in self._read:
            new = self._process.stdout.read1()
            assert new, "Chromium has ended"
            self._read += new
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)

    def run(self, script):
        """The value of some JavaScript."""
        return self.send("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def wait(self, condition, seconds=60):
        """Waits until some JavaScript is true."""
        ends = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < ends, self.run("document.body.innerText")
            time.sleep(0.05)

    def type(self, text):
        """Types a text where the cursor is, and Enter."""
        self.send("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13)

    def resize(self, width, height):
        """The size of the screen in pixels."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self, path):
        """Writes what is on the screen to a PNG file."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))
