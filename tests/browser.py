"""Headless Chromium for tests. Without Chromium a test is skipped, or fails if LR_ATTNRES_REQUIRE_BROWSER is set."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


# Without them the browser itself sends requests, which a test would count as requests of the page.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def open_browser() -> Iterator:
    """A Playwright browser that uses the installed Chromium."""
    chromium = shutil.which("chromium")
    if chromium is None:
        message = "there is no `chromium` on the PATH (Debian: apt-get install chromium)"
        if os.environ.get("LR_ATTNRES_REQUIRE_BROWSER"):
            pytest.fail(message)
        pytest.skip(message)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()
