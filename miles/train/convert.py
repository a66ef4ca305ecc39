"""Between a training checkpoint and a Hugging Face (HF) folder, in one process, without building a model.

`checkpoint_to_hf` assembles the shards of any mesh, `checkpoint_to_nvfp4` packs them; `hf_to_checkpoint` writes step 0 of a run on one rank, which any
mesh then loads. One parameter is held at a time, except for the shard being written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.models import registry
from miles.models.family import read_hf_config
from miles.models.hf_files import FolderWriter, HFCheckpoint, copy_tokenizer_files, write_json, write_shards
from miles.models.spellings import stated_dtype
from miles.models.weightmap import BoundMap
from miles.quant import contract as contracts
from miles.quant.export import export_nvfp4
from miles.quant.scope import Ignore, Scope
from miles.train import checkpoint
from miles.train.checkpoint import Manifest
from miles.train.errors import CheckpointError

if TYPE_CHECKING:
    import torch

MOMENTS = ("exp_avg", "exp_avg_sq")


class ModelShards:
    """HF view of one model (`label`) in a checkpoint folder that was verified, whatever mesh wrote it."""

    def __init__(self, path: Path, manifest: Manifest, label: str, bound: BoundMap) -> None:
        from safetensors import safe_open

        self.path = path
        self.label = label
        self.bound = bound
        self.manifest = manifest
        self.files = {record.name: safe_open(path / record.name, framework="pt") for record in manifest.files}
        self.places: dict[str, list[tuple[int, str]]] = {}
        for record in manifest.files:
            for key in list(self.files[record.name].keys()):
                kind, _, name = key.partition("/")
                if not kind.startswith(label + "."):
                    continue
                expert = bound.entry(name).rule.per_expert
                cut = int(record.metadata["expert_tp_rank" if expert else "tp_rank"])
                self.places.setdefault(key, []).append((cut, record.name))
        for places in self.places.values():
            places.sort()

    def parts(self, kind: str, mcore: str) -> list[torch.Tensor]:
        """The saved cuts of one parameter's `kind` (model, exp_avg, exp_avg_sq), in tensor-parallel order."""
        key = f"{self.label}.{kind}/{mcore}"
        if key not in self.places:
            raise CheckpointError(f"{self.path}: the {self.label}'s {kind} of {mcore} is in none of its files")
        return [self.files[name].get_tensor(key) for _, name in self.places[key]]

    def full(self, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Full HF tensors of one kind, in the map's order."""
        for entry in self.bound.entries.values():
            yield from entry.to_hf(self.parts(kind, entry.mcore))


def checkpoint_to_hf(source: Path, target: Path, *, tokenizer_dir: Path | None = None) -> Path:
    """Write the policy of a checkpoint (`iter_<n>` or the folder above it: then the newest) as an HF folder.

    Tensors get the dtype that config.json states. `tokenizer_dir`: where tokenizer files come from, if anywhere.
    """
    path, manifest = _open(Path(source))
    hf_config = dict(manifest.settings["hf_config"])
    with FolderWriter(Path(target)) as folder:
        if tokenizer_dir is not None:
            copy_tokenizer_files(Path(tokenizer_dir), folder)
        write_json(folder / "config.json", hf_config)
        write_shards(folder, _policy(path, manifest))
        if (saved := manifest.settings.get("quantization_contract")) is not None:
            contracts.write(folder, contracts.parse(json.dumps(saved), where=path / "manifest.json"))
    return Path(target)


def checkpoint_to_nvfp4(source: Path, target: Path, *, tokenizer_dir: Path | None = None) -> Path:
    """Write the policy of a checkpoint with its routed experts packed in NVFP4, as its contract says they were trained.

    The numbers are those of `checkpoint_to_hf` and a conversion after it, without the folder between. `target` is
    empty or absent. `CheckpointError` when the checkpoint was trained without fake quantisation.
    """
    path, manifest = _open(Path(source))
    saved = manifest.settings.get("quantization_contract")
    if saved is None:
        raise CheckpointError(
            f"{path}: was trained without fake quantisation, so nothing says how to round it; use `miles convert "
            "mcore-to-hf`, then `miles convert bf16-to-nvfp4` with the rounding you want"
        )
    trained = contracts.parse(json.dumps(saved), where=path / "manifest.json")
    export_nvfp4(
        _policy(path, manifest),
        Path(target),
        trained.nvfp4(),
        model_config=manifest.settings["hf_config"],
        scope=Scope(Ignore(trained.ignore)),
        expected=trained,
        source_digest=trained.source_digest,
        tokenizer_dir=tokenizer_dir,
    )
    return Path(target)


def hf_to_checkpoint(source: Path, target: Path) -> Path:
    """Write an HF folder as `iter_0` below `target`: fp32 masters, empty moments, one rank."""
    import torch

    hf_config = read_hf_config(Path(source))
    family = registry.resolve(hf_config, where=str(Path(source) / "config.json"))
    model = family.to_mcore(hf_config, where=str(Path(source) / "config.json"))
    bound = family.weights.bind(model.map_shape)
    weights = HFCheckpoint(Path(source))
    bound.check_hf_coverage(weights.names(), where=str(source))
    for name, shape, _ in family.shapes(hf_config):
        weights.check(name, shape)
    tensors: dict[str, Any] = {}
    for entry in bound.entries.values():
        local = entry.rule.join([weights.read(name).float() for name in entry.hf], bound.shape)
        tensors[f"policy.model/{entry.mcore}"] = local
        for moment in MOMENTS:
            tensors[f"policy.{moment}/{entry.mcore}"] = torch.zeros_like(local)
    weights.close()
    settings: dict[str, Any] = {"hf_config": hf_config}
    if (Path(source) / contracts.FILE).exists():
        settings["quantization_contract"] = contracts.read(Path(source)).model_dump(mode="json")
    folder = checkpoint.begin(Path(target), 0)
    record = checkpoint.write_tensors(
        folder, "rank_00000.safetensors", tensors, {"rank": 0, "tp_rank": 0, "expert_tp_rank": 0}
    )
    manifest = Manifest(
        step=0,
        optimizer_steps={"policy": 0},
        family=family.name,
        mesh={},
        versions={},
        files=[record],
        extra={"step": 0},
        settings=settings,
    )
    return checkpoint.publish(folder, manifest, keep=1)


def _policy(path: Path, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """Full Hugging Face tensors of the policy, in the dtype that config.json states."""
    import torch

    hf_config = manifest.settings["hf_config"]
    family = registry.by_name(manifest.family)
    shards = ModelShards(path, manifest, "policy", family.weights.bind(family.to_mcore(hf_config).map_shape))
    dtype = getattr(torch, stated_dtype(hf_config))
    for name, tensor in shards.full("model"):
        yield name, tensor.to(dtype)


def _open(source: Path) -> tuple[Path, Manifest]:
    if (source / "manifest.json").exists():
        return source, checkpoint.verify(source)
    found = checkpoint.find(source)
    if found.path is None or found.manifest is None:
        raise CheckpointError(f"{source}: holds no complete checkpoint; give a run's checkpoint folder or iter_<n>")
    return found.path, found.manifest
