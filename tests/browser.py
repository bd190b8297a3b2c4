"""A real Chromium for tests, headless, with a profile of its own; tests are skipped where there is none.

Its pictures go to the folder that MESHNET_SCREENSHOTS names, or to pytest's temporary one.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException, TimeoutException
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

PATIENCE_S = 120.0  # a busy machine
WIDE, PHONE = (1280, 1000), (390, 844)
_OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--disable-dev-shm-usage", "--no-proxy-server", "--hide-scrollbars",
)  # fmt: skip


@dataclass
class Browser:
    """One page in it."""

    driver: webdriver.Chrome
    pictures: Path

    def open(self, url: str) -> None:
        self.driver.get(url)

    def all(self, css: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def one(self, css: str) -> WebElement:
        """The element, once it is there and shown."""
        found: list[WebElement] = []

        def shown() -> bool:
            found[:] = [element for element in self.all(css) if element.is_displayed()]
            return bool(found)

        self.until(shown, f"{css} is on the page")
        return found[0]

    def button(self, name: str) -> WebElement:
        """The button of that name."""
        (found,) = [button for button in self.all("button") if button.text == name]
        return found

    def text(self, css: str) -> str:
        """What the first such element says; nothing where there is none."""
        try:
            return next((element.text for element in self.all(css)), "")
        except StaleElementReferenceException:
            return ""

    def until(self, true: Callable[[], bool], what: str) -> None:
        """Wait until something holds."""
        waiting = WebDriverWait(self.driver, PATIENCE_S, 0.1, ignored_exceptions=[StaleElementReferenceException])
        try:
            waiting.until(lambda _: true())
        except TimeoutException:
            self.picture("failed")
            pytest.fail(f"it did not come to that: {what}; the page says:\n{self.text('body')}")

    def says(self, text: str, css: str = "body") -> None:
        """Wait until an element says that."""
        self.until(lambda: text in self.text(css), f"{css} says {text!r}")

    def resize(self, size: tuple[int, int]) -> None:
        """The page as on a screen of so many pixels."""
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        """``light`` or ``dark``, as the system says."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def picture(self, name: str) -> None:
        """The whole page as ``name``.png."""
        width, height = self.run("return [window.innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        asked = {"captureBeyondViewport": True, "clip": clip}
        data = self.driver.execute_cdp_cmd("Page.captureScreenshot", asked)["data"]
        (self.pictures / f"{name}.png").write_bytes(base64.b64decode(data))

    def hosts(self) -> set[str]:
        """Who has been asked for anything over the network since this was last called, websockets included."""
        asked = []
        for entry in self.driver.get_log("performance"):  # type: ignore[no-untyped-call]
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                asked.append(message["params"]["request"]["url"])
            elif message["method"] == "Network.webSocketCreated":
                asked.append(message["params"]["url"])
        urls = [urlsplit(url) for url in asked]
        return {url.netloc for url in urls if url.scheme not in {"about", "blob", "chrome", "data"}}

    def complaints(self) -> list[str]:
        """What the page wrote to the console as an error since this was last called."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]  # type: ignore[no-untyped-call]


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """A browser with a new profile in ``folder``; skips the test where there is none."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("there is no Chromium here (on Debian: apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for option in (*_OPTIONS, f"--user-data-dir={folder / 'profile'}", "--window-size=1280,1000"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    pictures = Path(os.environ.get("MESHNET_SCREENSHOTS") or folder / "screenshots")
    pictures.mkdir(parents=True, exist_ok=True)
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))
    try:
        yield Browser(chrome, pictures)
    finally:
        chrome.quit()
