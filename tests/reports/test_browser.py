"""The pages of `compare` in a real browser, if one is installed: legibility, console and network requests."""

import json
import re
import shutil
import subprocess

import fake_runs
import numpy as np
import pytest
from commands import run_in_process
from matplotlib import image


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no browser: looked for chromium, chromium-browser and google-chrome"),
]
SCHEMES = {"dark": 0, "light": 1}  # values of Chromium's setting
MIN_CONTRAST = 4.5  # minimum contrast of text and background (WCAG 2.1, AA)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    sweep = fake_runs.write_sweep(folder / "s")
    assert run_in_process(["", "", "leanformer.compare", str(sweep), f"--out={folder}"])[0] == 0
    assert run_in_process(["", "", "leanformer.compare", str(sorted(sweep.iterdir())[0]), f"--out={folder}"])[0] == 0
    return folder


def open_page(page, folder, scheme="light", *words):
    """Open a page; return the lines of its console, and the URLs that were requested."""
    log = folder / "net.json"
    process = subprocess.run(
        [
            *(
                BROWSER,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--no-first-run",
                "--disable-background-networking",
            ),
            *(f"--user-data-dir={folder / 'user'}", "--enable-logging=stderr", f"--log-net-log={log}"),
            *("--host-resolver-rules=MAP * ~NOTFOUND", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"),
            *("--hide-scrollbars", "--window-size=1100,1600", *words, page),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    requests = {
        event["params"]["url"].partition("?")[0]
        for event in json.loads(log.read_text())["events"]
        if "url" in event.get("params", {}) and re.match(r"(https?|wss?|ftp):", event["params"]["url"])
    }
    return [line for line in process.stderr.splitlines() if "CONSOLE" in line], requests


@pytest.fixture(scope="module")
def blank_page_requests(tmp_path_factory):
    """Return the requests that this browser makes with a blank page."""
    folder = tmp_path_factory.mktemp("blank")
    return open_page("about:blank", folder, "light", "--dump-dom")[1]


def luminance(pixels):
    """Return relative luminance as defined by WCAG, for pixels from 0 to 1."""
    linear = np.where(pixels <= 0.04045, pixels / 12.92, ((pixels + 0.055) / 1.055) ** 2.4)
    return linear @ np.array([0.2126, 0.7152, 0.0722])


@pytest.mark.parametrize("name", ["compare", "run"])
@pytest.mark.parametrize("scheme", [*SCHEMES])
def test_page_is_legible_and_makes_no_requests(pages, blank_page_requests, tmp_path, name, scheme):
    shot = tmp_path / "shot.png"
    console, requests = open_page(f"file://{pages / name}.html", tmp_path, scheme, f"--screenshot={shot}")
    assert console == [] and requests <= blank_page_requests
    luminances = luminance(image.imread(shot)[:, :, :3].astype(float))
    background = float(np.median(luminances))
    assert (background > 0.9) if scheme == "light" else (background < 0.02)
    contrast = (np.maximum(luminances, background) + 0.05) / (np.minimum(luminances, background) + 0.05)
    halves = np.array_split(contrast > MIN_CONTRAST, 2)  # text at the top, and charts below
    assert all(0.005 < half.mean() < 0.3 for half in halves)


@pytest.mark.parametrize("name", ["compare", "run"])
def test_page_prints_on_a_few_sheets(pages, tmp_path, name):
    paper = tmp_path / "paper.pdf"
    console, _ = open_page(
        f"file://{pages / name}.html", tmp_path, "dark", "--no-pdf-header-footer", f"--print-to-pdf={paper}"
    )
    sheets = len(re.findall(rb"/Type\s*/Page\b", paper.read_bytes()))
    assert console == [] and 1 < sheets < 12


def test_requests_and_errors_of_a_page_are_detected(blank_page_requests, tmp_path):
    """Negative control of the tests above."""
    page = tmp_path / "bad.html"
    page.write_text("<img src='http://elsewhere.invalid/a.png'><script>missing()</script>")
    console, requests = open_page(f"file://{page}", tmp_path, "light", f"--screenshot={tmp_path / 'shot.png'}")
    assert any("missing" in line for line in console)
    assert "http://elsewhere.invalid/a.png" in requests - blank_page_requests
