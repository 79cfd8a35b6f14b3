"""Claims about the Helm chart, which Helm renders here, and whose objects are compared with Kubernetes' schemas.

Nothing here needs a cluster. `make kubernetes-tools` installs Helm and the schemas; without them the tests are skipped.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import promql_parser
import pytest
import yaml
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT7

from scripts import kubernetes
from scripts.kubernetes import CHART, TOOLS, VALUES, VERSIONS
from scripts.tables import metrics_table
from servekit import worker
from servekit.api.routes import health
from servekit.cli import _parser
from servekit.config import load_config, settings
from servekit.models.model_file import parse_model_file
from tests.deploy.custom_resources import CUSTOM_RESOURCES
from tests.support.promql import is_of_replicas_with_workers

CASES = sorted(path.stem for path in VALUES.glob("*.yaml"))
Document = dict[str, Any]


@pytest.fixture(autouse=True, scope="module")
def _tools() -> None:
    if kubernetes.helm() is None or not (TOOLS / "schemas").exists():
        message = "Helm and the schemas of Kubernetes are not installed: make kubernetes-tools"
        if os.environ.get("TESTS_NEED_HELM") == "1":
            pytest.fail(message)
        pytest.skip(message)


@functools.cache
def rendered(case: str, *arguments: str) -> tuple[Document, ...]:
    """Return the objects that the chart makes of a file of values."""
    return tuple(filter(None, yaml.safe_load_all(kubernetes.render(VALUES / f"{case}.yaml", *arguments))))


def of_kind(documents: tuple[Document, ...], kind: str) -> list[Document]:
    return [document for document in documents if document["kind"] == kind]


def pods(documents: tuple[Document, ...]) -> dict[str, Document]:
    """Return the templates of pods, by their component."""
    found = []
    for document in documents:
        match document["kind"]:
            case "Deployment" | "StatefulSet":
                found.append(document["spec"]["template"])
            case "LeaderWorkerSet":
                template = document["spec"]["leaderWorkerTemplate"]
                found += [template["leaderTemplate"], template["workerTemplate"]]
    return {each["metadata"]["labels"]["app.kubernetes.io/component"]: each for each in found}


def container(documents: tuple[Document, ...], component: str = "server") -> Document:
    (only,) = pods(documents)[component]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def after(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


# -- schemas -----------------------------------------------------------------------------------------------------------


@functools.cache
def registry(version: str) -> Registry[Any]:
    def retrieve(uri: str) -> Resource[Any]:
        return Resource.from_contents(
            json.loads((TOOLS / "schemas" / version / uri.rpartition("/")[2]).read_text()), DRAFT7
        )

    return Registry(retrieve=retrieve)  # type: ignore[call-arg]


def schema(version: str, document: Document) -> dict[str, Any]:
    """Return the schema of an object. Kubernetes' own are in files named by kind, group and version."""
    kind, group_version = document["kind"], document["apiVersion"]
    if (group_version, kind) in CUSTOM_RESOURCES:
        metadata = {"$ref": "objectmeta-meta-v1.json"}
        properties = {"apiVersion": {}, "kind": {}, "metadata": metadata, "spec": CUSTOM_RESOURCES[group_version, kind]}
        return {"properties": properties, "required": ["metadata", "spec"], "additionalProperties": False}
    group, _, api_version = group_version.rpartition("/")
    name = "-".join(filter(None, (kind.lower(), group.partition(".")[0], api_version)))
    return {"$ref": f"{name}.json"}


def complaints(version: str, document: Document) -> list[str]:
    validator = jsonschema.Draft7Validator(schema(version, document), registry=registry(version))
    return [f"{document['kind']} {error.json_path}: {error.message}" for error in validator.iter_errors(document)]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", CASES)
def test_kubernetes_accepts_all_objects(case: str, version: str) -> None:
    assert len(CASES) == 5
    for document in rendered(case):
        assert complaints(version, document) == []


