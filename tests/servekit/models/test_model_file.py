"""The model file: what it means, and the sentence for each mistake."""

from __future__ import annotations

import pytest

from servekit.config import MODEL_SETTINGS, ServeConfig
from servekit.errors import ConfigError
from servekit.executor.placement import placements
from servekit.models.model_file import ModelFile, check_kinds, make_model_file, parse_model_file
from servekit.models.names import Split
from servekit.remote.settings import OpenAISettings, PredictorServerSettings, TritonSettings, VllmSettings

BASE = ServeConfig(max_num_seqs=7, port=1234, models="models.toml")


def parse(text: str, device: str = "cpu") -> ModelFile:
    return parse_model_file(text.encode(), "models.toml", BASE, device)


def test_model_has_its_own_settings_and_the_servers_for_the_rest() -> None:
    file = parse(
        """
        default = "gpt-4o"
        max_load_wait = 60
        [memory]
        cpu = 1000
        [[model]]
        id = "chat"
        aliases = ["gpt-4o"]
        model = "demo"
        dtype = "bfloat16"
        num-kv-blocks = 5
        memory_bytes = 100
        data_parallel_size = 2
        tenants = ["search"]
        [[model]]
        id = "code"
        model = "sim:instant"
        keep = "on_demand"
        memory_bytes = 300
        [[alias]]
        name = "canary"
        models = { chat = 90, code = 10 }
        sticky = "conversation"
        """
    )
    chat, code = file.models
    assert (chat.id, chat.config.model, chat.config.model_name) == ("chat", "demo", "chat")
    assert (chat.config.dtype, chat.config.num_kv_blocks, chat.config.max_num_seqs) == ("bfloat16", 5, 7)
    assert chat.config.models is None and chat.config.port == 1234
    assert chat.memory == {"cpu": 200} and code.memory == {"cpu": 300}, "each worker takes memory"
    assert chat.entry.tenants == ["search"] and chat.entry.keep == "always" and code.entry.keep == "on_demand"
    assert file.aliases == {"gpt-4o": "chat"} and file.default == "gpt-4o" and file.max_load_wait_s == 60.0
    assert file.splits["canary"].models == {"chat": 90.0, "code": 10.0}


MODEL = '[[model]]\nid = "a"\nmodel = "demo"\n'


@pytest.mark.parametrize(
    ("settings", "device", "memory"),
    [
        ("", "cuda:0", {"cuda:0": 5}),
        ('device = "cpu"', "cuda:0", {"cpu": 5}),
        ('device = "cuda"\ntensor_parallel_size = 2', "cuda:0", {"cuda:0": 5, "cuda:1": 5}),
        ('device = "cuda:3"', "cuda:0", {"cuda:3": 5}),
        ('devices = "cuda:1,cuda:1,cuda:2"', "cpu", {"cuda:1": 10, "cuda:2": 5}),
    ],
)
def test_memory_is_needed_where_the_workers_are(settings: str, device: str, memory: dict[str, int]) -> None:
    (spec,) = parse(f"{MODEL}memory_bytes = 5\n{settings}", device).models
    assert spec.memory == memory


PLACED = """
[memory]
"cuda:0" = 100
"cuda:1" = 100
[[model]]
id = "fixed"
model = "demo"
device = "cuda:1"
memory_bytes = 30
[[model]]
id = "free"
model = "demo"
memory_bytes = 50
[[model]]
id = "two"
model = "demo"
data_parallel_size = 2
memory_bytes = 40
keep = "on_demand"
"""


