"""The megatron-core backend: one object per rank, driven by the training loop through `miles.train.backend.Backend`.

Order of a rank's life: `init` (platform, mesh, model, optimizer), `load` or `load_checkpoint`, then `step`,
`score`, `state_for_sync`, `save`. Knows token ids and Hugging Face (HF) names, not text.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from miles.algos.config import AlgoConfig
from miles.algos.metrics import MetricSums
from miles.algos.objective import value_objective
from miles.data.batch import RankBatch
from miles.models import registry
from miles.models.family import read_hf_config
from miles.models.hf_files import FolderWriter, copy_tokenizer_files, write_json, write_shards
from miles.models.spellings import complete, stated_dtype
from miles.quant import contract as contracts
from miles.quant.contract import QuantContract
from miles.train import checkpoint
from miles.train.backend import Backend, ChunkHook, ParallelLayout, Resumed, ScoreModel, ScoreOutput, check_score
from miles.train.checkpoint import Manifest
from miles.train.config import OptimizerConfig, TrainConfig
from miles.train.errors import CheckpointError, TrainError
from miles.train.megatron import mesh, platform, rng, state_files
from miles.train.megatron.frozen import FrozenModels, ModelSource, frozen_sources
from miles.train.megatron.inputs import ModelInput, to_inputs
from miles.train.megatron.policy_objective import PolicyObjective
from miles.train.megatron.scoring import Scorer
from miles.train.megatron.spec import choose_spec
from miles.train.megatron.trained import ScoredModel, TrainedModel
from miles.train.parallel_checks import check_parallelism


class MegatronBackend(Backend):
    """`temperature` must equal the rollout's: log-probs are taken of logits divided by it."""

    def __init__(
        self,
        *,
        config: TrainConfig,
        algo: AlgoConfig,
        model_dir: Path,
        rank: int,
        world_size: int,
        device: str,
        master_addr: str,
        master_port: int,
        seed: int,
        temperature: float = 1.0,
        rope_kind: str | None = None,
        install: ChunkHook | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        """`device`: cpu or cuda:N, whatever `train.device` says. `install` is called with each built policy chunk; its contract goes into checkpoints and beside exports.
        `listener`: rank 0's socket bound to `master_port`; without it the port must be free when `init` is called."""
        if temperature <= 0:
            raise TrainError(f"temperature is {temperature}; training needs the sampling temperature, above 0")
        self.config = config
        self.algo = algo
        self.model_dir = Path(model_dir)
        self.temperature = temperature
        self.seed = seed
        self._device = device
        self._address = (rank, world_size, master_addr, master_port)
        self._install = install
        self._listener = listener
        self.hf_config = read_hf_config(self.model_dir)
        self.family = registry.resolve(self.hf_config, where=str(self.model_dir / "config.json"))
        self.model = self.family.to_mcore(
            self.hf_config, rope_kind=rope_kind, where=str(self.model_dir / "config.json")
        )
        check_parallelism(config.parallel, self.model)
        policy = ModelSource(self.model_dir, self.family, self.model)
        self._frozen_sources = frozen_sources(algo, policy, config)

    def init(self) -> None:
        """Join the mesh and build the models and optimizers. Collective; weights are undefined until `load`."""
        rank, world_size, address, port = self._address
        torch.set_num_threads(self.config.num_threads)
        platform.quiet_import_warnings()
        self.platform = platform.choose_platform(self._device)
        self.shim = (platform.apply_cpu_shim() if self.platform.is_cpu else ()) + platform.define_missing_names()
        self.mesh = mesh.join(
            self.config.parallel,
            self.platform,
            rank=rank,
            world_size=world_size,
            master_addr=address,
            master_port=port,
            timeout_s=self.config.timeout_s,
            listener=self._listener,
        )
        rng.seed_all(self.seed + rank)
        self.choice = choose_spec(self.config.megatron, self.platform)
        shared = (self.mesh, self.platform, self.choice)
        self.policy = TrainedModel(
            self.family, self.model, self.config, self.config.optimizer, *shared, install=self._install
        )
        self.models = {"policy": self.policy}
        if self.algo.needs_values:
            critic = critic_optimizer(self.config.optimizer, self.algo.value.lr)
            self.models["critic"] = TrainedModel(self.family, self.model, self.config, critic, *shared, head="value")
        self.frozen = FrozenModels(self._frozen_sources, self.config, *shared)
        self.scorer = Scorer(self.mesh, self.algo, self.model.vocab_size, self.temperature)
        self.policy_objective = PolicyObjective(self.scorer, self.config.fused_loss)

    @property
    def parallel_layout(self) -> ParallelLayout:
        return self.mesh.layout

    def load(self, hf_dir: Path | None = None) -> None:
        """Load weights from an HF folder (default: the model folder); optimizers start fresh. A critic takes the
        policy's trunk and, unless the folder has one, a zero value head."""
        directory = Path(hf_dir) if hf_dir is not None else self.model_dir
        for trained in self.models.values():
            trained.load_hf(directory)
        self.frozen.load()

    def step(self, batch: RankBatch) -> dict[str, float]:
        """One optimizer step. Metrics are global and equal on every rank; a batch without counted rollouts, or with
        non-finite values under `nonfinite: skip_step`, changes nothing and reports `train/step_skipped` 1."""
        if batch.skip:
            return {"train/step_skipped": 1.0}
        with self._bounded("the training step"):
            return self._step(batch)

    def _step(self, batch: RankBatch) -> dict[str, float]:
        inputs = self._inputs(batch)
        sums, norm = self.policy.gradient(inputs, self.policy_objective)
        metrics = sums.finish() | {"train/grad_norm": norm}
        broken = sums.nonfinite_tokens > 0 or not np.isfinite(norm)
        critic = self.models.get("critic")
        value_norm = 0.0
        if critic is not None:
            value_sums, value_norm = critic.gradient(inputs, self._value_objective)
            metrics |= value_sums.finish() | {"train/value_grad_norm": value_norm}
            broken = broken or not np.isfinite(value_norm)
        if broken and self.algo.nonfinite == "raise":
            raise TrainError(
                f"the gradient of step {self.policy.optimizer.steps} is not finite (norm {norm}, critic {value_norm}); "
                "lower train.optimizer.lr or inspect the step with `miles replay`; "
                "algo.nonfinite=skip_step goes on without this step"
            )
        metrics["train/step_skipped"] = float(broken)
        if not broken:
            metrics["train/lr"] = self.policy.optimizer.apply(norm)
            if critic is not None:
                critic.optimizer.apply(value_norm)
        return metrics

    def score(self, batch: RankBatch, *, model: ScoreModel, output: ScoreOutput) -> list[np.ndarray]:
        """`Backend.score`: the samples of the micro-batches in their order. Collective."""
        check_score(model, output)
        per: Literal["token", "support"] = "support" if output == "support" else "token"
        return self._per_sample(batch, self._scored_model(model), self.scorer.reader(output), per=per)

    def _scored_model(self, model: ScoreModel) -> ScoredModel:
        if model == "reference" or model == "teacher":
            return self.frozen[model]
        if model not in self.models:
            raise TrainError("there is no critic: values are needed by algo.advantage=gae only")
        return self.models[model]

    def state_for_sync(self) -> Iterator[tuple[str, torch.Tensor]]:
        """HF names and full tensors on global rank 0, nothing elsewhere; every rank must exhaust it."""
        return self.policy.full_parameters()

    def export_hf(self, directory: Path) -> None:
        """Write an HF folder (atomic): fp32 masters in the dtype that config.json states, config and tokenizer files."""
        tensors = self.policy.full_masters()
        if self.mesh.layout.rank != 0:
            for _ in tensors:
                pass
            return
        dtype = getattr(torch, stated_dtype(self.hf_config))
        with FolderWriter(Path(directory)) as folder:
            copy_tokenizer_files(self.model_dir, folder)
            write_json(folder / "config.json", self.hf_config)
            write_shards(folder, ((name, tensor.to(dtype)) for name, tensor in tensors))
            if (found := self._contract()) is not None:
                contracts.write(folder, found)

    def _contract(self) -> QuantContract | None:
        """How the policy's weights are rounded in training, if they are."""
        return None if self._install is None else self._install.contract(self.policy.bound.expected_hf)

    def save(self, directory: Path, *, extra: dict[str, Any]) -> Path:
        """Write `iter_<n>` below `directory`, n = extra["step"] or the optimizer's step count. Collective, atomic."""
        directory = Path(directory)
        step = int(extra.get("step", self.policy.optimizer.steps))
        folder, files = state_files.save_shards(directory, step, self.models, self.mesh)
        settings = {"precision": self.config.precision, "spec": asdict(self.choice), "hf_config": self.hf_config}
        if (found := self._contract()) is not None:
            settings["quantization_contract"] = found.model_dump(mode="json")
        manifest = Manifest(
            step=step,
            optimizer_steps={label: trained.optimizer.steps for label, trained in self.models.items()},
            family=self.family.name,
            mesh=self.config.parallel.model_dump(),
            versions=_versions(),
            files=files,
            extra=extra,
            settings=settings,
        )
        state_files.publish(folder, manifest, self.mesh, keep=self.config.checkpoint_keep)
        return directory / f"iter_{step}"

    def load_checkpoint(self, directory: Path) -> Resumed | None:
        """Resume from the newest complete checkpoint that verifies; None when there is none. Any mesh loads any."""
        found = checkpoint.find(Path(directory))
        if found.path is None or found.manifest is None:
            return None
        manifest = found.manifest
        if manifest.family != self.family.name or complete(manifest.settings["hf_config"]) != self.hf_config:
            raise CheckpointError(
                f"{found.path}: holds a {manifest.family} model with another config.json than {self.model_dir}; "
                "resume with the model it was started from or choose another run folder"
            )
        if set(manifest.optimizer_steps) != set(self.models):
            raise CheckpointError(
                f"{found.path}: holds {', '.join(sorted(manifest.optimizer_steps))}, but this run trains "
                f"{', '.join(sorted(self.models))}; resume with the same algo.advantage or start a new run folder"
            )
        contracts.require_resumed(self._contract(), manifest.settings.get("quantization_contract"), where=found.path)
        for label, trained in self.models.items():
            reader = state_files.ShardReader(found.path, manifest, label, trained.bound)
            state_files.load_optimizer(reader, trained.optimizer, self.mesh, manifest.optimizer_steps[label])
            reader.restore_rng(self.mesh)
        self.frozen.load()
        return Resumed(dict(manifest.extra), manifest.step, found.path, found.skipped)

    def sleep(self) -> None:
        """Nothing to give back on a CPU; on a GPU weights are kept (see docs) until rematerialisation exists."""
        if not self.platform.is_cpu:
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Undo `sleep`."""

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.mesh.layout.world_size > 1:
            dist.barrier()

    def identity(self) -> dict[str, Any]:
        """What must be equal for a step to repeat bit for bit: mesh, device, versions."""
        device = "cpu" if self.platform.is_cpu else torch.cuda.get_device_name(self.platform.device)
        return {
            "mesh": self.config.parallel.model_dump(),
            "device": device,
            "threads": torch.get_num_threads(),
            "versions": _versions(),
        }

    def close(self) -> None:
        """Leave the mesh."""
        mesh.leave()

    def _bounded(self, what: str) -> AbstractContextManager[None]:
        return mesh.bounded(what, self.mesh.layout.rank, self.config.timeout_s)

    def _inputs(self, batch: RankBatch) -> list[ModelInput]:
        parallel, count = self.config.parallel, len(batch.micro_batches)
        if parallel.vpp is not None and count % parallel.pp:
            raise TrainError(
                f"{count} micro-batches are not a multiple of pp={parallel.pp}, which vpp={parallel.vpp} needs; "
                f"schedule with micro_batch_multiple={parallel.pp}"
            )
        return to_inputs(
            batch.micro_batches,
            parallel,
            self.mesh,
            self.platform.device,
            vocab_size=self.model.vocab_size,
            share=self.config.share_prompts,
        )

    def _value_objective(self, item: ModelInput, plane: torch.Tensor) -> tuple[torch.Tensor, MetricSums]:
        return value_objective(self.scorer.values(item, plane), item.tensors, self.algo)

    def _per_sample(
        self,
        batch: RankBatch,
        trained: ScoredModel,
        read: Callable[[ModelInput, torch.Tensor], torch.Tensor],
        *,
        per: Literal["token", "support"] = "token",
    ) -> list[np.ndarray]:
        with self._bounded("scoring"):
            results = trained.scores(self._inputs(batch), read, per=per)
        arrays: list[np.ndarray] = []
        for micro_batch, scores in zip(batch.micro_batches, results, strict=True):
            counts = micro_batch.token_counts if per == "token" else micro_batch.support_counts
            pieces = np.split(scores.float().cpu().numpy(), np.cumsum(counts)[:-1])
            arrays += [piece for index, piece in zip(micro_batch.sample_index, pieces, strict=True) if index >= 0]
        return arrays


def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("torch", "megatron-core")}


def critic_optimizer(policy: OptimizerConfig, lr: float) -> OptimizerConfig:
    """The policy's optimizer with the critic's learning rate."""
    return OptimizerConfig(**(policy.model_dump() | {"lr": lr, "min_lr": min(policy.min_lr, lr)}))
