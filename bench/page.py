"""Frames of the page while a wide tree is panned and zoomed, and its first paint, in headless Chromium.

    specbeam generate "Once upon a time" --raw --num-beams 64 --max-new-tokens 500 --record wide.jsonl
    python bench/page.py wide.jsonl

It needs Chromium, Playwright, and the model of ``specbeam demo``, which serves the page.

Each gesture is one wheel event per frame, without a rest. Chromium starts a frame every 16.7 ms at most, so that is the
least time between two frames. The time between them counts everything: Chromium without a GPU rasterizes on the
processor, and other programs take their share. So the CPU time of the page's own thread is reported too, from
Chromium's trace. It has scripts, styles, layout and paint lists, and no pixels.
"""

from __future__ import annotations

import argparse
import bisect
import json
import subprocess
import sys
from pathlib import Path
from statistics import median

from machine import describe
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

CHROMIUM = "/usr/bin/chromium"
SIZE: ViewportSize = {"width": 1440, "height": 960}
FRAMES = 120
TURN_FRAMES = 30
"""After these frames, a gesture turns back."""
GESTURES = {"pan": (25, 1), "fast pan": (80, 1), "zoom": (0, 30)}
"""The way of the wheel per frame, in px."""
PAINTS = 5
CATEGORIES = [
    name + end for name in ("devtools.timeline", "disabled-by-default-devtools.timeline") for end in ("", ".frame")
]
GESTURE = """async ([frames, turn, deltaX, deltaY]) => {
    const box = document.querySelector(".canvas"), { x, y } = box.getBoundingClientRect(), times = [];
    const at = { clientX: x + 300, clientY: y + 200, bubbles: true, cancelable: true };
    for (let i = 0; i <= frames; i++) {
        times.push(await new Promise(requestAnimationFrame));
        const way = i % (2 * turn) < turn ? -1 : 1;
        box.dispatchEvent(new WheelEvent("wheel", { ...at, deltaX: way * deltaX, deltaY: -way * deltaY }));
    }
    return times.slice(1).map((time, i) => time - times[i]);
}"""


def frame_times(browser: Browser, page: Page, delta: tuple[int, int]) -> tuple[list[float], list[float]]:
    """Milliseconds from frame to frame, and milliseconds of CPU time of the page's thread, per frame."""
    browser.start_tracing(page=page, categories=CATEGORIES)
    intervals = page.evaluate(GESTURE, [FRAMES, TURN_FRAMES, *delta])
    events = json.loads(browser.stop_tracing())["traceEvents"]
    threads = [(event["pid"], event["tid"]) for event in events if event["name"] == "FireAnimationFrame"]
    tasks = [event for event in events if event["name"] == "RunTask" and "tdur" in event]
    tasks = [task for task in tasks if (task["pid"], task["tid"]) == threads[0]]
    begins = sorted(event["ts"] for event in events if event["name"] == "BeginMainThreadFrame")
    work = [0.0] * (len(begins) + 1)
    for task in tasks:
        work[bisect.bisect(begins, task["ts"] + task["dur"])] += task["tdur"] / 1000
    return intervals, work[1:]


def line(name: str, times: list[float]) -> str:
    p95 = sorted(times)[int(0.95 * len(times))]
    return f"{name}: median {median(times):.1f} ms, 95 % below {p95:.1f} ms, at most {max(times):.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path)
    given = parser.parse_args()
    command = [sys.executable, "-m", "specbeam", "demo", "--port", "0", "--no-browser"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            url = next(line.split()[-1] for line in server.stderr or () if "the page is" in line)
            measure(url, given.recording)
        finally:
            server.terminate()


def measure(url: str, recording: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        print(describe(f"Chromium {browser.version}"))
        paints = []
        for _ in range(PAINTS):
            page = browser.new_page(viewport=SIZE)  # with an empty cache
            page.goto(url)
            page.locator("option[value=ngram]").wait_for(state="attached")
            paints.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
            page.close()
        print(line("first paint", paints))
        page = browser.new_page(viewport=SIZE)
        page.goto(url)
        page.get_by_label("Speed").select_option("Infinity")
        page.locator("input[type=file]").set_input_files(recording)
        page.get_by_role("button", name="Replay", exact=True).wait_for()
        for place in ("at full size", "all in the window"):
            for name, delta in GESTURES.items():
                page.wait_for_timeout(500)
                intervals, work = frame_times(browser, page, delta)
                print(line(f"{name}, {place}: from frame to frame", intervals))
                print(line(f"{name}, {place}: the page's thread", work))
            page.get_by_role("button", name="Fit").click()
        browser.close()


if __name__ == "__main__":
    main()