def test_models_without_a_device_are_packed_onto_those_of_the_file() -> None:
    file = parse(PLACED)
    assert [spec.memory for spec in file.models] == [{"cuda:1": 30}, {"cuda:0": 50}, {"cuda:1": 40, "cuda:0": 40}]
    fixed, free, two = (spec.config for spec in file.models)
    assert (fixed.device, free.device, two.devices) == ("cuda:1", "cuda:0", "cuda:1,cuda:0")
    assert [use.on_demand_bytes for use in file.device_uses] == [40, 40]
    assert [[place.device for place in placements(config)] for config in (free, two)] == [
        ["cuda:0"],
        ["cuda:1", "cuda:0"],
    ]
    with pytest.raises(ConfigError, match=r"models\.toml: there is no device for the model 'free': it takes 101 bytes"):
        parse(PLACED.replace("memory_bytes = 50", "memory_bytes = 101"))
    own = PLACED.replace("memory_bytes = 30", "memory_bytes = 30\nkeep = 'dedicated'")
    with pytest.raises(ConfigError, match=r"models\.toml: the model 'fixed' is dedicated.*on cuda:1, and 'two' is"):
        parse(own.replace("= 2\n", "= 2\ndevices = 'cuda:0,cuda:1'\n"))


@pytest.mark.parametrize(
    ("memory", "devices"),
    [
        ("cpu = 100", ["cuda:0"]),
        ('"cuda:1" = 100', ["cuda:0"]),
        ('cpu = 100\n"cuda:0" = 100', ["cuda:0"]),
        ('"cuda:1" = 100\n"cuda:2" = 90', ["cuda:1"]),
    ],
)
def test_model_without_a_device_stays_where_it_is_if_the_file_gives_no_choice(memory: str, devices: list[str]) -> None:
    (spec,) = parse(f"[memory]\n{memory}\n{MODEL}memory_bytes = 5", "cuda:0").models
    assert list(spec.memory) == devices and (spec.config.device == "auto") == (devices == ["cuda:0"])


def test_memory_is_estimated_where_the_file_limits_it_and_does_not_say_it() -> None:
    asked: list[str] = []

    def estimate(config: ServeConfig) -> int | None:
        asked.append(config.model)
        return 60

    def parsed(text: str) -> ModelFile:
        return parse_model_file(text.encode(), "models.toml", BASE, "cpu", estimate)

    text = MODEL + 'keep = "on_demand"\n'
    assert [spec.memory for spec in parsed(LIMITED + text).models] == [{"cpu": 60}] and asked == ["demo"]
    assert parsed(LIMITED + text + "memory_bytes = 5").models[0].memory == {"cpu": 5}
    assert parsed(text).models[0].memory == {"cpu": 0} and len(asked) == 1
    with pytest.raises(ConfigError, match=r"'a' takes 60 bytes on cpu \(estimated from the files; set memory_bytes"):
        parsed(LIMITED.replace("100", "50") + text)
    with pytest.raises(ConfigError, match=r"'a' takes 70 bytes on cpu \(memory_bytes\)"):
        parsed(LIMITED.replace("100", "50") + text + "memory_bytes = 70")
    with pytest.raises(
        ConfigError,
        match=r"keep = 'always' take 120 bytes on cpu \(estimated from the files for 'a', 'b'; set memory_bytes",
    ):
        parsed(LIMITED + MODEL + MODEL.replace('"a"', '"b"'))


def test_first_model_is_the_default_one() -> None:
    assert parse(MODEL + MODEL.replace('"a"', '"b"')).default == "a"


