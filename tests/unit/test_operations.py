"""Claims about what operators are given: the dashboard, the alerts, and the page that explains them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import yaml

from scripts import dashboard
from servekit.config import settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()
NO_ERRORS = {"other"}  # what a metric's label says in place of one of too many


def codes_in_the_source() -> set[str]:
    """Every text that becomes an error's code."""
    found: set[str] = set()
    for path in (ROOT / "servekit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case (
                    ast.keyword(arg="code", value=value)
                    | ast.AnnAssign(target=ast.Name("code"), value=ast.expr() as value)
                    | ast.Assign(targets=[ast.Name("code")], value=value)
                ):
                    texts = [part.value for part in ast.walk(value) if isinstance(part, ast.Constant)]
                    found |= {text for text in texts if isinstance(text, str)}
    return found - NO_ERRORS


def test_every_error_code_is_explained_and_every_explained_one_exists() -> None:
    table = PAGE.partition("| code | status |")[2].partition("\n\n")[0]
    explained = {code for row in table.splitlines()[2:] for code in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert explained == codes_in_the_source()


def test_the_dashboard_is_what_the_script_says() -> None:
    assert dashboard.FILE.read_text() == dashboard.text(), "python scripts/dashboard.py writes it anew"


def test_panels_do_not_overlap_and_each_says_what_it_shows() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard.panels():
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not taken & cells, panel["title"]
        assert all(x < dashboard.WIDTH for x, _ in cells), panel["title"]
        taken |= cells
        if panel["type"] != "row":
            names = re.findall(
                r"\b((?:servekit|process)_\w+|up)\{", " ".join(each["expr"] for each in panel["targets"])
            )
            assert names and all(f"`{name}`" in panel["description"] for name in names), panel["title"]


def test_every_alert_has_a_runbook() -> None:
    groups = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"]
    names = [rule["alert"] for group in groups for rule in group["rules"]]
    chapter = PAGE.partition("\n## Alerts\n")[2].partition("\n## ")[0]
    assert sorted(names) == sorted(re.findall(r"^### (\w+)$", chapter, re.MULTILINE))
    for runbook in chapter.split("\n### ")[1:]:
        assert "*Symptom:*" in runbook and "*Do:*" in runbook, runbook.splitlines()[0]


def test_the_examples_are_yaml_and_leave_time_for_the_drain() -> None:
    for path in (ROOT / "deploy").rglob("*.yml"):
        assert yaml.safe_load(path.read_text()), path
    block = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[0]
    pod = yaml.safe_load(block)["spec"]
    container = pod["containers"][0]
    command = container["command"]
    drain_s = float(command[command.index("--shutdown-timeout") + 1])
    wait_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= wait_s + drain_s + 10


def test_flags_on_the_page_exist() -> None:
    known = {setting.flag for setting in settings()} | {f"--no-{setting.flag[2:]}" for setting in settings()}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) <= known
