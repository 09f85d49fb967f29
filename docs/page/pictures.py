"""Make the pictures of the page: one of each view, and a film of a recorded run for the README.

    python docs/page/pictures.py

It needs Chromium, Playwright and Pillow, and the model of ``specbeam demo``.
"""

import io
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

HERE = Path(__file__).parent
CHROMIUM = "/usr/bin/chromium"
WIDE, NARROW = {"width": 1440, "height": 960}, {"width": 390, "height": 844}
COLOURS = 128
FILM_WIDTH = 760
FRAME_MS, LAST_FRAME_MS = 260, 4000
REPEAT = 'Repeat this: "The tea is in the red box, the sugar is in the blue box, and the coffee is in the green box."'


def tree(page: Page) -> None:
    page.get_by_role("button", name="Beams with a draft").click()
    replay(page).wait_for()


def race(page: Page) -> None:
    page.get_by_role("button", name="Copied words").click()
    page.locator(".verdict").wait_for()


def branch(page: Page) -> None:
    page.get_by_role("button", name="Beams disagree").click()
    page.locator(".word:not([disabled])").nth(3).click()


def chat(page: Page) -> None:
    page.get_by_label("Message", exact=True).fill("Name three colours.")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Regenerate").wait_for()
    page.get_by_role("button", name="How was this made?").click()
    replay(page).wait_for()


def replay(page: Page) -> object:
    return page.get_by_role("button", name="Replay", exact=True)


def picture(page: Page) -> Image.Image:
    return Image.open(io.BytesIO(page.locator(".panel").screenshot())).convert("RGB")


def film(page: Page, recording: Path) -> None:
    """Step through a recorded run."""
    page.get_by_label("Speed").select_option("Infinity")
    page.locator("input[type=file]").set_input_files(recording)
    replay(page).wait_for()
    place = page.get_by_label("Place in the run")
    place.fill("1")
    frames = []
    for _ in range(int(place.get_attribute("max") or 0)):
        image = picture(page)
        image = image.crop((0, 0, image.width, image.height - 60))
        frames.append(image.resize((FILM_WIDTH, FILM_WIDTH * image.height // image.width)).quantize(COLOURS))
        page.get_by_role("button", name="One step on").click()
        page.wait_for_timeout(50)
    times = [FRAME_MS] * (len(frames) - 1) + [LAST_FRAME_MS]
    frames[0].save(HERE / "film.gif", save_all=True, append_images=frames[1:], duration=times, loop=0, optimize=True)


def main() -> None:
    recording = Path("/tmp/specbeam-film.jsonl")
    how = ["--num-beams", "4", "--draft", "ngram", "--num-draft-tokens", "4", "--draft-width", "4"]
    specbeam = [sys.executable, "-m", "specbeam"]
    generate = ["generate", REPEAT, "--max-new-tokens", "30", *how, "--record", str(recording)]
    subprocess.run([*specbeam, *generate], check=True)
    with (
        subprocess.Popen(
            [*specbeam, "demo", "--port", "0", "--no-browser"], stderr=subprocess.PIPE, text=True
        ) as server,
        sync_playwright() as playwright,
    ):
        url = next(line.split()[-1] for line in server.stderr or () if "the page is" in line)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for act in (tree, race, branch, chat):
            for scheme in ("light", "dark"):
                for name, size in {"wide": WIDE, "narrow": NARROW}.items():
                    page = browser.new_page(color_scheme=scheme, viewport=size, reduced_motion="reduce")
                    page.set_default_timeout(120_000)
                    page.goto(f"{url}#view={act.__name__}")
                    page.locator("option[value=ngram]").wait_for(state="attached")
                    act(page)
                    page.wait_for_timeout(300)
                    image = Image.open(io.BytesIO(page.screenshot(full_page=name == "narrow"))).convert("RGB")
                    image.quantize(COLOURS).save(HERE / f"{act.__name__}-{scheme}-{name}.png", optimize=True)
                    page.close()
        page = browser.new_page(viewport={"width": 1240, "height": 900}, reduced_motion="reduce")
        page.goto(url)
        page.locator("option[value=ngram]").wait_for(state="attached")
        film(page, recording)
        browser.close()
        server.terminate()


if __name__ == "__main__":
    main()