LIMITED = "[memory]\ncpu = 100\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[model]", r"models.toml: not a valid TOML file"),
        ("", r"models.toml: the file must have one or more \[\[model\]\] entries"),
        ("[model]\nid = 'a'", r"models.toml: model must be written as \[\[model\]\]"),
        ("model = [1]", r"models.toml: \[\[model\]\] 1: it must be a table"),
        ('[[model]]\nmodel = "demo"', r"\[\[model\]\] 1: it has no id"),
        ('[[model]]\nid = "a"', r"\[\[model\]\] 1 \('a'\): it has no model"),
        (MODEL + "max_num_seqs = 0", r"\[\[model\]\] 1 \('a'\): max_num_seqs = 0 is not accepted.*from 1 to 65536"),
        (MODEL + "port = 80", r"\[\[model\]\] 1 \('a'\): port is a setting of the whole server"),
        (MODEL + "quantisation = 'int8'", r"unknown field 'quantisation'; did you mean quantization\?"),
        (MODEL + "xyzzy = 1", r"unknown field 'xyzzy'; there are id, aliases"),
        (MODEL + 'keep = "sometimes"', r"\[\[model\]\] 1 \('a'\): keep must be 'always', 'on_demand' or 'dedicated'"),
        (MODEL + "aliases = [1]", r"aliases must be a list of names"),
        (MODEL + 'aliases = ["a"]', r"the name 'a' is given twice, as an id or an alias of 'a';"),
        (MODEL + MODEL, r"models.toml: the name 'a' is given twice, as an id or an alias of 'a';"),
        (MODEL + MODEL.replace('"a"', '"b"') + 'aliases = ["a"]', r"an id or an alias of 'a' and of 'b';"),
        (MODEL + 'kind = "embedder"', r"'a'\): kind = 'embedder' must be one of auto, .*, openai, triton, vllm"),
        ('default = "b"\n' + MODEL, r"default = 'b' is not the name of a model; there are 'a'"),
        ("default = 1\n" + MODEL, r"models.toml: default must be the id or an alias of a model"),
        ("other = 1\n" + MODEL, r"models.toml: unknown field 'other'; the known ones are default"),
        ("[memory]\ntpu = 1\n" + MODEL, r"\[memory\] 'tpu' is not a device"),
        (LIMITED + MODEL, r"the model 'a' is on cpu, whose memory is limited.*; set memory_bytes"),
        (LIMITED + MODEL + "memory_bytes = 101", r"takes 101 bytes on cpu \(memory_bytes\), and \[memory\] gives 100"),
        (
            LIMITED + MODEL + "memory_bytes = 60\n" + MODEL.replace('"a"', '"b"') + "memory_bytes = 60",
            r"the models with keep = 'always' take 120 bytes on cpu \(memory_bytes\), and \[memory\] gives 100",
        ),
        (
            LIMITED
            + MODEL
            + "memory_bytes = 60\n"
            + MODEL.replace('"a"', '"b"')
            + 'memory_bytes = 60\nkeep = "on_demand"',
            r"'b' takes 60 bytes on cpu.*leave 40 of 100 \(memory_bytes\), so it could never be loaded; give more in",
        ),
        ("alias = [1]\n" + MODEL, r"\[\[alias\]\] 1: Expected `object`"),
        (MODEL + "[[alias]]\nname = 'c'", r"\[\[alias\]\] 1: the field 'models' is missing"),
        (MODEL + "[[alias]]\nname = 'c'\nmodels = { b = 1 }", r"the alias 'c': 'b' is not the id of a model"),
        (MODEL + "[[alias]]\nname = 'c'\nmodels = { a = 0 }", r"the alias 'c': models needs at least one weight"),
        (MODEL + "[[alias]]\nname = 'a'\nmodels = { a = 1 }", r"the alias 'a' is the name of the model 'a'"),
        (MODEL + 2 * "[[alias]]\nname = 'c'\nmodels = { a = 1 }\n", r"\[\[alias\]\] 2: the name 'c' is given twice"),
        (MODEL + "[[alias]]\nname = 'c'\nmodels = { a = 'x' }", r"\[\[alias\]\] 1: "),
        (MODEL + "[[alias]]\nname = 'c'\nmodels = { a = 1 }\nsticky = 'x'", r"sticky must be 'key' or 'conversation'"),
        (
            MODEL + "[[alias]]\nname = 'c'\nmodels = { a = 1 }\nmirror = 'b'",
            r"the alias 'c': 'b' is not the id of a model",
        ),
        (MODEL + "[[alias]]\nname = 'c'\nmodels = { a = 1 }\nmirror = 'a'", r"'a' is its mirror and one of its models"),
        (
            MODEL + "[[alias]]\nname = 'c'\nmodels = { a = 1 }\nmirror_percent = 101",
            r"mirror_percent must be a number from 0 to 100",
        ),
    ],
)
def test_mistake_is_explained_with_file_entry_and_field(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text)


