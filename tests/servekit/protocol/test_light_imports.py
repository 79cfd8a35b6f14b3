"""Claims about light imports: what a worker does not import, and that all of it works when it is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 120  # to import all of torch and transformers, and to compile, on a busy machine
PARTS_NOT_USED = ("sympy", "torch._dynamo.", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp")


def run(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout


# Arguments of the functions that answer before torch's part for symbolic sizes is imported.
PLAIN = [(True,), (False,), (3,), (3, 3), (3, 4), (True, False), (False, False), ((1, 2), (1, 2)), ((1,), ())]


def test_a_worker_imports_neither_compiler_nor_distributed_tensors_and_compiles_when_asked() -> None:
    output = run(f"""
import sys
from servekit.protocol.light_imports import light_imports
with light_imports():
    import workers.runner.model_runner, transformers.models.gpt_oss.modeling_gpt_oss
from transformers.utils import is_torch_distributed_available
index_part = "torch._dynamo._trace_wrapped_higher_order_op"
print([name for name in sys.modules if name.startswith({PARTS_NOT_USED}) and name != index_part])
print(is_torch_distributed_available())

import torch
from transformers import LlamaConfig, LlamaForCausalLM
with torch.device("meta"):
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=1))
from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true
print([name for name in sys.modules if name.startswith("sympy.")])

compiler = sys.modules["torch._dynamo"]
graphs = []
def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward
@torch.compile(backend=backend)
def double(x): return 2 * x
print(double(torch.tensor(21)).item(), len(graphs))
print(torch._dynamo is compiler, "sympy.core" in sys.modules, compiler.disable.__module__)

from servekit.protocol.light_imports import ANSWERS
from torch.fx.experimental import symbolic_shapes
def answers(function):
    found = []
    for values in {PLAIN}:
        try:
            found.append(function(*values))
        except (AssertionError, TypeError):
            found.append(None)
    return found
for name, answer in ANSWERS.items():
    wrong = [values for values in zip({PLAIN}, answers(getattr(symbolic_shapes, name)), answers(answer))
             if values[1] not in (None, values[2])]
    assert not wrong, (name, wrong)
assert guard_or_false is not symbolic_shapes.guard_or_false
is_three = symbolic_shapes.ShapeEnv().create_unbacked_symint() == 3
print(guard_or_false(is_three), guard_or_true(is_three))
""")
    assert output.splitlines() == ["[]", "False", "[]", "42 1", "True True torch._dynamo.decorators", "False True"]


def test_a_part_of_the_compiler_is_imported_once_whoever_imports_it_first() -> None:
    output = run("""
import sys
from servekit.protocol.light_imports import light_imports
with light_imports():
    import torch._dynamo
    before = len(sys.modules)
    import torch._dynamo.utils  # which the compiler imports, too
utils = sys.modules["torch._dynamo.utils"]
print(before < len(sys.modules), torch._dynamo.utils is torch._dynamo.eval_frame.utils is utils)
""")
    assert output.splitlines() == ["True True"]


def test_transformers_finds_the_same_models_and_reads_each_folder_once() -> None:
    output = run("""
from pathlib import Path
from servekit.protocol.light_imports import light_imports
with light_imports():
    import transformers.models.auto
    from transformers.utils import import_utils
reads = import_utils.create_import_structure_from_path.cache_info()
print(reads.misses == reads.currsize > 400)
texts = [path.read_text() for path in Path(transformers.__file__).parent.glob("models/*/*.py")]
fetch = import_utils.fetch__all__
print(len(texts) > 1000, [text for text in texts if fetch(text) != fetch.__wrapped__(text)])
""")
    assert output.splitlines() == ["True", "True []"]


def test_transformers_knows_whether_ranks_share_the_model() -> None:
    output = run("""
from servekit.protocol.light_imports import light_imports
with light_imports(shares_model=True):
    from transformers.utils import is_torch_distributed_available
print(is_torch_distributed_available())
""")
    assert output.splitlines() == ["True"]


def test_a_rank_connects_and_divides_a_model_without_the_compiler(tmp_path: Path) -> None:
    output = run(f"""
import sys
from servekit.protocol.light_imports import light_imports
with light_imports(shares_model=True):
    import torch, transformers.modeling_utils
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
dist.init_process_group("gloo", init_method="file://{tmp_path}/rendezvous", rank=0, world_size=1)
whole = torch.nn.Parameter(torch.ones(4, 2))
part = distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)], src_data_rank=None)
print(torch.nn.Parameter(part).to_local().shape)
print("torch._dynamo.config" in sys.modules, [name for name in sys.modules if name.startswith("torch._dynamo.t")])

print(torch._dynamo.trace_rules.lookup.__module__)
print(torch._dynamo.trace_rules is sys.modules["torch._dynamo.trace_rules"])
graphs = []
def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward
print(torch.compile(lambda x: 2 * x, backend=backend)(torch.tensor(21)).item(), len(graphs))
dist.destroy_process_group()
""")
    assert output.splitlines() == ["torch.Size([4, 2])", "True []", "torch._dynamo.trace_rules", "True", "42 1"]


def test_a_module_is_imported_without_the_code_of_its_package_unless_it_needs_that(tmp_path: Path) -> None:
    package = tmp_path / "packed"
    package.mkdir()
    (package / "__init__.py").write_text("NAME = 'package'")
    (package / "part.py").write_text("NAME = 'part'")
    (package / "light.py").write_text("from . import part")
    (package / "needy.py").write_text("from . import NAME")
    output = run(f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from servekit.protocol.light_imports import bare_packages
def packed(): return [name for name in sys.modules if name.startswith("packed")]

with bare_packages("packed"):
    import packed.light as light
print(light.part.NAME, packed())
try:
    with bare_packages("packed"):
        import packed.needy
except ImportError:
    print("needs more", packed())
import packed.needy
with bare_packages("packed"):
    import packed.light
print(packed.needy.NAME, packed.light is not light)
""")
    assert output.splitlines() == ["part []", "needs more []", "package True"]


def test_chats_are_rendered_without_importing_all_of_transformers() -> None:
    assert (
        run("""
import sys, servekit.sandbox.chat_template
print([name for name in sys.modules if name.startswith(("transformers", "httpx", "torch"))])
""")
        == "[]\n"
    )
