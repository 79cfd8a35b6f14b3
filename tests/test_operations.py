"""Claims about the files for operators: the dashboard, the alerts, the deployment examples, and docs/operations.md."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import promql_parser
import pytest
import yaml

from scripts import dashboard
from servekit.config import ServeConfig, settings
from servekit.engine.queue_limits import QueueLimits
from servekit.observability.metrics import RESTART_CAUSES, Metrics, SchedulerStats
from servekit.scheduler.queued_work import QueuedWork
from tests.support.promql import is_of_replicas_with_workers
from tests.support.scheduler import make_sequence
from workers.csrc.build import COMPILERS

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PAGE = (ROOT / "docs" / "operations.md").read_text()
UNIT = (DEPLOY / "servekit.service").read_text()
IMAGE = (DEPLOY / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())
DEPLOYMENT, SERVICE = (
    next(each for each in yaml.safe_load_all((DEPLOY / "kubernetes.yml").read_text()) if each["kind"] == kind)
    for kind in ("Deployment", "Service")
)
RULES = {
    rule["alert"]: rule
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
}
DEFAULTS = ServeConfig()
SNAPSHOT = SchedulerStats(**dict.fromkeys(SchedulerStats.__struct_fields__, 1))
# Of docker, kubectl and taskset.
FOREIGN_FLAGS = {
    "--build-arg",
    "--target",
    "--folder",
    "--resume",
    "--read-only",
    "--tmpfs",
    "--gpus",
    "--stop-timeout",
    "--previous",
    "--cpu-list",
}
BUILD_VARIABLES = {"SERVEKIT_KERNEL_VARIANTS"}  # scripts/prebuild_kernels.py reads it, and no server
NO_ERRORS = {"other"}  # the label of a metric for codes beyond its limit


def codes_in_the_source() -> set[str]:
    """Return every string that can become the code of an error."""
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
    """Yield the string literals that an expression can evaluate to, without keys of look-ups and arguments."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value
    if not isinstance(value, ast.Call | ast.Subscript):
        for part in ast.iter_child_nodes(value):
            yield from texts(part)


def test_the_table_of_errors_has_exactly_the_codes_of_the_source() -> None:
    table = PAGE.partition("| code | status |")[2].partition("\n\n")[0]
    explained = {code for row in table.splitlines()[2:] for code in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert explained == codes_in_the_source()


def test_the_dashboard_file_is_up_to_date() -> None:
    assert dashboard.FILE.read_text() == dashboard.text(), "python scripts/dashboard.py updates it"


def test_panels_do_not_overlap_and_name_their_metrics() -> None:
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


def test_every_alert_links_to_its_runbook() -> None:
    chapter = PAGE.partition("\n## Alerts\n")[2].partition("\n## ")[0]
    assert sorted(RULES) == sorted(re.findall(r"^### (\w+)$", chapter, re.MULTILINE))
    for runbook in chapter.split("\n### ")[1:]:
        assert "*Symptom:*" in runbook and "*Do:*" in runbook, runbook.splitlines()[0]
    for name, rule in RULES.items():
        assert rule["annotations"]["runbook_url"].endswith(f"/operations.md#{name.lower()}")


def value(expression: Any, samples: dict[str, float]) -> float | None:
    """Evaluate the PromQL of alerts about the state of one server; None is an empty result."""
    match expression:
        case promql_parser.NumberLiteral():
            return float(expression.val)
        case promql_parser.VectorSelector():
            return samples.get(expression.name)
        case promql_parser.AggregateExpr():  # over the replicas, of which there is one
            assert str(expression.op) == "sum"
            return value(expression.expr, samples)
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
    ("alive", "has_loaded", "is_draining", "fired"),
    [
        (False, False, False, {"ServekitLoadsLong"}),  # after half an hour
        (True, True, False, set()),
        (False, True, False, {"ServekitNoWorker"}),
        (False, True, True, set()),
    ],
)
def test_a_missing_worker_fires_an_alert_unless_the_first_one_loads(
    alive: bool, has_loaded: bool, is_draining: bool, fired: set[str]
) -> None:
    metrics = Metrics(DEFAULTS, "0")
    if alive:
        metrics.workers.worker_ready(None, 0.0)
    metrics.engine.is_draining = is_draining
    if has_loaded:
        metrics.watch_scheduler(lambda: [SNAPSHOT])
    samples = {sample.name: sample.value for family in metrics.registry.collect() for sample in family.samples}
    worker_alerts = ("ServekitNoWorker", "ServekitLoadsLong")
    assert {
        name for name in worker_alerts if value(promql_parser.parse(RULES[name]["expr"]), samples) is not None
    } == fired