def test_the_schemas_find_misspelt_fields_and_wrong_types() -> None:
    for case, kind, path, value in (
        ("gpu", "Deployment", "spec.template.spec.containers.0.readinessProb", {}),
        ("gpu", "Deployment", "spec.replicas", "two"),
        ("cpu", "ScaledObject", "spec.pollingIntervall", 5),
        ("tensor-parallel", "LeaderWorkerSet", "spec.leaderWorkerTemplate.workerTemplate.spec.container", []),
    ):
        (document,) = of_kind(tuple(yaml.safe_load_all(yaml.safe_dump_all(rendered(case)))), kind)
        *parents, last = path.split(".")
        place: Any = document
        for parent in parents:
            place = place[int(parent) if parent.isdigit() else parent]
        place[last] = value
        assert complaints(VERSIONS[-1], document), path


def test_helm_finds_no_mistake_in_the_chart() -> None:
    program = kubernetes.helm()
    assert program is not None
    for case in CASES:
        command = [program, "lint", "--strict", str(CHART), "--values", str(VALUES / f"{case}.yaml")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout


def test_the_plain_manifests_are_what_the_chart_makes() -> None:
    assert kubernetes.MANIFESTS.read_text() == kubernetes.manifests(), "make kubernetes updates deploy/kubernetes.yml"


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "value", "expected"),
    [
        ("gpu", "replica=2", "replica"),  # misspelt
        ("gpu", "replicas=two", "replicas"),
        ("gpu", "cache.size=2GB", "size"),
        ("gpu", "settings.host=0.0.0.0", "host"),  # the chart's own
        ("gpu", "image.digest=latest", "digest"),
        ("gpu", "autoscaling.kind=vpa", "kind"),
        ("gpu", "apiKeys.existingSecret=", "apiKeys.enabled: there are no keys"),
        ("gpu", "cache.persistent=true", "set cache.accessMode: ReadWriteMany"),
        ("gpu", "workers.enabled=true", "set replicas: 1"),
        ("several-models", "workers.enabled=true", "set workers.enabled: false"),
        ("several-models", "inferencePool.enabled=true", "must all serve one model"),
        ("gpu", "inferencePool.enabled=true", "set apiKeys.enabled: false"),
        ("gpu", "replicas=1,cache.persistent=true", "set maxSurge: 0"),
        ("cpu", "cache.persistent=true,cache.accessMode=ReadWriteOncePod", "set cache.accessMode: ReadWriteMany"),
        ("tensor-parallel", "cache.persistent=true", "groups have no claims of their own"),
        ("demo", "gpu.count=1", "set workers.gpu.count"),
    ],
)
def test_wrong_values_are_refused_with_a_sentence(case: str, value: str, expected: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        kubernetes.render(VALUES / f"{case}.yaml", "--set", value)
    assert expected in caught.value.stderr


def test_the_schema_excludes_the_flags_that_the_chart_sets() -> None:
    names = json.loads((CHART / "values.schema.json").read_text())["properties"]["settings"]["propertyNames"]
    excluded = set(names["not"]["enum"])
    flags = {setting.flag.removeprefix("--") for setting in settings()}
    assert excluded <= flags
    template = (CHART / "templates" / "_helpers.tpl").read_text()
    server_pod = template.partition('"servekit.serverPod"')[2].partition('"servekit.workerPod"')[0]
    assert set(re.findall(r"^ +- --([a-z-]+)$", server_pod, re.MULTILINE)) - {"dtype"} <= excluded


@pytest.mark.parametrize("case", CASES)
def test_the_server_accepts_its_arguments(case: str) -> None:
    arguments = vars(_parser().parse_args(container(rendered(case))["args"]))
    assert arguments.pop("command") == "serve"
    models = arguments.pop("positional_models", [])
    config = load_config(arguments | ({"model": models[0]} if models else {}), {})
    for document in of_kind(rendered(case), "ConfigMap"):
        if "models.toml" in document["data"]:
            text = document["data"]["models.toml"].encode()
            assert config.models == "/etc/servekit-models/models.toml"
            file = parse_model_file(text, config.models, config, "cuda:0")
            assert [spec.config.model_name for spec in file.models] == ["chat", "code"]


def test_settings_become_flags() -> None:
    values = ("max-num-seqs=64", "kv-cache-memory-bytes=4294967296", "itl-target-ms=12.5", "ui=false", "dtype=bfloat16")
    arguments = container(rendered("gpu", *(part for value in values for part in ("--set", f"settings.{value}"))))[
        "args"
    ]
    config = load_config({k: v for k, v in vars(_parser().parse_args(arguments)).items() if k in FIELDS}, {})
    assert (config.max_num_seqs, config.kv_cache_memory_bytes, config.itl_target_ms) == (64, 4294967296, 12.5)
    assert (config.ui, config.dtype) == (False, "bfloat16")


FIELDS = {setting.name for setting in settings()}


# -- pods --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_probes_and_timeouts_cover_loading_and_draining(case: str) -> None:
    documents = rendered(case)
    spec, server = pods(documents)["server"]["spec"], container(documents)
    wait_s = float(server["lifecycle"]["preStop"]["exec"]["command"][1])
    drain_s = float(after(server["args"], "--shutdown-timeout"))
    assert spec["terminationGracePeriodSeconds"] >= wait_s + drain_s + 10
    start = server["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= float(after(server["args"], "--load-timeout"))
    for deployment in of_kind(documents, "Deployment"):
        assert deployment["spec"]["progressDeadlineSeconds"] > start["periodSeconds"] * start["failureThreshold"]
    public = {endpoint.path for endpoint in health.ENDPOINTS if endpoint.is_public}
    probed = {name: server[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert set(probed.values()) <= public
    assert (probed["readinessProbe"], probed["livenessProbe"]) == ("/ready", "/health")
    # A server without workers is not ready, and must not be restarted for that.
    assert probed["startupProbe"] == ("/health" if "worker" in pods(documents) else "/ready")


@pytest.mark.parametrize("case", CASES)
def test_containers_are_confined_and_write_to_one_folder(case: str) -> None:
    for component, pod in pods(rendered(case)).items():
        assert pod["spec"]["securityContext"]["runAsNonRoot"] and not pod["spec"]["automountServiceAccountToken"]
        only = container(rendered(case), component)
        assert only["securityContext"] == {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        writable = {mount["mountPath"] for mount in only["volumeMounts"] if not mount.get("readOnly")}
        assert writable - {"/dev/shm"} == {"/cache"}  # noqa: S108
        named = {"SERVEKIT_CACHE_DIR": "/cache"} if component == "server" else {}
        assert named.items() <= {each["name"]: each.get("value") for each in only.get("env", [])}.items()
        if component == "worker":
            assert after(only["args"], "--cache-dir") == "/cache"
        claims = {
            claim["metadata"]["name"]
            for each in of_kind(rendered(case), "StatefulSet")
            for claim in each["spec"].get("volumeClaimTemplates", [])
        }
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        assert {mount["name"] for mount in only["volumeMounts"]} == volumes | (
            claims if component == "worker" else set()
        )


def test_workers_never_see_the_private_key_of_the_server() -> None:
    volumes = pods(rendered("tensor-parallel"))["worker"]["spec"]["volumes"]
    (keys,) = [volume["projected"]["sources"] for volume in volumes if "projected" in volume]
    assert [item["key"] for source in keys for item in source["secret"]["items"]] == ["worker-key", "ca.crt"]
    assert not any("secret" in volume for volume in volumes)


def test_workers_find_the_port_and_the_key_of_their_server() -> None:
    for case, host in (("demo", "servekit-workers"), ("tensor-parallel", "$(LWS_LEADER_ADDRESS)")):
        documents = rendered(case)
        server, worker = container(documents), container(documents, "worker")
        port = after(server["args"], "--listen-workers").rpartition(":")[2]
        assert after(worker["args"], "--connect") == f"tcp://{host}:{port}"
        assert after(worker["args"], "--key-file") == after(server["args"], "--worker-key-file")
        secrets = json.dumps(pods(documents))
        assert secrets.count('"servekit-worker-key"') == 2
        if host == "servekit-workers":
            (service,) = [each for each in of_kind(documents, "Service") if each["metadata"]["name"] == host]
            assert service["spec"]["ports"][0]["port"] == int(port) and service["spec"]["publishNotReadyAddresses"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("model=org/name", "org/name"),
        ("model=org/name,settings.revision=v1", "org/name@v1"),
        ("model=org/name@v2", "org/name@v2"),
        ("model=/models/mine", "/models/mine"),
    ],
)
def test_workers_find_the_model_by_its_name(settings: str, expected: str) -> None:
    for case in ("demo", "tensor-parallel"):
        assert after(container(rendered(case, "--set", settings), "worker")["args"], "--model") == expected


@pytest.mark.parametrize("case", ["demo", "tensor-parallel"])
def test_a_worker_accepts_its_arguments(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = rendered(case)
    monkeypatch.setattr("sys.argv", ["worker", *container(documents, "worker")["args"]])
    expected = container(documents)["args"][1]
    monkeypatch.setattr(worker, "join", lambda arguments: 0 if arguments.model == expected else 1)
    assert worker.main() == 0


def test_each_worker_has_a_gpu_for_each_rank() -> None:
    documents = rendered("tensor-parallel")
    ranks = int(after(container(documents)["args"], "--tensor-parallel-size"))
    assert container(documents, "worker")["resources"]["limits"]["nvidia.com/gpu"] == ranks
    assert "nvidia.com/gpu" not in container(documents)["resources"]["limits"]


def test_a_changed_keys_file_makes_new_pods() -> None:
    def checksum(*arguments: str) -> str:
        annotations = pods(rendered("several-models", *arguments))["server"]["metadata"]["annotations"]
        return str(annotations["checksum/keys"])

    assert checksum(*with_keys(KEYS)) != checksum(*with_keys("other"))


KEYS = f"""\
[[key]]
sha256 = "{64 * "0"}"
tenant = "search"
"""


def with_keys(toml: str) -> tuple[str, ...]:
    return ("--set", "apiKeys.existingSecret=", "--set-json", f"apiKeys.toml={json.dumps(toml)}")


def test_keys_come_from_a_secret_of_the_user_or_from_one_that_the_chart_makes() -> None:
    assert all("toml" not in yaml.safe_load((VALUES / f"{case}.yaml").read_text())["apiKeys"] for case in CASES)
    assert of_kind(rendered("several-models"), "Secret") == []
    documents = rendered("several-models", *with_keys(KEYS))
    (secret,) = of_kind(documents, "Secret")
    assert secret["stringData"] == {"keys.toml": KEYS} and complaints(VERSIONS[0], secret) == []
    volumes = {volume["name"]: volume for volume in pods(documents)["server"]["spec"]["volumes"]}
    assert volumes["keys"]["secret"]["secretName"] == secret["metadata"]["name"]


def test_an_image_can_be_named_by_its_digest() -> None:
    digest = "sha256:" + 64 * "0"
    assert container(rendered("gpu", "--set", f"image.digest={digest}"))["image"].endswith(f"servekit@{digest}")


def test_the_images_for_cpus_and_for_gpus_have_different_tags() -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    for case in CASES:
        documents = rendered(case)
        has_gpu = "nvidia.com/gpu" in json.dumps(documents)
        for component in pods(documents):
            tag = container(documents, component)["image"].rpartition(":")[2]
            assert tag == (version if has_gpu else f"{version}-cpu")


def test_one_server_with_a_volume_of_one_node_ends_before_the_next_one_starts() -> None:
    (server,) = of_kind(rendered("several-models", "--set", "cache.persistent=true"), "Deployment")
    assert server["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_persistent_caches_have_a_claim_for_each_worker() -> None:
    documents = rendered("demo", "--set", "cache.persistent=true")
    (workers,) = of_kind(documents, "StatefulSet")
    (claim,) = workers["spec"]["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == "cache"
    (of_server,) = of_kind(documents, "PersistentVolumeClaim")
    volumes = {volume["name"]: volume for volume in pods(documents)["server"]["spec"]["volumes"]}
    assert volumes["cache"]["persistentVolumeClaim"]["claimName"] == of_server["metadata"]["name"]
    assert all(complaints(VERSIONS[0], document) == [] for document in documents)


# -- objects that name others ------------------------------------------------------------------------------------------


def selectors(document: Document) -> Iterator[dict[str, str]]:
    spec = document["spec"]
    if document["kind"] in ("Service",):
        yield spec["selector"]
    elif document["kind"] in ("PodDisruptionBudget", "Deployment", "StatefulSet", "InferencePool"):
        yield spec["selector"]["matchLabels"]
    elif document["kind"] == "NetworkPolicy":
        yield spec["podSelector"]["matchLabels"]


@pytest.mark.parametrize("case", CASES)
def test_each_selector_selects_the_pods_of_one_component(case: str) -> None:
    documents = rendered(case)
    for document in documents:
        for selector in selectors(document) if "spec" in document else ():
            chosen = [
                component for component, pod in pods(documents).items()
                if selector.items() <= pod["metadata"]["labels"].items()
            ]  # fmt: skip
            of_workers = document["metadata"]["name"].endswith("-worker")
            assert chosen == ["worker" if of_workers else "server"], document["metadata"]["name"]
    (service,) = [each for each in of_kind(documents, "Service") if each["metadata"]["name"] == "servekit"]
    for monitor in of_kind(documents, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        assert [each for each in of_kind(documents, "Service") if wanted <= each["metadata"]["labels"].items()] == [
            service
        ]
    names = {(document["kind"], document["metadata"]["name"]) for document in documents}
    for scaler in of_kind(documents, "HorizontalPodAutoscaler") + of_kind(documents, "ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in names
    for route in of_kind(documents, "HTTPRoute"):
        for backend in route["spec"]["rules"][0]["backendRefs"]:
            assert (backend["kind"], backend["name"]) in names


def test_only_workers_reach_the_port_of_workers() -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in of_kind(rendered("demo"), "NetworkPolicy")}
    by_port = {rule["ports"][0]["port"]: rule["from"] for rule in policies["servekit"]["ingress"]}
    (workers,) = by_port["workers"]
    assert workers["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "worker"
    assert policies["servekit-worker"]["ingress"] == [] and "Ingress" in policies["servekit-worker"]["policyTypes"]


def test_workers_reach_each_other_only_where_prefill_and_decode_are_apart() -> None:
    """Agents fetch KV blocks from each other, at any free port."""
    documents = rendered("demo", "--set", "settings.prefill-replicas=1")
    policies = {each["metadata"]["name"]: each["spec"] for each in of_kind(documents, "NetworkPolicy")}
    of_workers = policies["servekit-worker"]
    (ingress,) = of_workers["ingress"]
    (egress,) = [rule for rule in of_workers["egress"] if rule.get("to") == ingress["from"]]
    assert "ports" not in ingress and "ports" not in egress
    (peer,) = ingress["from"]
    assert peer["podSelector"] == of_workers["podSelector"]
    assert all(complaints(VERSIONS[0], document) == [] for document in documents)


@pytest.mark.parametrize("case", CASES)
def test_prometheus_reaches_the_servers_that_it_watches(case: str) -> None:
    documents = rendered(case)
    if not of_kind(documents, "ServiceMonitor"):
        return
    address = yaml.safe_load((CHART / "values.yaml").read_text())["autoscaling"]["prometheusAddress"]
    namespace = str(urlsplit(address).hostname).rpartition(".")[2]
    (policy,) = [each for each in of_kind(documents, "NetworkPolicy") if each["metadata"]["name"] == "servekit"]
    (clients,) = [rule["from"] for rule in policy["spec"]["ingress"] if rule["ports"] == [{"port": "http"}]]
    assert {"podSelector": {}} in clients
    assert {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}} in clients


@pytest.mark.parametrize(
    ("case", "arguments", "kind"),
    [
        ("gpu", (), "Deployment"),
        ("demo", (), "StatefulSet"),
        ("demo", ("--set", "workers.kind=LeaderWorkerSet"), "LeaderWorkerSet"),
    ],
)
@pytest.mark.parametrize("scaler", ["hpa", "keda"])
def test_what_is_scaled_has_no_number_of_replicas_of_its_own(
    case: str, arguments: tuple[str, ...], kind: str, scaler: str
) -> None:
    documents = rendered(case, "--set", f"autoscaling.kind={scaler}", *arguments)
    (autoscaler,) = of_kind(documents, "HorizontalPodAutoscaler") + of_kind(documents, "ScaledObject")
    assert autoscaler["spec"]["scaleTargetRef"]["kind"] == kind
    (target,) = of_kind(documents, kind)
    assert "replicas" not in target["spec"]
    assert complaints(VERSIONS[-1], autoscaler) == complaints(VERSIONS[-1], target) == []


# -- metrics -----------------------------------------------------------------------------------------------------------


def exported_metrics() -> set[str]:
    return set(re.findall(r"^\| `(\w+)`", "\n".join(metrics_table()), re.MULTILINE))


def test_scaling_uses_metrics_that_exist() -> None:
    (keda,) = of_kind(rendered("cpu"), "ScaledObject")
    queries = [trigger["metadata"]["query"] for trigger in keda["spec"]["triggers"]]
    (hpa,) = of_kind(rendered("tensor-parallel"), "HorizontalPodAutoscaler")
    names = {metric["object"]["metric"]["name"] for metric in hpa["spec"]["metrics"]}
    used = {name for query in queries for name in re.findall(r"servekit_\w+", query)}
    assert names == used - {"servekit_workers_alive"}
    assert used <= exported_metrics()


def adapter_queries() -> dict[str, str]:
    """Return the queries of the rules for Prometheus' adapter in the documentation, by the metric, as it fills them."""
    page = (Path(kubernetes.ROOT) / "docs" / "kubernetes.md").read_text()
    (text,) = [each for each in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "seriesQuery" in each]
    queries = {}
    for rule in yaml.safe_load(text)["rules"]["custom"]:
        name = rule["seriesQuery"].partition("{")[0]
        filled = rule["metricsQuery"].replace("<<.Series>>", name).replace("<<.GroupBy>>", "service")
        queries[name] = filled.replace("<<.LabelMatchers>>", 'namespace="default",service="servekit"')
    return queries


def without_parentheses(expression: Any) -> Any:
    while isinstance(expression, promql_parser.ParenExpr):
        expression = expression.expr
    return expression


def test_neither_a_replica_without_a_worker_nor_a_model_without_requests_hides_the_wait_of_others() -> None:
    (keda,) = of_kind(rendered("cpu"), "ScaledObject")
    waiting, wait = (trigger["metadata"]["query"] for trigger in keda["spec"]["triggers"])
    from_adapter = adapter_queries()
    promql_parser.parse(waiting)
    promql_parser.parse(from_adapter["servekit_num_requests_waiting"])
    for query in (wait, from_adapter["servekit_predicted_wait_seconds"]):
        average = promql_parser.parse(query)
        assert isinstance(average, promql_parser.AggregateExpr) and str(average.op) == "avg"
        longest = without_parentheses(average.expr)
        assert str(longest.op) == "max" and "pod" in longest.modifier.labels
        assert "model_name" not in longest.modifier.labels
        shortest = without_parentheses(longest.expr)
        assert str(shortest.op) == "min" and {"pod", "model_name"} <= set(shortest.modifier.labels)
        assert is_of_replicas_with_workers(shortest.expr, ["pod", "model_name", "replica"])


def test_the_dashboard_and_the_alerts_are_those_of_the_folders() -> None:
    documents = rendered("cpu")
    (dashboard,) = [each for each in of_kind(documents, "ConfigMap") if each["metadata"]["name"].endswith("-dashboard")]
    deploy = Path(kubernetes.ROOT) / "deploy"
    assert dashboard["data"]["servekit.json"].strip() == (deploy / "grafana" / "servekit.json").read_text().strip()
    (rule,) = of_kind(documents, "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((deploy / "prometheus" / "alerts.yml").read_text())
    (monitor,) = of_kind(documents, "ServiceMonitor")
    assert {"targetLabel": "job", "replacement": "servekit"} in monitor["spec"]["endpoints"][0]["relabelings"]
