"""A real browser for tests (Debian's chromium), the runs it looks at, and how to read the viewer.

Test modules take the fixtures by name.
"""

from __future__ import annotations

import os
import shutil
import threading
import time

import numpy as np
import pytest
import uvicorn

from counterpoise.viewer.connection import server_config
from counterpoise.viewer.server import app, free_socket
from helpers.make_run import HOSTILE, make_run

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
SETTINGS = {"num_batches": 4, "prompts": 3, "group_size": 6, "ledger_every": 2, "eval_every": 2}
PATIENCE_MS = 180_000
WATCH = (
    "window.refused = []; document.addEventListener('securitypolicyviolation', (e) =>"
    " window.refused.push(e.violatedDirective))"
)
IS_REQUIRED = bool(
    os.environ.get("REQUIRE_BROWSER")
)  # then a machine without chromium fails instead of passing by
NEEDS_CHROMIUM = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None and not IS_REQUIRED,
        reason="no chromium on the PATH: apt-get install -y --no-install-recommends chromium",
    ),
]


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    assert CHROMIUM, "no chromium on the PATH: apt-get install -y --no-install-recommends chromium"
    with playwright.sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def page(browser):
    """A page that fails its test if a script raised, the policy refused something, or the canary
    was touched.
    """
    made = browser.new_page(viewport={"width": 1440, "height": 900})
    made.set_default_timeout(PATIENCE_MS)
    errors = []
    made.on("pageerror", lambda error: errors.append(str(error)))
    made.on(
        "console", lambda message: errors.append(message.text) if message.type == "error" else None
    )
    made.on("dialog", lambda dialog: errors.append(f"dialog {dialog.message}"))
    made.add_init_script(WATCH)
    yield made
    assert made.evaluate("window.pwned") is None
    assert made.evaluate("window.refused") == []
    assert errors == []
    made.close()


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "run", **SETTINGS)


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory):
    """Hostile strings in every text field, in the method's and in the folder's name."""
    return make_run(
        tmp_path_factory.mktemp("runs") / HOSTILE[0].replace("/", "|"),
        method=HOSTILE[1],
        hostile=True,
        **SETTINGS,
    )


def settled(page, expression):
    """Wait until an expression holds.

    From here: the page's policy forbids the evaluation that Playwright's own waiting does inside
    it.
    """
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(20)


def served(path):
    """The viewer of a run folder; gives its address."""
    bound = free_socket()
    port = bound.getsockname()[1]
    server = uvicorn.Server(server_config(app(path, port)))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{port}/"
    server.should_exit = True
    thread.join()


def opened(page, address, fragment=""):
    """The viewer with its first tokens drawn."""
    page.goto(address + fragment)
    page.wait_for_selector(".t[data-i]")
    return page


def inspected(page):
    """Numbers on the inspector, by their label."""
    page.wait_for_selector("#inspector .numbers")
    pairs = page.locator("#inspector .numbers > *").all_inner_texts()
    return dict(zip(pairs[::2], pairs[1::2]))


def as_shown(value):
    """A value as the viewer writes it."""
    if isinstance(value, str):
        return value
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if value is None or np.isnan(value):
        return "–"
    if float(value) == int(value):
        return f"{int(value):,}"
    size = abs(value)
    if size < 1e-3 or size >= 1e6:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{mantissa}e{int(exponent):+d}"
    rounded = abs(float(f"{value:.3e}"))  # 0.99999 is written 1.000
    return f"{value:.{3 - int(np.floor(np.log10(rounded)))}f}"