def test_a_replica_without_a_worker_does_not_hide_a_long_wait() -> None:
    above: Any = promql_parser.parse(RULES["ServekitLongWait"]["expr"])
    assert (str(above.op), str(above.lhs.op), above.rhs.val) == (">", "min", 10.0)
    assert is_of_replicas_with_workers(above.lhs.expr, ["job", "instance", "model_name", "replica"])


def test_workers_that_leave_in_order_fire_no_alert() -> None:
    assert 'servekit_worker_restarts_total{cause!="left"}' in RULES["ServekitWorkersEnd"]["expr"]
    assert "left" in RESTART_CAUSES


def fires(name: str, metrics: Metrics) -> bool:
    """Whether an alert that compares one metric with a number fires."""
    expression = promql_parser.parse(RULES[name]["expr"])
    assert isinstance(expression, promql_parser.BinaryExpr) and str(expression.op) == ">"
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    found = [sample.value for sample in samples if sample.name == expression.lhs.name]
    assert found, expression.lhs.name
    return max(found) > expression.rhs.val


@pytest.mark.parametrize(
    ("policy", "num_tenants", "num_of_each", "expected"),
    [
        ("fcfs", 1, 48, False),
        ("fcfs", 1, 54, True),
        ("fair", 1, 25, False),
        ("fair", 1, 28, True),  # of 32 places that one tenant may have
        ("fair", 4, 5, False),
        ("fair", 4, 12, True),
    ],
)
def test_the_queue_alert_fires_before_a_tenant_is_refused(
    policy: Literal["fcfs", "fair"], num_tenants: int, num_of_each: int, expected: bool
) -> None:
    metrics = Metrics(DEFAULTS, "0")
    limits, queued = QueueLimits(ServeConfig(max_num_queued_reqs=64, scheduling_policy=policy)), QueuedWork()
    metrics.watch_queue(lambda: limits.usage(queued.total.num_sequences, queued))
    for tenant in range(num_tenants):
        for _ in range(num_of_each):
            queued.add(make_sequence(0, tenant=str(tenant)))
    assert fires("ServekitQueueNearBound", metrics) is expected


# -- examples ----------------------------------------------------------------------------------------------------------


def flag(command: list[str], name: str) -> float:
    return float(command[command.index(name) + 1])


def test_timeouts_of_the_examples_cover_draining_and_loading() -> None:
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


