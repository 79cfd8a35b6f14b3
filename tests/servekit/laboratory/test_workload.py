"""Claims about the workloads of the laboratory."""

from __future__ import annotations

import pytest

from servekit.errors import ConfigError
from servekit.laboratory.workload import LabRequest, Workload
from servekit.laboratory.workload_generator import WORKLOADS, make_workload


def test_a_workload_knows_its_tokens_and_its_longest_request() -> None:
    workload = Workload("two", (LabRequest(0.0, (1,) * 10, 5), LabRequest(1.0, (2,) * 3, 9)))
    assert workload.num_output_tokens == 14 and workload.max_length == 15


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_makes_the_same_workload_again_and_another_seed_another_one(name: str) -> None:
    assert make_workload(name, 20, 7, 5.0) == make_workload(name, 20, 7, 5.0) != make_workload(name, 20, 8, 5.0)


@pytest.mark.parametrize("name", ["chat", "documents"])
def test_requests_come_in_order_at_the_given_rate(name: str) -> None:
    arrivals_s = [request.arrival_s for request in make_workload(name, 2000, 0, 50.0).requests]
    assert arrivals_s == sorted(arrivals_s) and arrivals_s[-1] == pytest.approx(40.0, rel=0.1)


def test_the_textbook_has_seven_short_answers_for_each_long_one() -> None:
    lengths = [request.num_output_tokens for request in make_workload("textbook", 16, 0, 1.0).requests]
    assert lengths.count(50) == 14 and lengths.count(500) == 2


def test_an_unknown_workload_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="textbook, chat, documents"):
        make_workload("mail", 1, 0, 1.0)
