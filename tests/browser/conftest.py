"""A real browser for tests of pages: headless Chromium driven by selenium; tests are skipped where there is none."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = Path("/usr/bin/chromium")
DRIVER = Path("/usr/bin/chromedriver")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1280,900",
)
TIMEOUT_SECONDS = 60

NewTab = Callable[[], contextlib.AbstractContextManager[str]]


@pytest.fixture(scope="session")
def driver() -> Iterator[Any]:
    """The browser of all tests of a process: starting one takes longer than most of them."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    if not (CHROMIUM.exists() and DRIVER.exists()):
        pytest.skip(f"there is no browser: {CHROMIUM} and {DRIVER} are needed")
    with tempfile.TemporaryDirectory(prefix="offbeat-browser-", ignore_cleanup_errors=True) as folder:
        options = webdriver.ChromeOptions()
        options.binary_location = str(CHROMIUM)
        for option in (*OPTIONS, f"--user-data-dir={folder}"):
            options.add_argument(option)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        started = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
        try:
            started.set_page_load_timeout(TIMEOUT_SECONDS)
            started.set_script_timeout(TIMEOUT_SECONDS)
            yield started
        finally:
            with contextlib.suppress(Exception):
                started.quit()


@pytest.fixture(scope="session")
def new_tab(driver: Any) -> NewTab:
    """Opens a tab, which is chosen, for as long as a block runs; its value is the tab's handle."""

    @contextlib.contextmanager
    def opened() -> Iterator[str]:
        first = driver.window_handles[0]
        driver.switch_to.window(first)
        driver.switch_to.new_window("tab")
        handle = driver.current_window_handle
        try:
            yield handle
        finally:
            driver.switch_to.window(handle)
            driver.close()
            driver.switch_to.window(first)

    return opened


@pytest.fixture
def browser(driver: Any, new_tab: NewTab) -> Iterator[Any]:
    """The browser in a new tab; `browser.get_log('browser')` has what its console said."""
    with new_tab():
        driver.get_log("browser")
        yield driver
