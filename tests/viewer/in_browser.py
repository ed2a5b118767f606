"""A page that is open in a real browser."""

import numpy as np

SECONDS = 120  # only to end a hang


class Shown:
    """A page that is open."""

    def __init__(self, browser, path, text: str, part: str = ""):
        from selenium.webdriver.support.ui import WebDriverWait

        path.write_text(text, encoding="utf-8")
        self.browser = browser
        browser.get("about:blank")
        browser.get_log("performance")
        browser.get(path.as_uri() + part)
        ready = "return document.documentElement.dataset.ready"
        WebDriverWait(browser, SECONDS).until(lambda _: browser.execute_script(ready))

    def run(self, code: str, *arguments):
        return self.browser.execute_script(f"return {code}", *arguments)

    def find(self, selector: str):
        return self.browser.find_element("css selector", selector)

    def all(self, selector: str):
        return self.browser.find_elements("css selector", selector)

    def text(self, selector: str) -> str:
        return self.run("document.querySelector(arguments[0]).textContent", selector)

    def choose(self, name: str, value: str) -> None:
        from selenium.webdriver.support.ui import Select

        self.run("document.querySelector('#more').open = true")
        Select(self.find(f"#{name}")).select_by_value(value)

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.browser).send_keys(*keys).perform()

    def mask(self, name: str) -> np.ndarray:
        return np.array(self.run("Array.from(kept(arguments[0]))", name), dtype=bool)

    def complaints(self) -> list:
        """Errors of the script, and requests for anything but the page."""
        import json

        asked = [json.loads(entry["message"])["message"] for entry in self.browser.get_log("performance")]
        urls = [m["params"]["request"]["url"] for m in asked if m["method"] == "Network.requestWillBeSent"]
        return self.browser.get_log("browser") + [url for url in urls if not url.startswith(("file:", "about:"))]


def number(shown: str) -> float:
    """A percentage as it is written."""
    return 0.0 if "<" in shown else float(shown.replace("%", ""))
