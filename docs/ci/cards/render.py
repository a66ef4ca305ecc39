"""Draw the pull-request card and the Lark card of one example run as PNG: `python docs/ci/cards/render.py`.

The data is `example-merged.json`, in the form that required-check uploads; both cards are built by the code that sends
them and drawn from a local page by a headless Chromium. Without Chromium the pages are written and nothing else.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from miles_ci.report.analyse import analyse
from miles_ci.report.cards import Card, JobRow
from miles_ci.report.cards.html import page
from miles_ci.report.cards.model import default_analyses
from miles_ci.report.untrusted import read_shard

HERE = Path(__file__).parent
RUN = "https://github.com/miles-rl/miles/actions/runs/19840211"


def example_card() -> Card:
    """The card of the example run."""
    top = json.loads((HERE / "example-merged.json").read_text(encoding="utf-8"))
    shards = [read_shard(entry) for entry in top["shards"]]
    report = analyse(shards, dark=top["dark"], faults=top["faults"], skipped=top["skipped_suites"])
    jobs = []
    for at, shard in enumerate(shards):
        bad = any(test.blocks for test in shard.tests)
        claims = default_analyses(report, shard.suite, shard.shard)
        jobs.append(
            JobRow(f"{shard.suite} ({shard.shard})", f"{RUN}/job/{5000 + at}", "failure" if bad else "success", claims)
        )
    return Card(
        "Nightly: failure",
        "nightly",
        "2026-11-29 15:00 UTC",
        RUN,
        "failure",
        report,
        tuple(jobs),
        commit="4b7c0de19a55" + "0" * 28,
    )


def draw(which: str, height: int, folder: Path) -> bool:
    """One card to `<which>-card.png`; False when there is no Chromium."""
    browser = next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )
    source = folder / f"{which}.html"
    source.write_text(page(example_card(), which=which), encoding="utf-8")
    if browser is None:
        print(f"no Chromium: {source} is the page")
        return False
    target = HERE / f"{which}-card.png"
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1"]
    command = [
        browser,
        *options,
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size=810,{height}",
        f"--screenshot={target}",
        source.as_uri(),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    print(f"{target.relative_to(HERE.parents[2])}: {target.stat().st_size:,} bytes")
    return True


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        drawn = [draw(which, height, Path(name)) for which, height in (("pr", 770), ("lark", 500))]
    sys.exit(0 if all(drawn) else 1)
