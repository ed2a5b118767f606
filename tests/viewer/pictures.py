"""The pictures of docs/viewer.md, and how large pages are and how fast they open.

crop-trl replay --config examples/configs/tiny_math.yaml --use_cpu true --num_counterfactuals 4 --bank runs/bank
PYTHONPATH=.:tests python -m viewer.pictures runs/bank docs/images
"""

import base64
import io
import sys
import time
from pathlib import Path

import PIL.Image
from viewer.in_browser import Shown
from viewer.pages import chromium, made_up_bank, words_tokenizer

from crop_trl.analysis.bank import RolloutBank
from crop_trl.analysis.tokens import load_tokenizer
from crop_trl.viewer.page import bank_page

# Of each: width and height, scheme, what is done, and the answer to begin with.
PICTURES = {
    "viewer_answer": (1280, 900, "light", "document.querySelector('#verdict button').click()"),
    "viewer_batch": (1280, 900, "dark", "show(2), document.querySelector('#tab1').scrollIntoView()"),
    "viewer_tablet": (820, 900, "dark", "document.querySelector('#verdict button').click()"),
    "viewer_list": (820, 900, "light", "show(3), document.querySelector('#tab1').scrollIntoView()"),
    "viewer_phone": (390, 900, "light", "document.querySelector('#verdict').scrollIntoView()"),
    "viewer_phone_token": (390, 900, "dark", "document.querySelector('#verdict button').click()"),
}


def take(browser, page: Path, folder: Path, part: str) -> None:
    """Draw each picture."""
    for name, (width, height, scheme, code) in PICTURES.items():
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        Shown(browser, page, page.read_text(), part).run(code)
        browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
        picture = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
        image = PIL.Image.open(io.BytesIO(base64.b64decode(picture["data"]))).convert("RGB")
        image.quantize(128, dither=PIL.Image.Dither.NONE).save(folder / f"{name}.png", optimize=True)


def measure(browser, name: str, page: Path, text: str) -> None:
    """Print size, seconds until the page can be used, and until a step of the slider is seen."""
    shown = Shown(browser, page, text)
    opened = int(shown.run("document.documentElement.dataset.ready")) / 1000
    start = time.perf_counter()
    shown.run("(setBudget('30'), document.body.offsetHeight)")
    print(f"{name}: {len(text) / 1e6:.1f} MB, opens in {opened:.1f} s, slides in {time.perf_counter() - start:.2f} s")


def main(bank: str, folder: str) -> None:
    """Draw and measure."""
    page, bank = Path(folder).resolve() / "page.html", RolloutBank.load(bank)
    with chromium() as browser:
        try:
            page.write_text(bank_page(bank, load_tokenizer(None, "the bank", bank.settings)))
            take(browser, page, page.parent, "#answer=1&second=entropy")
            browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
            measure(browser, f"{len(bank.rows)} answers of the bank", page, page.read_text())
            for count in (64, 1000):
                made_up = made_up_bank([300] * count, 50_000, counterfactuals=4, flat=0.5)
                text = bank_page(made_up, words_tokenizer(50_000), responses=count)
                measure(browser, f"{count} answers of 300 tokens, 12 predictions each", page, text)
        finally:
            page.unlink(missing_ok=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