REMOTE = '[[model]]\nid = "far"\nkind = "openai"\nmodel = "gpt-4o"\n'
SERVER = "remote = { url = 'https://api.example.com/v1', api-key-env = 'KEY', max_connections = 8 }\n"


def test_remote_model_has_a_server_and_takes_no_memory() -> None:
    file = parse(LIMITED + MODEL + "memory_bytes = 100\n" + REMOTE + SERVER + "max_num_queued_reqs = 5")
    near, far = file.models
    assert near.server is None and far.server is not None and far.memory == {}
    assert (far.server.url, far.server.api_key_env) == ("https://api.example.com/v1", "KEY")
    assert isinstance(far.server, OpenAISettings) and far.server.first_answer_setting == "first_token_timeout"
    assert far.server.max_connections == 8 and far.server.dialect == "openai"
    assert (far.config.model, far.config.model_name, far.config.max_num_queued_reqs) == ("gpt-4o", "far", 5)
    assert far.config.kind == "generate"


VLLM = '[[model]]\nid = "far"\nkind = "vllm"\nmodel = "qwen"\n'


def test_settings_of_a_model_that_vllm_serves_become_its_flags() -> None:
    text = VLLM + "dtype = 'bfloat16'\nmax-num-seqs = 4\nmemory_bytes = 10\nmax_num_queued_reqs = 5\n"
    (model,) = parse(
        text + "vllm = { command = ['/opt/vllm'], arguments = ['--enforce-eager'], token-timeout = 9 }"
    ).models
    assert isinstance(model.server, VllmSettings) and model.kind == "generate"
    assert model.server.arguments == ["--dtype=bfloat16", "--max-num-seqs=4", "--enforce-eager"]
    assert (model.server.command, model.server.token_timeout, model.server.dialect) == (("/opt/vllm",), 9.0, "vllm")
    assert sum(model.memory.values()) == 10 and model.config.max_num_queued_reqs == 5
    (plain,) = parse(VLLM).models
    assert isinstance(plain.server, VllmSettings) and plain.server.command == ("vllm",) and plain.server.arguments == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MODEL + "vllm = {}", r"vllm is for models that vLLM serves; set kind = 'vllm'"),
        (VLLM + "vllm = 5", r"vllm must be a table"),
        (VLLM + "vllm = { url = 'http://h' }", r"vllm: url is for servers that are not started by this one"),
        (VLLM + "vllm = { command = [] }", r"vllm: command must be a list of texts"),
        (VLLM + "vllm = { args = ['x'] }", r"vllm: unknown field 'args'"),
        (VLLM + "block_size = 16", r"block_size is a setting of servekit's own engine"),
        (VLLM + "remote = { url = 'http://h' }", r"remote is for models of another server"),
    ],
)
def test_mistake_about_a_model_that_vllm_serves_is_explained(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text)


EMBEDDER = '[[model]]\nid = "far"\nkind = "embed"\nmodel = "bge"\n'


def test_model_that_embeds_is_remote_if_it_has_a_server() -> None:
    (far,) = parse(EMBEDDER + "remote = { url = 'http://tei', dialect = 'tei', max-batch-size = 8 }\n").models
    assert isinstance(far.server, PredictorServerSettings) and far.workers is None
    assert (far.kind, far.server.dialect, far.server.max_batch_size) == ("embed", "tei", 8)
    assert far.server.first_answer_timeout_s == 60.0
    (near,) = parse(EMBEDDER).models
    assert near.server is None and near.kind == "embed" and near.workers is not None


TRITON = '[[model]]\nid = "far"\nkind = "triton"\nmodel = "resnet"\n'


