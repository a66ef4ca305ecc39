"""The one ordered place where a model is built: configuration, chunks, frequencies, gradient buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from miles.models.family import FamilyConfig
from miles.models.weightmap import global_name
from miles.train.config import ParallelConfig, TrainConfig
from miles.train.megatron.experts import pad_small_experts
from miles.train.megatron.mesh import Mesh
from miles.train.megatron.platform import Platform, building
from miles.train.megatron.rotary import Rotary, check_inv_freq, set_cos_sin_scale
from miles.train.megatron.spec import SpecChoice, block_spec
from miles.train.megatron.value_head import ValueHead

# Called with a chunk and a function from its parameters' names to global ones, before gradient buffers exist.
Install = Callable[[torch.nn.Module, Callable[[str], str]], None]


@dataclass(frozen=True)
class ModelChunk:
    """One pipeline chunk of this rank: the GPTModel, and its gradient-buffer wrapper (the model itself if frozen)."""

    model: Any
    ddp: Any
    layer_offset: int
    expert_offset: int

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """(global megatron-core name, parameter)."""
        for name, parameter in self.model.named_parameters():
            yield global_name(name, layer_offset=self.layer_offset, expert_offset=self.expert_offset), parameter


def core_config(model: FamilyConfig, train: TrainConfig) -> Any:
    """megatron-core's TransformerConfig: model shape from the checkpoint, parallelism and precision from the run.

    Fusions that compile on first use are off; dropout is off because trainer and engine must agree.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel = train.parallel
    dtype = torch.float32 if train.precision == "fp32" else torch.bfloat16
    recompute: dict[str, Any] = {}
    if train.recompute.granularity == "full":
        recompute = {
            "recompute_granularity": "full",
            "recompute_method": train.recompute.method,
            "recompute_num_layers": train.recompute.num_layers,
        }
    elif train.recompute.granularity == "selective":
        recompute = {"recompute_granularity": "selective", "recompute_modules": list(train.recompute.modules)}
    config = TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.heads,
        num_query_groups=model.groups,
        kv_channels=model.head_dim,
        layernorm_epsilon=model.norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        attention_softmax_in_fp32=True,
        rotary_interleaved=model.rope.interleaved,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=train.precision == "bf16",
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp,
        num_layers_in_last_pipeline_stage=parallel.last_pp_layers,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.expert_tp,
        sequence_parallel=parallel.sp,
        variable_seq_lengths=parallel.pp > 1,
        batch_p2p_sync=False,
        # Interleaved chunks send both ways between the same two ranks; batched, such messages could be swapped.
        batch_p2p_comm=parallel.vpp is None,
        overlap_p2p_comm=parallel.vpp is not None,
        # Checked even for dense models when micro-batches differ in length.
        moe_token_dispatcher_type="alltoall",
        # Gradients are summed, never averaged: the loss already carries its denominators.
        calculate_per_token_loss=True,
        deallocate_pipeline_outputs=False,
        **recompute,
        **model.transformer,
    )
    set_cos_sin_scale(config, model.rope)
    return config


def padded_vocab(vocab_size: int, parallel: ParallelConfig, multiple: int) -> int:
    """Vocabulary rows over all tensor-parallel ranks: the next multiple of tp * multiple."""
    step = parallel.tp * multiple
    return -(-vocab_size // step) * step


def build_chunks(
    model: FamilyConfig,
    train: TrainConfig,
    mesh: Mesh,
    platform: Platform,
    choice: SpecChoice,
    *,
    head: str = "vocabulary",
    install: Install | None = None,
    trainable: bool = True,
) -> list[ModelChunk]:
    """Every chunk of this rank, on its device, weights uninitialised until a checkpoint is loaded.

    `head` is "vocabulary" or "value" (a critic). `install` may wrap modules before gradient buffers exist; a chunk
    that is not `trainable` gets none.
    """
    config = core_config(model, train)
    stages: list[int | None] = list(range(train.parallel.vpp)) if train.parallel.vpp else [None]
    with building(platform):
        return [
            _build_chunk(config, model, train, mesh, platform, choice, stage, head, install, trainable)
            for stage in stages
        ]


def _build_chunk(
    config: Any,
    model: FamilyConfig,
    train: TrainConfig,
    mesh: Mesh,
    platform: Platform,
    choice: SpecChoice,
    stage: int | None,
    head: str,
    install: Install | None,
    trainable: bool,
) -> ModelChunk:
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    ignore_virtual = stage is None
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(model, choice, get_num_layers_to_build(config, vp_stage=stage)),
        vocab_size=padded_vocab(model.vocab_size, train.parallel, train.megatron.vocab_multiple),
        max_sequence_length=model.max_positions,
        pre_process=ps.is_pipeline_first_stage(ignore_virtual=ignore_virtual, vp_stage=stage),
        post_process=ps.is_pipeline_last_stage(ignore_virtual=ignore_virtual, vp_stage=stage),
        parallel_output=True,
        share_embeddings_and_output_weights=model.tied and head == "vocabulary",
        position_embedding_type="rope",
        rotary_base=int(model.rope.theta),
        vp_stage=stage,
    )
    if head == "value" and gpt.post_process:
        gpt.output_layer = ValueHead(config)
    gpt.rotary_pos_emb = Rotary(model.rope, platform.device)
    check_inv_freq(gpt, model.rope)
    gpt.to(platform.device)
    if train.precision == "bf16":
        gpt.bfloat16()
        gpt.rotary_pos_emb.float()
    offsets = {
        "layer_offset": get_transformer_layer_offset(config, vp_stage=stage),
        "expert_offset": mesh.layout.ep_rank * (model.num_experts // train.parallel.ep),
    }
    if platform.is_cpu:
        pad_small_experts(gpt)
    if install is not None:
        install(gpt, partial(global_name, **offsets))
    return ModelChunk(
        model=gpt,
        ddp=_with_gradient_buffers(config, gpt, stage) if trainable else gpt.requires_grad_(False),
        **offsets,
    )


def _with_gradient_buffers(config: Any, gpt: Any, stage: int | None) -> Any:
    """megatron-core's wrapper: fp32 gradients in flat buffers, one bucket, reduced when the step asks for it."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=False
    )
    return DistributedDataParallel(config, settings, gpt, disable_bucketing=bool(stage))
