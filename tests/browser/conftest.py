"""A real browser for tests of pages: headless Chromium driven by selenium; tests are skipped where there is none."""

import contextlib
import tempfile
from collections.abc import Iterator
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


@pytest.fixture
def browser() -> Iterator[Any]:
    """A fresh browser; `browser.get_log('browser')` has what its console said."""
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
        driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
        try:
            driver.set_page_load_timeout(TIMEOUT_SECONDS)
            driver.set_script_timeout(TIMEOUT_SECONDS)
            yield driver
        finally:
            with contextlib.suppress(Exception):
                driver.quit()