def test_model_of_a_triton_server_computes_tensors() -> None:
    remote = "remote = { url = 'http://triton:8000', model-control-mode = 'explicit', answer_timeout = 3 }\n"
    near, far = parse(MODEL + TRITON + remote).models
    assert (near.kind, far.kind) == (near.config.kind, "infer") and far.memory == {}
    assert isinstance(far.server, TritonSettings) and far.server.model_control_mode == "explicit"
    assert (far.server.first_answer_setting, far.server.first_answer_timeout_s) == ("answer_timeout", 3.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TRITON, r"kind = 'triton' needs the server's address, such as remote = \{ url = 'http://triton:8000' \}"),
        (TRITON + "remote = { url = 'http://h', dialect = 'vllm' }", r"remote: unknown field 'dialect'"),
        (
            TRITON + "remote = { url = 'http://h', model_control_mode = 'poll' }",
            r"model_control_mode must be 'none' or",
        ),
        (TRITON + "remote = { url = 'http://h' }\nmax_model_len = 5", r"max_model_len is a setting of models that gen"),
        (TRITON + "remote = { url = 'http://h' }\ndtype = 'float16'", r"dtype is a setting of models that this server"),
        (EMBEDDER + "remote = { url = 'http://h', dialect = 'tgi' }", r"dialect must be .*rerank 'openai', 'vllm' or"),
        (EMBEDDER + "remote = { url = 'http://h', max_batch_size = 0 }", r"max_batch_size must be an integer from"),
        (EMBEDDER + "remote = { url = 'http://h' }\nmax_model_len = 5", r"max_model_len is a setting of models that"),
        (EMBEDDER.replace("embed", "classify") + SERVER, r"set kind = 'openai' or 'triton' or 'embed' or 'rerank'"),
        (EMBEDDER.replace('"embed"', "[1]") + SERVER, r"remote is for models of another server"),
        (REMOTE + SERVER + "adapter_tenants = { sql = ['search'] }", r"adapter_tenants is for models with adapters"),
        (MODEL + "adapter_tenants = { sql = ['search'] }", r"adapter_tenants is for models with adapters; set lora or"),
        (
            MODEL + "lora = 'sql=/a,law=/b'\nadapter_tenants = { law = ['law'], sqll = ['search'] }",
            r"adapter_tenants names 'sqll', which is not an adapter of lora: 'law', 'sql'$",
        ),
        (MODEL + "enable_lora = true\nadapter_tenants = { sql = [' '] }", r"adapter_tenants must be a table of"),
        (REMOTE, r"\[\[model\]\] 1 \('far'\): kind = 'openai' needs the server's address"),
        (MODEL + SERVER, r"remote is for models of another server"),
        (REMOTE + SERVER + "dtype = 'float32'", r"dtype is a setting of models that this server runs"),
        (REMOTE + SERVER + "memory_bytes = 5", r"memory_bytes is only for models that this server runs"),
        (REMOTE + "remote = { }", r"remote: the field 'url' is missing"),
        (REMOTE + "remote = { url = 'ftp://h' }", r"remote: url must be an address such as"),
        (REMOTE + "remote = { url = 'http://h', key = 'x' }", r"remote: unknown field 'key'; the known ones are url"),
        (REMOTE + "remote = { url = 'http://h', max_retries = -1 }", r"remote: max_retries must be an integer from 0"),
    ],
)
def test_mistake_about_a_remote_model_is_explained(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text)


def test_adapter_that_may_be_loaded_later_may_have_tenants() -> None:
    (model,) = parse(MODEL + "lora = 'sql=/a'\nenable_lora = true\nadapter_tenants = { later = ['law'] }").models
    assert model.entry.adapter_tenants == {"later": ["law"]}


def test_settings_of_a_model_are_settings() -> None:
    assert set(ServeConfig.__struct_fields__) > MODEL_SETTINGS


def test_models_without_a_file_have_no_limits() -> None:
    file = make_model_file(parse(MODEL).models, "here")
    assert not file.memory and not file.splits and file.default == "a"


def test_models_of_an_alias_are_of_one_kind() -> None:
    split = Split({"a": 1.0, "b": 1.0}, "key")
    check_kinds("here", split, {"a": "generate", "b": "generate", "c": "embed"})
    with pytest.raises(ConfigError, match="here: its models must be of one kind"):
        check_kinds("here", split, {"a": "generate", "b": "embed"})
