"""One model on this rank: its chunks and weight map, and its optimizer if it is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from miles.algos.metrics import MetricSums
from miles.models.family import Family, FamilyConfig
from miles.models.weightmap import BoundMap
from miles.train.backend import ChunkHook
from miles.train.config import OptimizerConfig, TrainConfig
from miles.train.megatron import build, loop, weights
from miles.train.megatron.inputs import ModelInput
from miles.train.megatron.mesh import Mesh
from miles.train.megatron.optimizer import MasterAdamW
from miles.train.megatron.platform import Platform
from miles.train.megatron.spec import SpecChoice


def _with_hf_names(hook: ChunkHook, bound: BoundMap) -> build.Install:
    return lambda chunk, to_global: hook(chunk, lambda local: bound.entry(to_global(local)).hf)


class ScoredModel:
    """A model that only scores: the reference policy. Its parameters take no gradient and have no buffers.

    `head`: "vocabulary", or "value" for a critic whose output layer is one number per token.
    """

    trainable = False

    def __init__(
        self,
        family: Family,
        model: FamilyConfig,
        train: TrainConfig,
        mesh: Mesh,
        platform: Platform,
        choice: SpecChoice,
        *,
        head: str = "vocabulary",
        install: ChunkHook | None = None,
    ) -> None:
        policy_head = head == "vocabulary"
        self.mesh = mesh
        weight_map = family.weights if policy_head else weights.critic_map(family.weights)
        self.bound = weight_map.bind(model.map_shape if policy_head else weights.critic_shape(model))
        hook = _with_hf_names(install, self.bound) if install is not None else None
        self.chunks = build.build_chunks(
            model, train, mesh, platform, choice, head=head, install=hook, trainable=self.trainable
        )
        self.full_tensors = weights.FullTensors(self.bound, mesh)
        self._device = platform.device

    def load_hf(self, directory: Path) -> None:
        """Weights from a Hugging Face folder."""
        weights.load_hf(directory, self.chunks, self.bound, self.mesh)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """HF names and full tensors on global rank 0; every rank must exhaust it."""
        return self.full_tensors.gather(weights.local_parameters(self.chunks))

    def scores(
        self,
        inputs: Sequence[ModelInput],
        read: Callable[[ModelInput, torch.Tensor], torch.Tensor],
        *,
        per: Literal["token", "support"] = "token",
    ) -> list[torch.Tensor]:
        """`read` gives fp32 from a micro-batch's output plane: one value per response token, or per id of their
        supports. Results cover the whole micro-batch and are equal on every rank that shares it (pipeline stages,
        context-parallel slices)."""

        def collect(item: ModelInput, plane: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            values = read(item, plane)
            return values.sum(), values

        results: list[Any] = loop.forward_only(self.chunks, inputs, collect, self.mesh)
        layout = self.mesh.layout
        if layout.pp_size > 1 and not results:
            results = [torch.empty(item.count(per), device=self._device) for item in inputs]
        whole = []
        for item, values in zip(inputs, results, strict=True):
            if layout.pp_size > 1:
                dist.broadcast(values, dist.get_global_rank(self.mesh.pp, layout.pp_size - 1), group=self.mesh.pp)
            total, index = item.places(per)
            if index is not None:
                values = values.new_zeros(total).index_copy(0, index, values)
                dist.all_reduce(values, group=self.mesh.cp)
            whole.append(values)
        return whole


class TrainedModel(ScoredModel):
    """A model with gradient buffers and an optimizer: the policy, or a critic."""

    trainable = True

    def __init__(
        self,
        family: Family,
        model: FamilyConfig,
        train: TrainConfig,
        optimizer: OptimizerConfig,
        mesh: Mesh,
        platform: Platform,
        choice: SpecChoice,
        *,
        head: str = "vocabulary",
        install: ChunkHook | None = None,
    ) -> None:
        super().__init__(family, model, train, mesh, platform, choice, head=head, install=install)
        self.optimizer = MasterAdamW(self.chunks, optimizer, mesh, lambda name: weights.is_replicated(name, self.bound))

    def load_hf(self, directory: Path) -> None:
        """Weights from a Hugging Face folder; the optimizer's masters follow."""
        super().load_hf(directory)
        self.optimizer.refresh_masters()

    def full_masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Like `full_parameters`, in fp32 from the optimizer's masters."""
        return self.full_tensors.gather(self.optimizer.master_tensors())

    def gradient(self, inputs: Sequence[ModelInput], loss_fn: loop.LossFn) -> tuple[MetricSums, float]:
        """Fill the gradient buffers; returns the step's metric sums and gradient norm, equal on every rank."""
        parts = loop.forward_backward(self.chunks, inputs, loss_fn, self.mesh)
        return self._global_sums(parts), self.optimizer.grad_norm()

    def _global_sums(self, parts: Sequence[MetricSums]) -> MetricSums:
        total = reduce(lambda left, right: left + right, parts) if parts else MetricSums.zeros(self._device)
        total = total.all_reduce(self.mesh.dp_cp)
        if self.mesh.layout.pp_size > 1:
            last = dist.get_global_rank(self.mesh.pp, self.mesh.layout.pp_size - 1)
            for tensor in (total.sums, total.maxima, total.histogram):
                dist.broadcast(tensor, last, group=self.mesh.pp)
        return total
