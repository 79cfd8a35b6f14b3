"""A histogram of many values at once exports what prometheus_client's own exports."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest

from servekit.observability.batch_histogram import BatchHistogram

BUCKETS = (0.001, 0.0025, 0.5, 1.0, 10.0)
BATCHES = [[0.25] * 5 + [0.0, 0.001, 0.0010001], [], [10.0, 10.5, 1.0, 1.0]]


def test_it_exports_what_the_library_exports_for_the_same_values() -> None:
    disable_created_metrics()  # as the server does
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    labels = ("model_name",), ("m",)
    histogram = BatchHistogram("latency_seconds", "Some time.", *labels, BUCKETS)
    ours.register(histogram)
    reference = Histogram("latency_seconds", "Some time.", labels[0], registry=theirs, buckets=BUCKETS).labels("m")
    assert generate_latest(ours) == generate_latest(theirs), "before there is a value"
    for batch in BATCHES:
        histogram.observe_all(batch)
        for value in batch:
            reference.observe(value)
        assert generate_latest(ours) == generate_latest(theirs)
