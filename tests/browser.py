"""A headless browser that looks at the dashboard."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from tests.waiting import eventually

_FIGURE = "Bokeh.documents[0].get_model_by_name(arguments[0])"
_PLACE = f"""
const figure = {_FIGURE}, view = Bokeh.index.find_one(figure);
view.el.scrollIntoView({{block: "center"}});
const box = view.el.getBoundingClientRect();
const {{x_scale, y_scale}} = view.frame;
return {{x: box.x + x_scale.compute(arguments[1]), y: box.y + y_scale.compute(arguments[2])}};
"""
_TOOLTIPS = """
const found = [];
function look(root) {
  for (const element of root.querySelectorAll("*")) {
    const tip = element.matches(".bk-tooltip-content") && element.checkVisibility();
    if (tip) found.push(element.innerText);
    if (element.shadowRoot) look(element.shadowRoot);
  }
}
look(document);
return found.join("\\n");
"""
_SCRIPT_SECONDS = 120.0
"""Maximum number of seconds that a script takes. Beside other tests, the browser gets little CPU."""
_DRAWN = "!!window.Bokeh && Bokeh.documents.length > 0 && Bokeh.documents[0].is_idle"


def missing() -> str | None:
    """Return what is missing to open a browser here; None if nothing is."""
    lacking = [program for program in ("chromium", "chromedriver") if shutil.which(program) is None]
    return " and ".join(lacking) or None


class Browser:
    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str, seconds: float = 60) -> float:
        """Seconds until all of the page was drawn."""
        begin = time.monotonic()
        self.driver.get(url)
        eventually(self.drawn, seconds)
        return time.monotonic() - begin

    def drawn(self) -> bool:
        """Whether all of the page is."""
        return bool(self.run(f"return {_DRAWN}"))

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def column(self, figure: str, layer: str, column: str) -> list[Any]:
        """Return the drawn models as the browser has them."""
        script = "find(r => r.name === arguments[1]).data_source.data[arguments[2]]"
        found: list[Any] = self.run(
            f"return Array.from({_FIGURE}.renderers.{script})", figure, layer, column
        )
        return found

    def layers(self, figure: str) -> list[str]:
        """Names of what a figure draws; none while it is hidden."""
        script = f"const f = {_FIGURE}; return f.visible ? f.renderers.map(r => r.name) : []"
        found: list[str] = self.run(script, figure)
        return found

    def words(self, name: str) -> str:
        """The text of a part of the page."""
        return str(self.model(name, "text"))

    def hover(self, figure: str, x: float, y: float) -> str:
        """The words that appear where the pointer is moved to this place of the figure; or none."""
        place = self.run(_PLACE, figure, x, y)
        move = {"type": "mouseMoved", "x": place["x"], "y": place["y"]}
        self.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {**move, "x": 1})
        self.driver.execute_cdp_cmd("Input.dispatchMouseEvent", move)
        time.sleep(0.3)
        words: str = self.run(_TOOLTIPS)
        return words

    def model(self, name: str, attribute: str) -> Any:
        """An attribute of a model of the page."""
        return self.run(f"return {_FIGURE}[arguments[1]]", name, attribute)

    def header(self) -> str:
        return self.words("header-0")

    def heap(self) -> float:
        """MB of JavaScript's heap, after its garbage has been collected."""
        self.driver.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
        return float(self.run("return performance.memory.usedJSHeapSize")) / 1e6

    def requests(self) -> list[str]:
        """The addresses of all that the page has loaded."""
        found: list[str] = self.run("return performance.getEntriesByType('resource').map(r => r.name)")
        return found

    def complaints(self) -> list[str]:
        """Errors on the browser's console, but for requests that it drops because another test has
        changed this host's network interfaces. If something is missing then, the page shows it."""
        told = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        errors = [entry["message"] for entry in told if entry["level"] == "SEVERE"]
        return [error for error in errors if "net::ERR_NETWORK_CHANGED" not in error]


@contextmanager
def opened(
    theme: Literal["light", "dark"] = "light", size: tuple[int, int] = (1400, 1500)
) -> Iterator[Browser]:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars",
                     "--enable-unsafe-swiftshader", f"--window-size={size[0]},{size[1]}"):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    driver.set_script_timeout(_SCRIPT_SECONDS)
    try:
        media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        yield Browser(driver)
    finally:
        driver.quit()
