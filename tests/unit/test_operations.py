"""Claims about what operators are given: the dashboard, the alerts, and the page that explains them."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from scripts import dashboard
from servekit.config import ServeConfig, settings
from servekit.metrics import Metrics, Snapshot

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PAGE = (ROOT / "docs" / "operations.md").read_text()
UNIT = (DEPLOY / "servekit.service").read_text()
IMAGE = (DEPLOY / "Dockerfile").read_text()
DEPLOYMENT, SERVICE = yaml.safe_load_all((DEPLOY / "kubernetes.yml").read_text())
RULES = {
    rule["alert"]: rule
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
}
DEFAULTS = ServeConfig()
SNAPSHOT = Snapshot(**dict.fromkeys(Snapshot.__struct_fields__, 1))
FOREIGN_FLAGS = {"--gpus", "--stop-timeout", "--previous"}  # docker's and kubectl's
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
                    found |= set(texts(value))
    return found - NO_ERRORS


def texts(value: ast.AST) -> Iterator[str]:
    """What it may be, literally; a text that something is looked up with is none of its values."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value
    if not isinstance(value, ast.Call | ast.Subscript):
        for part in ast.iter_child_nodes(value):
            yield from texts(part)


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


# -- alerts ------------------------------------------------------------------------------------------------------------


def test_every_alert_has_a_runbook_and_leads_to_it() -> None:
    chapter = PAGE.partition("\n## Alerts\n")[2].partition("\n## ")[0]
    assert sorted(RULES) == sorted(re.findall(r"^### (\w+)$", chapter, re.MULTILINE))
    for runbook in chapter.split("\n### ")[1:]:
        assert "*Symptom:*" in runbook and "*Do:*" in runbook, runbook.splitlines()[0]
    for name, rule in RULES.items():
        assert rule["annotations"]["runbook_url"].endswith(f"/operations.md#{name.lower()}")


def value(expression: Any, samples: dict[str, float]) -> float | None:
    """What PromQL makes of one server's samples, as far as alerts about its state go; None is an empty result."""
    match expression:
        case promql_parser.NumberLiteral():
            return float(expression.val)
        case promql_parser.VectorSelector():
            return samples.get(expression.name)
    assert isinstance(expression, promql_parser.BinaryExpr)
    left, right = value(expression.lhs, samples), value(expression.rhs, samples)
    match str(expression.op):
        case "and":
            return None if right is None else left
        case "unless":
            return left if right is None else None
        case "==":
            return left if left is not None and left == right else None
    raise NotImplementedError(expression.op)


@pytest.mark.parametrize(
    ("alive", "has_loaded", "is_draining", "told"),
    [
        (False, False, False, {"ServekitLoadsLong"}),  # after half an hour
        (True, True, False, set()),
        (False, True, False, {"ServekitNoWorker"}),
        (False, True, True, set()),
    ],
)
def test_a_missing_worker_wakes_somebody_unless_the_first_one_loads(
    alive: bool, has_loaded: bool, is_draining: bool, told: set[str]
) -> None:
    metrics = Metrics(DEFAULTS, "0")
    metrics.workers_alive.set(alive)
    metrics.is_draining = is_draining
    if has_loaded:
        metrics.watch(lambda: SNAPSHOT)
    samples = {sample.name: sample.value for family in metrics.registry.collect() for sample in family.samples}
    about_workers = ("ServekitNoWorker", "ServekitLoadsLong")
    assert {
        name for name in about_workers if value(promql_parser.parse(RULES[name]["expr"]), samples) is not None
    } == told


# -- examples ----------------------------------------------------------------------------------------------------------


def flag(command: list[str], name: str) -> float:
    return float(command[command.index(name) + 1])


def test_the_examples_leave_time_for_the_drain_and_for_loading() -> None:
    pod = DEPLOYMENT["spec"]["template"]["spec"]
    container = pod["containers"][0]
    wait_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= wait_s + flag(container["args"], "--shutdown-timeout") + 10
    start = container["startupProbe"]
    assert DEFAULTS.load_timeout <= start["periodSeconds"] * start["failureThreshold"]
    assert start["periodSeconds"] * start["failureThreshold"] < DEPLOYMENT["spec"]["progressDeadlineSeconds"]
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    command = re.findall(r"^ExecStart=(.*)$", UNIT, re.MULTILINE)[0].split()
    stop_s = float(re.findall(r"^TimeoutStopSec=(.*)$", UNIT, re.MULTILINE)[0])
    assert stop_s >= flag(command, "--shutdown-timeout") + 10


def test_the_examples_fit_together() -> None:
    for path in DEPLOY.rglob("*.yml"):
        assert all(yaml.safe_load_all(path.read_text())), path
    pod = DEPLOYMENT["spec"]["template"]
    container = pod["spec"]["containers"][0]
    assert SERVICE["spec"]["selector"] == DEPLOYMENT["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    assert {volume["name"] for volume in pod["spec"]["volumes"]} == {each["name"] for each in container["volumeMounts"]}
    assert f"EXPOSE {container['ports'][0]['containerPort']}" in IMAGE
    assert container["ports"][0]["containerPort"] == DEFAULTS.port
    assert f"USER {pod['spec']['securityContext']['fsGroup']}" in IMAGE


def test_the_image_is_built_from_all_that_the_package_is() -> None:
    copied = {name for line in re.findall(r"^COPY (.*)$", IMAGE, re.MULTILINE) for name in line.split()[:-1]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    needed = {"pyproject.toml", "constraints.txt", project["project"]["readme"], *project["project"]["license-files"]}
    assert copied == {*needed, *packages}
    assert all((ROOT / name).exists() for name in copied)


def test_flags_and_variables_that_are_shown_exist() -> None:
    known = {setting.flag for setting in settings()} | {f"--no-{setting.flag[2:]}" for setting in settings()}
    variables = {setting.environment_name for setting in settings()}
    examples = [*DEPLOYMENT["spec"]["template"]["spec"]["containers"][0]["args"], UNIT]
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) - FOREIGN_FLAGS <= known
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", "\n".join(examples))) <= known
    assert set(re.findall(r"\bSERVEKIT_[A-Z_]+", UNIT + IMAGE + PAGE)) <= variables
