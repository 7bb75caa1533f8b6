# SPDX-License-Identifier: Apache-2.0
"""TensorBoard as a person sees it: in a headless Chromium.

python -m tests.browser runs docs/images/tensorboard.png

makes the picture of TensorBoard in the documentation, of the runs in a directory. It
needs Debian's package chromium, or another browser of that kind.
"""

import base64
import contextlib
import fcntl
import io
import json
import os
import pathlib
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import PIL.Image

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_browser():
    """The path of a browser, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a browser; use it with `with`.

    It is steered by the Chrome DevTools Protocol: JSON over the pipes that the browser
    has as file descriptors 3 and 4, each message ended by a zero byte.
    """

    def __init__(self, width=1400, height=1000):
        self.size = f"--window-size={width},{height}"
        self.num_asked = 0
        self.session = {}
        self.unread = b""

    def __enter__(self):
        self.home = tempfile.mkdtemp(prefix="browser-")
        to_browser, self.to = os.pipe()
        self.back, from_browser = os.pipe()
        # Out of the way of 3 and 4.
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (to_browser, from_browser)]  # fmt: skip

        def place():
            os.dup2(theirs[0], 3)
            os.dup2(theirs[1], 4)

        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        flags += ["--disable-dev-shm-usage", "--remote-debugging-pipe", self.size]
        self.process = subprocess.Popen(
            [find_browser(), *flags, f"--user-data-dir={self.home}", "about:blank"],
            pass_fds=(3, 4),
            preexec_fn=place,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for fd in (to_browser, from_browser, *theirs):
            os.close(fd)
        page = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=page, flatten=True)
        self.session = {"sessionId": attached["sessionId"]}
        return self

    def __exit__(self, *unused_exc):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=10)
        os.close(self.to)
        os.close(self.back)
        shutil.rmtree(self.home, ignore_errors=True)

    def ask(self, method, timeout_s=60, **params):
        """The answer to a command of the protocol; what else is said is not heard."""
        self.num_asked += 1
        question = {"id": self.num_asked, "method": method, "params": params}
        os.write(self.to, json.dumps(question | self.session).encode() + b"\0")
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.back, selectors.EVENT_READ)
            while True:
                message, end, rest = self.unread.partition(b"\0")
                if end:
                    self.unread = rest
                    answer = json.loads(message)
                    if answer.get("id") == self.num_asked:
                        assert "error" not in answer, answer
                        return answer["result"]
                    continue
                left_s = deadline - time.monotonic()
                assert selector.select(max(left_s, 0)), f"{method}: no answer"
                data = os.read(self.back, 2**20)
                assert data, "the browser has ended"
                self.unread += data

    def open(self, url):
        self.ask("Page.navigate", url=url)

    def evaluate(self, expression):
        """The value of a JavaScript expression in the page."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self):
        shot = self.ask("Page.captureScreenshot", format="png")
        return PIL.Image.open(io.BytesIO(base64.b64decode(shot["data"])))


@contextlib.contextmanager
def tensorboard(logdir):
    """The address of a TensorBoard on the directory."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir)]
    process = subprocess.Popen(
        [*command, "--port=0", "--host=localhost"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        for line in process.stderr:  # Ends with the process.
            if found := re.search(r"http://localhost:\d+/", line):
                yield found.group()
                return
        raise AssertionError("tensorboard did not start")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)
        process.stderr.close()


CARDS = """
[...document.querySelectorAll('scalar-card, image-card')].map(card => ({
  text: card.innerText,
  chart: card.querySelector('canvas, line-chart')?.getBoundingClientRect().toJSON(),
  image: card.querySelector('img')?.src,
  is_loaded: (card.querySelector('img')?.naturalWidth || 0) > 0,
}))
"""
CLOSE_SETTINGS = "[...document.querySelectorAll('button')].find("
CLOSE_SETTINGS += "button => button.innerText.includes('Settings'))?.click()"


def see_cards(page, url, tags, num_cards, timeout_s=100):
    """TensorBoard's cards whose tags match, when lines and pictures are drawn."""
    page.open(f"{url}?tagFilter={tags}&smoothing=0.9#timeseries")
    deadline = time.monotonic() + timeout_s
    is_wide = False
    while True:
        cards = page.evaluate(CARDS) or []
        if len(cards) == num_cards and not is_wide:
            page.evaluate(CLOSE_SETTINGS)  # Gives the cards more room.
            is_wide = True
        elif len(cards) == num_cards and all(is_drawn(page, card) for card in cards):
            return cards
        assert time.monotonic() < deadline, f"these cards are there: {cards}"
        time.sleep(0.5)


def is_drawn(page, card):
    """Whether a card shows its picture, or a line in its chart: something coloured."""
    if "chart" not in card:
        return card["is_loaded"]
    box = [round(card["chart"][side]) for side in ("left", "top", "right", "bottom")]
    chart = page.screenshot().convert("HSV").crop(box)
    return sum(chart.getchannel("S").point(lambda x: x > 60).histogram()[1:]) > 200


def main(logdir, out):
    tags = "SPS|episodic_return|entropy_loss|policy_lag|share_environment|videos"
    with tensorboard(logdir) as url, Browser(1500, 1090) as page:
        num_videos = len(list(pathlib.Path(logdir).glob("*/test")))
        see_cards(page, url, tags, 5 + num_videos)
        time.sleep(3)  # Cards may still move to their places.
        picture = page.screenshot().convert("P", palette=PIL.Image.Palette.ADAPTIVE)
        picture.save(out, optimize=True)
        print(f"wrote {out}")


if __name__ == "__main__":
    main(*sys.argv[1:])
