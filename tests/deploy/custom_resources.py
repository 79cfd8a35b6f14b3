"""The fields of the custom resources that the chart uses, as JSON schemas: no package for Python carries them all.

They are subsets of the definitions in kubernetes-sigs/lws, kubernetes-sigs/gateway-api-inference-extension,
kubernetes-sigs/gateway-api, kedacore/keda and prometheus-operator. A field that the chart begins to use must be looked
up there, and added here.
"""

from __future__ import annotations

from typing import Any

TEXT = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 0}


def fields(required: str = "", /, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object that has these fields and no other."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def items(schema: dict[str, Any], **bounds: int) -> dict[str, Any]:
    return {"type": "array", "items": schema, **bounds}


MATCH = fields("matchLabels", matchLabels={"type": "object", "additionalProperties": TEXT})
POD = {"$ref": "podtemplatespec-v1.json"}
BEHAVIOR = {"$ref": "horizontalpodautoscalerbehavior-autoscaling-v2.json"}

LEADER_WORKER_SET = fields(
    "leaderWorkerTemplate",
    replicas=COUNT,
    rolloutStrategy=fields(
        "type",
        type={"enum": ["RollingUpdate"]},
        rollingUpdateConfiguration=fields(maxSurge=COUNT, maxUnavailable=COUNT, partition=COUNT),
    ),
    leaderWorkerTemplate=fields(
        "workerTemplate",
        size={"type": "integer", "minimum": 1},
        restartPolicy={"enum": ["None", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart"]},
        leaderTemplate=POD,
        workerTemplate=POD,
    ),
)
SCALED_OBJECT = fields(
    "scaleTargetRef triggers",
    scaleTargetRef=fields("name", apiVersion=TEXT, kind=TEXT, name=TEXT),
    minReplicaCount=COUNT,
    maxReplicaCount=COUNT,
    advanced=fields(horizontalPodAutoscalerConfig=fields(behavior=BEHAVIOR)),
    triggers=items(
        fields(
            "type metadata",
            type={"enum": ["prometheus"]},
            name=TEXT,
            metricType={"enum": ["AverageValue", "Value"]},
            metadata=fields("serverAddress query threshold", serverAddress=TEXT, query=TEXT, threshold=TEXT),
        ),
        minItems=1,
    ),
)
SERVICE_MONITOR = fields(
    "selector endpoints",
    selector=MATCH,
    endpoints=items(
        fields(
            port=TEXT,
            path=TEXT,
            interval=TEXT,
            authorization=fields(credentials=fields("name key", name=TEXT, key=TEXT)),
            relabelings=items(fields(sourceLabels=items(TEXT), targetLabel=TEXT, replacement=TEXT)),
        ),
        minItems=1,
    ),
)
PROMETHEUS_RULE = fields(
    "groups",
    groups=items(
        fields(
            "name",
            name=TEXT,
            rules=items(
                fields(
                    "alert expr",
                    **{"for": {"type": "string", "pattern": r"^\d+[smh]$"}},
                    alert=TEXT,
                    expr=TEXT,
                    labels={"type": "object", "additionalProperties": TEXT},
                    annotations={"type": "object", "additionalProperties": TEXT},
                )
            ),
        )
    ),
)
INFERENCE_POOL = fields(
    "targetPorts selector endpointPickerRef",
    targetPorts=items(fields("number", number=COUNT), minItems=1, maxItems=8),
    selector=MATCH,
    endpointPickerRef=fields(
        "name", name=TEXT, port=fields("number", number=COUNT), failureMode={"enum": ["FailOpen", "FailClose"]}
    ),
)
HTTP_ROUTE = fields(
    "parentRefs rules",
    parentRefs=items(fields("name", name=TEXT)),
    rules=items(
        fields(
            backendRefs=items(fields("name", group=TEXT, kind=TEXT, name=TEXT)),
            timeouts=fields(request={"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}),
        )
    ),
)

CUSTOM_RESOURCES = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): LEADER_WORKER_SET,
    ("keda.sh/v1alpha1", "ScaledObject"): SCALED_OBJECT,
    ("monitoring.coreos.com/v1", "ServiceMonitor"): SERVICE_MONITOR,
    ("monitoring.coreos.com/v1", "PrometheusRule"): PROMETHEUS_RULE,
    ("inference.networking.k8s.io/v1", "InferencePool"): INFERENCE_POOL,
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): HTTP_ROUTE,
}
