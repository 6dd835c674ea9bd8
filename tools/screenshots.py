"""A recorded folder → docs/images/report.png and view.png, as a browser shows them.

python tools/screenshots.py trace/
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from offbeat.profile.source import load_recording
from offbeat.report import write_report
from offbeat.report.live import Session

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
sys.path[:0] = [str(ROOT / "tests" / "browser"), str(ROOT / "tests" / "shared")]
from conftest import CHROMIUM, DRIVER, OPTIONS  # noqa: E402 - the tests' browser is the one to show pages with
from live_server import serving  # noqa: E402


def main(trace: Path) -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="offbeat-browser-", ignore_cleanup_errors=True) as folder:
        options = webdriver.ChromeOptions()
        options.binary_location = str(CHROMIUM)
        for option in (*OPTIONS, f"--user-data-dir={folder}", "--window-size=1280,1100"):
            options.add_argument(option)
        browser = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
        try:
            report = Path(folder) / "report.html"
            write_report(report, load_recording(trace), title=trace.name)
            shoot(browser, report.as_uri(), "report.png")
            with serving(Session.of_recording(trace)) as server:
                shoot(browser, server.url, "view.png")
        finally:
            browser.quit()


def shoot(browser: Any, address: str, name: str) -> None:
    browser.get(address)
    # Charts are drawn after the page has loaded, and rankings arrive later still.
    time.sleep(8)
    browser.save_screenshot(str(IMAGES / name))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