def test_the_examples_agree_on_names_ports_and_users() -> None:
    for path in DEPLOY.rglob("*.yml"):
        assert all(yaml.safe_load_all(path.read_text())), path
    pod = DEPLOYMENT["spec"]["template"]
    container = pod["spec"]["containers"][0]
    assert SERVICE["spec"]["selector"] == DEPLOYMENT["spec"]["selector"]["matchLabels"]
    assert SERVICE["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert {volume["name"] for volume in pod["spec"]["volumes"]} == {each["name"] for each in container["volumeMounts"]}
    assert f"EXPOSE {container['ports'][0]['containerPort']}" in IMAGE
    assert container["ports"][0]["containerPort"] == DEFAULTS.port
    assert f"USER {pod['spec']['securityContext']['fsGroup']}" in IMAGE


def test_docker_compose_starts_a_server_that_prometheus_scrapes_and_grafana_shows() -> None:
    services = COMPOSE["services"]
    assert {service["network_mode"] for service in services.values()} == {"host"}
    server, built = services["servekit"], services["servekit"]["build"]
    assert (DEPLOY / built["context"] / built["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    assert built["target"] in stages() and f"ARG {next(iter(built['args']))}" in stages()["build"]
    assert set(server["environment"]) <= {setting.environment_name for setting in settings()}
    (volume,) = server["volumes"]  # the user's home in the image is theirs, and so is a volume that is new there
    assert f"WORKDIR {volume.split(':')[1]}\n" in IMAGE and volume.split(":")[0] in COMPOSE["volumes"]
    assert float(server["stop_grace_period"].removesuffix("s")) >= DEFAULTS.shutdown_timeout + 10
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert scraped[0]["static_configs"] == [{"targets": [f"{server['environment']['SERVEKIT_HOST']}:{DEFAULTS.port}"]}]
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert f"--web.listen-address={source['url'].removeprefix('http://')}" in services["prometheus"]["command"]
    for name in ("prometheus", "grafana"):
        assert all((DEPLOY / volume.split(":")[0]).exists() for volume in services[name]["volumes"])


def stages() -> dict[str, str]:
    """Return the text of each stage of the Dockerfile, by name."""
    parts = re.split(r"^FROM \S+ AS (\w+)$", IMAGE.replace("\\\n", ""), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_the_image_copies_all_files_of_the_package() -> None:
    copied = {name for line in re.findall(r"^COPY (?!--from)(.*)$", IMAGE, re.MULTILINE) for name in line.split()[:-1]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {"pyproject.toml", "constraints.txt", project["project"]["readme"], *project["project"]["license-files"]}
    assert copied == {*needed, *wheel["packages"], wheel["hooks"]["custom"]["path"]}
    assert all((ROOT / name).exists() for name in copied)
    ignored = (ROOT / ".dockerignore").read_text().split("\n")
    assert {line[1:] for line in ignored if line.startswith("!")} == copied


def test_only_the_image_for_gpus_has_a_compiler() -> None:
    """Triton and workers/csrc compile when a worker starts; libc6-dev has the headers of C, the base image Python's."""
    found = {}
    for name, text in stages().items():
        install = re.findall(r"^RUN apt-get .* install (.*?)&&", text, re.MULTILINE)
        found[name] = {word for packages in install for word in packages.split() if not word.startswith("-")}
        if install and "USER" in text:
            assert text.index("RUN apt-get") < text.index("USER"), "only root can install"
    assert found["gpu"] >= {"gcc", "libc6-dev"} and found["gpu"] & set(COMPILERS)
    assert found["runtime"] == found["cpu"] == set()
    assert "HATCH_BUILD_HOOK_ENABLE_CUSTOM=true" in stages()["build"], "the image for CPUs needs prebuilt kernels"
    assert next(reversed(stages())) == "cpu", "the last stage is the default, and smaller"


def test_both_images_name_their_packages_and_run_as_another_user_than_root() -> None:
    assert "cyclonedx-py environment" in stages()["build"]
    assert "--output-file /opt/servekit/" in stages()["build"]
    assert "COPY --from=build /opt/servekit /opt/servekit" in stages()["runtime"]
    for name in ("cpu", "gpu"):
        assert re.search(r"^USER \d+$", stages()[name], re.MULTILINE)


def test_the_service_keeps_compiled_kernels_in_its_cache_directory() -> None:
    assert "DynamicUser=yes" in UNIT and "CacheDirectory=servekit" in UNIT
    assert re.findall(r"^Environment=SERVEKIT_CACHE_DIR=(.*)$", UNIT, re.MULTILINE) == ["%C/servekit"]


def test_in_kubernetes_the_cache_directory_is_all_that_can_be_written() -> None:
    pod = DEPLOYMENT["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    (directory,) = [each["value"] for each in container["env"] if each["name"] == "SERVEKIT_CACHE_DIR"]
    (writable,) = [mount for mount in container["volumeMounts"] if not mount.get("readOnly")]
    assert writable["mountPath"] == directory
    (volume,) = [each for each in pod["volumes"] if each["name"] == writable["name"]]
    assert "emptyDir" in volume


def test_flags_and_variables_in_examples_and_documentation_exist() -> None:
    known = {setting.flag for setting in settings()} | {f"--no-{setting.flag[2:]}" for setting in settings()}
    variables = {setting.environment_name for setting in settings()}
    examples = [*DEPLOYMENT["spec"]["template"]["spec"]["containers"][0]["args"], UNIT]
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) - FOREIGN_FLAGS <= known
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", "\n".join(examples))) <= known
    assert set(re.findall(r"\bSERVEKIT_[A-Z_]+", UNIT + IMAGE + PAGE)) - BUILD_VARIABLES <= variables
