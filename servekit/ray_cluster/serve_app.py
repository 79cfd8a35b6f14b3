"""Build the Ray Serve application: servers of servekit on the nodes of a cluster, behind Ray Serve's proxy.

It has two deployments. Each replica of `server` runs `servekit serve` in a process of its own, with all APIs and
settings. Those of `ingress` pass requests on to them.
"""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from servekit.ray_cluster.ingress import ingress_class
from servekit.ray_cluster.serve_settings import read_arguments
from servekit.ray_cluster.server_replica import END_MARGIN_S, READY_TIMEOUT_S, ServerReplica

# The servers have queues and limits of their own, so Ray Serve must not hold requests back.
MAX_ONGOING_REQUESTS = 10_000


def app(arguments: dict[str, Any]) -> Any:
    """Return the application for `serve run servekit.ray:app NAME=VALUE …`.

    The arguments are those of AppSettings, and all settings of `servekit serve`. Raises ConfigError.
    """
    given = read_arguments(arguments)
    settings, config = given.settings, given.config
    router = {"request_router_class": "servekit.ray_cluster.prefix_router:PrefixRouter"}
    surge = {"max_surge_percent": settings.max_surge_percent}  # Ray before 2.60 does not know it
    servers = serve.deployment(
        ServerReplica,
        name="server",
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus},
        graceful_shutdown_timeout_s=config.shutdown_timeout + END_MARGIN_S,
        health_check_timeout_s=READY_TIMEOUT_S + 5.0,
        request_router_config=RequestRouterConfig(**(router if settings.prefix_aware else {})),
        autoscaling_config=AutoscalingConfig(
            min_replicas=settings.min_replicas,
            max_replicas=settings.most_replicas,
            upscale_delay_s=config.scale_up_delay,
            downscale_delay_s=config.scale_down_delay,
            look_back_period_s=settings.look_back_period,
            metrics_interval_s=min(2.0, settings.look_back_period / 2),
            policy=AutoscalingPolicy(
                policy_function="servekit.ray_cluster.scaling:PredictedWaitPolicy",
                policy_kwargs={"target_wait_s": config.scale_target_wait},
            ),
        ),
        **(surge if settings.max_surge_percent else {}),
    ).bind(given.environment, config.max_num_seqs, given.metrics_key, config.load_timeout, config.shutdown_timeout)
    ingress = serve.deployment(
        ingress_class(),
        name="ingress",
        num_replicas=settings.num_ingress_replicas,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        graceful_shutdown_timeout_s=config.shutdown_timeout + END_MARGIN_S,
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(servers, given.max_body_bytes)
