"""Make the pictures of the page: each view, each view with 64 beams, and a film of the first run for the README.

    python docs/page/pictures.py [tree race64 film ...]

It needs Chromium, Playwright and Pillow, and the model of ``specbeam demo``.
"""

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from PIL import Image, ImageOps
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

HERE = Path(__file__).parent
CHROMIUM = "/usr/bin/chromium"
SIZES: dict[str, ViewportSize] = {"wide": {"width": 1440, "height": 960}, "narrow": {"width": 390, "height": 844}}
MANY_BEAMS = "&prompt=Once upon a time&as=raw&num_beams=64&draft=none&max_tokens=48"
SHAPES = [(scheme, width) for scheme in ("light", "dark") for width in ("wide", "narrow")]
SHAPES_OF_64 = [("light", "wide"), ("dark", "narrow")]
STILL_COLOURS = FILM_COLOURS = 128
FILM_WIDTH, FILM_EDGE = 760, 16  # px
FRAME_MS, LAST_FRAME_MS = 700, 4000


def tour(page: Page) -> None:
    """What one sees first, without motion."""
    page.get_by_text("Your turn").wait_for()


def tree(page: Page) -> None:
    page.get_by_role("button", name="Beams with a draft").click()
    replay(page).wait_for()
    page.get_by_role("button", name="Fit").click()


def answers(page: Page) -> None:
    page.get_by_role("button", name="Only these answers").click()
    replay(page).wait_for()
    page.locator(".canvas").focus()
    for key in ["ArrowRight", *["ArrowLeft"] * 7]:  # from the end of the text to its first token
        page.keyboard.press(key)


def waiting(page: Page) -> None:
    """A run in which beams wait."""
    page.get_by_role("button", name="Beams that wait").click()
    replay(page).wait_for()


def race(page: Page) -> None:
    page.get_by_role("button", name="One text with a draft").click()
    page.locator(".verdict").wait_for()


def branch(page: Page) -> None:
    page.get_by_role("button", name="Beams disagree").click()
    page.locator(".word:not([disabled])").nth(3).click()


def chat(page: Page) -> None:
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Message", exact=True).fill("Write one sentence about autumn.")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Regenerate").wait_for()
    page.get_by_role("button", name="How was this made?").click()
    replay(page).wait_for()


# The same views with 64 beams. The options stand in the link.


def tree64(page: Page) -> None:
    page.get_by_role("button", name="Grow the tree").click()
    replay(page).wait_for()
    page.get_by_role("button", name="Fit").click()


def race64(page: Page) -> None:
    page.get_by_label("greedy against beams").check()
    page.get_by_role("button", name="Race", exact=True).last.click()
    page.locator(".verdict").wait_for()


def branch64(page: Page) -> None:
    page.get_by_role("button", name="Write", exact=True).click()
    page.locator(".word:not([disabled])").nth(3).click()


def chat64(page: Page) -> None:
    chat(page)


def replay(page: Page) -> object:
    return page.get_by_role("button", name="Replay", exact=True)


def picture(page: Page) -> Image.Image:
    """The panel down to its legend, with an edge."""
    panel, player = (page.locator(name).bounding_box() or {} for name in (".panel", ".player"))
    panel["height"] = player["y"] - panel["y"]
    image = Image.open(io.BytesIO(page.screenshot(clip=panel))).convert("RGB")
    image = ImageOps.expand(image, FILM_EDGE, image.getpixel((image.width - 1, 0)))
    return image.resize((FILM_WIDTH, FILM_WIDTH * image.height // image.width))


def film(page: Page) -> None:
    """Step through the run that the page begins with (``tour.py`` records it)."""
    tour(page)
    place = page.get_by_label("Place in the run")
    place.fill("1")
    frames = []
    for _ in range(int(place.get_attribute("max") or 0)):
        frames.append(picture(page))
        page.get_by_role("button", name="One step on").click()
        page.wait_for_timeout(50)
    # With one palette, pixels that stay the same cost nothing.
    sample = frames[:: len(frames) // 4]
    column = Image.new("RGB", (FILM_WIDTH, frames[0].height * len(sample)))
    for i, frame in enumerate(sample):
        column.paste(frame, (0, i * frame.height))
    palette = column.quantize(FILM_COLOURS, method=Image.Quantize.MAXCOVERAGE, kmeans=1)
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    times = [FRAME_MS] * (len(frames) - 1) + [LAST_FRAME_MS]
    frames[0].save(HERE / "film.gif", save_all=True, append_images=frames[1:], duration=times, loop=0, optimize=True)


def still(browser: Browser, url: str, act: Callable[[Page], None], scheme: str, width: str) -> None:
    name = act.__name__
    page = browser.new_page(color_scheme=scheme, viewport=SIZES[width], reduced_motion="reduce")
    page.set_default_timeout(300_000)
    view = "tree" if name in ("answers", "waiting", "tour") else name.removesuffix("64")
    page.goto(f"{url}#view={view}{MANY_BEAMS if name.endswith('64') else ''}")
    page.locator("option[value=ngram]").wait_for(state="attached")
    act(page)
    page.wait_for_timeout(500)
    image = Image.open(io.BytesIO(page.screenshot(full_page=width == "narrow"))).convert("RGB")
    # Maximum coverage keeps the colours of thin lines, which are few pixels, and k-means the shades of shadows.
    image = image.quantize(STILL_COLOURS, method=Image.Quantize.MAXCOVERAGE, kmeans=3)
    image.save(HERE / f"{name}-{scheme}-{width}.png", optimize=True)
    page.close()


def wanted(act: Callable[..., None]) -> bool:
    """Whether a picture was asked for by its name, or all were."""
    return not sys.argv[1:] or act.__name__ in sys.argv[1:]


def main() -> None:
    demo = [sys.executable, "-m", "specbeam", "demo", "--port", "0", "--no-browser"]
    with subprocess.Popen(demo, stderr=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
        try:
            url = next(line.split()[-1] for line in server.stderr or () if "the page is" in line)
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            shapes = dict.fromkeys((tour, tree, waiting, answers, race, branch, chat), SHAPES)
            shapes |= dict.fromkeys((tree64, race64, branch64, chat64), SHAPES_OF_64)
            for act in shapes:
                for scheme, width in shapes[act] if wanted(act) else []:
                    still(browser, url, act, scheme, width)
            if wanted(film):
                page = browser.new_page(viewport={"width": 1240, "height": 900}, reduced_motion="reduce")
                page.goto(url)
                page.locator("option[value=ngram]").wait_for(state="attached")
                film(page)
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
