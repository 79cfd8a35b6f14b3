"""Claims about `servekit plan`."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from servekit.cli import main
from servekit.planning.command import PlanOptions, make_plan
from servekit.planning.demand import Demand, make_requests
from servekit.planning.devices import known_devices
from tests.servekit.planning.test_model_shape import LLAMA_8B
from tests.servekit.replaying.services import CONFIG, requests, serve

FEW = ["--requests", "20", "--prompt-tokens", "2000", "--output-tokens", "20"]


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    return str(path)


def small_plan(config: str, **options: Any) -> Any:
    settings = {"device": "l4", "requests": 20, "prompt_tokens": 2000, "output_tokens": 20, "slo": "ttft:20s,tpot:1s"}
    return make_plan(PlanOptions(model=config, **{**settings, **options}))


def test_it_prints_memory_steps_latencies_and_cost(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "l40s", "--rate", "1000", "--price-per-hour", "2", "--api-price", "0.5", *FEW]
    assert main(["plan", config, *arguments, "--slo", "ttft:30s,tpot:2s"]) == 0
    text = capsys.readouterr().out
    assert "8.03 billion parameters" in text and "131,072 bytes for each token" in text
    assert all(words in text for words in ("decode, batch of 1", "bound by", "replicas", "an hour", "requests a month"))


def test_the_help_names_each_device(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    named = words.partition("--device NAME ")[2].partition(" (default")[0]
    assert named.replace(" or ", ", ").split(", ") == list(known_devices())


def test_json_has_the_same_figures(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", config, "--json", "--device", "l4", *FEW]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (
        result["num_parameters"]
        == result["shape"]["num_embedding_parameters"] + result["shape"]["num_layer_parameters"]
    )
    assert result["memory"]["kv_bytes_per_token"] == 131072 and len(result["capacity"]["points"]) == 4


def test_the_page_has_the_pictures_and_needs_no_other_file(config: str, tmp_path: Path) -> None:
    assert main(["plan", config, "--device", "l4", *FEW, "--out", str(tmp_path / "new")]) == 0
    page = (tmp_path / "new" / "plan.html").read_text()
    data = json.loads(page.partition("const DATA = ")[2].partition(";\n")[0])
    assert [name for name, _ in data["memory"]] == ["weights", "keys and values", "not used"]
    assert len(data["points"]) == 4 and "8.03 billion parameters" in data["sections"][0]
    for _, intensity, flop_per_s in data["steps"]:
        assert flop_per_s <= min(data["roof"]["flop_per_s"], intensity * data["roof"]["bytes_per_s"]), "below the roof"
    assert "https://" not in page and "src=" not in page and page.count("http://") == page.count("http://www.w3.org/")


def test_step_times_that_were_measured_replace_those_of_the_data_sheet(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    point = small_plan(config, step_times="sim:step=40ms").capacity.points[0]
    assert point.summary.itl_p50_s == pytest.approx(0.04)
    assert main(["plan", config, "--step-times", "fast"]) == 2
    assert "write them as sim:SPEC" in capsys.readouterr().err


def test_lengths_can_be_those_of_recorded_requests(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrivals = requests(30, 30.0)
    serve(tmp_path / "journal", CONFIG, arrivals)
    plan = small_plan(config, trace=tmp_path / "journal")
    lengths = [(len(each.prompt), each.num_output_tokens) for each in arrivals]
    assert plan.memory.mean_length == pytest.approx(mean(map(sum, lengths)), abs=1)
    assert plan.memory.max_model_len == max(map(sum, lengths))
    made = make_requests(Demand(num_requests=50, lengths=tuple(lengths), max_length=10_000), 1.0, 0).requests
    assert {(len(each.prompt), each.num_output_tokens) for each in made} <= set(lengths)
    serve(tmp_path / "empty", CONFIG, [])
    assert main(["plan", config, "--trace", str(tmp_path / "empty")]) == 2
    assert "it has no requests" in capsys.readouterr().err


def test_a_thousand_times_the_rate_takes_a_thousand_times_the_replicas(config: str) -> None:
    rate = small_plan(config).capacity.slo_rate
    assert small_plan(config, rate=1000 * rate).cost.num_replicas == 1000


def test_smaller_weights_leave_more_room_and_read_faster(config: str) -> None:
    whole, small = small_plan(config), small_plan(config, weights="int4", kv_cache="int8")
    assert small.memory.num_kv_tokens > 4 * whole.memory.num_kv_tokens
    assert small.phases[1].duration_s < 0.4 * whole.phases[1].duration_s


def test_the_size_of_a_checkpoint_is_that_of_its_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "demo", "--device", "l4", "--json", "--requests", "10", "--output-tokens", "5"]) == 0
    weights = Path(__file__).parents[3] / "servekit" / "assets" / "demo_model" / "model.safetensors"
    assert json.loads(capsys.readouterr().out)["memory"]["num_weight_bytes"] == weights.stat().st_size


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "l4", "--weights", "float32"], "--tensor-parallel-size 2"),
        (["--weights", "int3"], "float32, bfloat16"),
        (["--kv-cache", "int4"], "fp8_e4m3"),
        (["--tensor-parallel-size", "3"], "32 heads"),
        (["--max-model-len", "100"], "--max-model-len"),
        (["--slo", "fast"], "ttft:500ms"),
        (["--rate", "0"], "--rate 0"),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(
    arguments: list[str], words: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", config, *arguments]) == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"), [("{", "not JSON"), ("[1]", "not a model's configuration"), ("{}", "hidden_size")]
)
def test_a_file_that_is_no_configuration_is_refused(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(text)
    assert main(["plan", str(tmp_path / "config.json")]) == 2 and words in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "missing.json")]) == 2


def test_a_simulated_model_has_no_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "sim:h100-8b"]) == 2 and "config.json" in capsys.readouterr().err


def test_without_a_flag_weights_are_as_they_are_stored(config: str) -> None:
    assert small_plan(config).weights == "bfloat16"
    Path(config).write_text(json.dumps({**LLAMA_8B, "torch_dtype": "float32"}))
    assert small_plan(config, device="h100").weights == "float32"


def test_where_no_rate_keeps_the_service_level_nothing_has_a_price(config: str) -> None:
    cost = small_plan(config, slo="tpot:1ms", price_per_hour=2.0, api_price=1.0).cost
    assert (cost.num_replicas, cost.per_hour, cost.per_million_output_tokens) == (0, None, None)


def test_a_service_that_cannot_earn_its_price_is_never_cheaper(config: str) -> None:
    cheap, dear = (small_plan(config, price_per_hour=2.0, api_price=price).cost for price in (1e-6, 1e6))
    assert dear.is_ever_cheaper is True and cheap.is_ever_cheaper is False


def test_a_price_that_the_user_did_not_give_has_its_source_beside_it(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    device = known_devices()["h100"]
    assert main(["plan", config, "--device", "h100", "--rate", "1", "--requests", "8"]) == 0
    printed = capsys.readouterr().out
    assert f"{device.price_per_hour} an hour" in printed and device.price_source in printed
    assert main(["plan", config, "--device", "h100", "--rate", "1", "--requests", "8", "--price-per-hour", "2.5"]) == 0
    printed = capsys.readouterr().out
    assert "2.50 an hour" in printed and device.price_source not in printed


def test_a_service_breaks_even_where_a_book_says(config: str) -> None:
    """An API takes 8,500 a month for a million requests, and servers cost 10,640: as much as 1.25 million requests."""
    api_price = 8500 / (2000 + 20)  # for a million tokens
    cost = small_plan(config, price_per_hour=10_640 / 730, api_price=api_price).cost
    assert cost.num_devices == 1 and cost.break_even_requests_per_month == pytest.approx(1.25e6, rel=0.002)


def test_quantized_weights_whose_files_are_missing_need_a_flag(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(config).write_text(json.dumps({**LLAMA_8B, "quantization_config": {"quant_method": "awq"}}))
    assert main(["plan", config]) == 2 and "--weights" in capsys.readouterr().err
    assert small_plan(config, weights="int4").weights == "int4"


def test_packing_of_a_model_file_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "models.toml"
    file.write_text(
        '[memory]\n"cuda:0" = 9_000\n"cuda:1" = 9_000\n'
        '[[model]]\nid = "a"\nmodel = "sim:instant"\nmemory_bytes = 5_000\n'
        '[[model]]\nid = "b"\nmodel = "sim:instant"\nmemory_bytes = 6_000\nkeep = "on_demand"\n'
        '[[model]]\nid = "far"\nkind = "openai"\nmodel = "x"\nremote = { url = "http://127.0.0.1:1/v1" }\n'
    )
    assert main(["plan", "--models", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "cuda:0: 9.0 kB; 5.0 kB stay loaded",
        "  a: 5.0 kB, always loaded",
        "cuda:1: 9.0 kB; 0 bytes stay loaded, 9.0 kB are shared by models on demand that take 6.0 kB",
        "  b: 6.0 kB, on demand",
        "far: on another server",
    ]
    assert main(["plan", "--models", str(file), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["models"] == [{"id": "a", "keep": "always", "num_workers": 1, "memory_bytes": 5000}]
    assert (second["device"], second["shared_bytes"], second["on_demand_bytes"]) == ("cuda:1", 9000, 6000)
    assert main(["plan", "--models", str(file), "--rate", "5"]) == main(["plan"]) == 2
