"""Questions about expressions in PromQL."""

from __future__ import annotations

from typing import Any

import promql_parser


def is_of_replicas_with_workers(expression: Any, labels: list[str]) -> bool:
    """Whether it is `servekit_predicted_wait_seconds and on (labels) servekit_workers_alive == 1`."""
    while isinstance(expression, promql_parser.ParenExpr):
        expression = expression.expr
    wait, is_alive = expression.lhs, expression.rhs
    return (
        (str(expression.op), wait.name) == ("and", "servekit_predicted_wait_seconds")
        and expression.modifier.matching.labels == labels
        and (str(is_alive.op), is_alive.lhs.name, is_alive.rhs.val) == ("==", "servekit_workers_alive", 1.0)
    )
