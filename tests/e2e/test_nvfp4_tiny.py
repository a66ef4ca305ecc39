"""NVFP4 on a CPU: trainer and engine compute with the same rounded expert weights, and a missing hook stops the run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from miles.quant import contract
from miles_ci.declare import register_cpu_ci

register_cpu_ci(est_time=60, suite="stage-b-cpu")

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "recipes/nvfp4_w4a16_tiny.yaml"
SHORT = ("run.steps=3", "eval.sets=[]", "observe.trackers=[]", "expect={}")

# One trainer rank in a process of its own: what it sends, rounded as the engine does, must be what its forward used.
COMPARE = """
import sys
from pathlib import Path
import torch
from miles.orchestrate.actors import TrainWorker
from miles.orchestrate.placement import Device
from miles.quant.packed import PackedExperts
from miles.quant.scope import Scope
from miles.recipe import load

recipe = load(Path(sys.argv[1]))
worker = TrainWorker(recipe, Path(sys.argv[2]), 0, Device(node="here", kind="cpu", index=0, bundle=0))
worker.start(*worker.offer_port("127.0.0.1"), Path(sys.argv[2]) / "none")
sent = {name: tensor.clone() for name, tensor in worker._backend.state_for_sync()}
state = next(m._miles_fake_qat for m in worker._hook.chunks)
used = {}
for hook in state.hooks:
    for name, value in zip(hook.parameters, state.quantise(hook), strict=True):
        used[f"{hook.name}.{name}"] = value.detach()
engine = PackedExperts(recipe.engine.nvfp4_experts.resolve())
live = {name: tensor.clone() for name, tensor in sent.items()}
count = engine.refresh(live)
equal = 0
for name, value in used.items():
    index, part = name.split("local_experts.")[1].split(".")[:2]
    layer = name.split("layers.")[1].split(".")[0]
    prefix = f"model.layers.{layer}.mlp.experts.{index}."
    rows = ["gate_proj", "up_proj"] if part == "linear_fc1" else ["down_proj"]
    engine_side = torch.cat([live[f"{prefix}{row}.weight"] for row in rows])
    assert torch.equal(value, engine_side), name
    changed = torch.cat([sent[f"{prefix}{row}.weight"] for row in rows])
    assert not torch.equal(value, changed), f"{name}: rounding changed nothing"
    equal += len(rows)
assert equal == count == len(Scope().select(sent)), (equal, count)
print(f"{equal} expert weights equal bit for bit")
"""


def test_engine_weights_equal_the_trainers_rounded_weights_bit_for_bit(runs):
    done = runs.run("tiny", *SHORT, recipe=RECIPE)
    assert done.returncode == 0, done.stderr
    gap = max(row["mismatch/abs_diff_max"] for row in runs.rows("tiny"))
    print(f"largest log-prob gap: {gap:.2e}")
    assert gap == 0.0, "one arithmetic on both sides: see docs/decisions/0403"
    model = runs.folder / "tiny" / "model"
    compared = subprocess.run(
        [sys.executable, "-c", COMPARE, RECIPE, str(model)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert compared.returncode == 0, compared.stderr
    assert "48 expert weights equal bit for bit" in compared.stdout


def test_engine_that_rounds_otherwise_than_the_trainer_is_refused(runs):
    done = runs.run("differ", *SHORT, "engine.nvfp4_experts.error_mode=MAE", recipe=RECIPE)
    assert done.returncode == 2
    assert "NVFP4-CONTRACT" in done.stderr


def test_experts_left_alone_are_the_same_in_trainer_engine_and_export(runs):
    edges = ("quant.nvfp4.bf16_first_layers=1", "engine.nvfp4_experts.bf16_first_layers=1")
    done = runs.run("edges", *SHORT, *edges, recipe=RECIPE)
    assert done.returncode == 0, done.stderr
    assert max(row["mismatch/abs_diff_max"] for row in runs.rows("edges")) == 0.0
    found = contract.read(runs.folder / "edges" / "hf_model")
    assert found.ignore == ("model.layers.0.",)
    assert all(name.startswith("model.layers.1.mlp.experts.") for name in found.tensors)
    assert len(found.tensors) == 8 * 3
    alone = runs.run("alone", *SHORT, edges[0], recipe=RECIPE)
    assert alone.returncode == 2
    assert "NVFP4-CONTRACT" in alone.stderr


# Read by every Python process of the run before its first line: a trainer whose hook installs nothing.
SABOTAGE = """
from miles.quant.hook import FakeQATHook
FakeQATHook.__call__ = lambda self, chunk, hf_names=None: None
"""


def test_removed_hook_stops_the_run(runs, tmp_path, monkeypatch):
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(SABOTAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    done = runs.run("sabotaged", *SHORT, recipe=RECIPE)
    assert done.returncode == 1
    assert "QATHookMissing: fake quantisation is on but the backend never called its install hook" in done.stderr
    assert runs.rows("sabotaged") == []
