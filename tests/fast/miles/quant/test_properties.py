"""What must hold for every input, searched by hypothesis."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from miles.kernels.formats import e2m1_decode, e4m3_decode, unpack_e2m1
from miles.kernels.mxfp4_to_fp8 import reference
from miles.kernels.nvfp4_qdq.config import ErrorMode, NVFP4QDQConfig
from miles.models.errors import ModelError
from miles.models.safetensors_header import read_header
from miles.quant import contract
from miles.quant.codecs import nvfp4
from miles.quant.contract import nvfp4_contract
from miles.quant.convert.planning import compact_excludes
from miles.quant.convert.run import Journal
from miles.quant.packed import PackedExperts, pack_named
from miles.quant.scope import Ignore, is_routed_expert_weight

seeds = st.integers(0, 2**31)


def exact(codes: torch.Tensor, scale: torch.Tensor, block: int) -> torch.Tensor:
    return codes.double() * (2.0 ** (scale.double() - 127)).repeat_interleave(block, 1)[:, : codes.shape[1]]


@settings(max_examples=40)
@given(seeds, st.integers(1, 270), st.integers(1, 9), st.integers(0, 254), st.integers(0, 30))
def test_counted_losses_are_the_elements_that_changed(seed: int, rows: int, blocks: int, low: int, width: int) -> None:
    g = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (rows, blocks * 16), dtype=torch.uint8, generator=g)
    scale = torch.randint(low, min(low + width, 254) + 1, (rows, blocks), dtype=torch.uint8, generator=g)
    result = reference.convert(packed, scale)
    before = exact(e2m1_decode(unpack_e2m1(packed)), scale, 32)
    tiles = result.scale.repeat_interleave(128, 0)[:rows]
    after = exact(e4m3_decode(result.q), tiles, 128)
    changed = before != after
    assert int(result.lossy.sum()) == int(changed.sum())
    if int(result.max_k.max()) <= 14:
        assert not changed.any()


configs = st.one_of(
    st.builds(NVFP4QDQConfig, decode=st.sampled_from(["te", "stored"])),
    st.builds(
        NVFP4QDQConfig, st.just(True), st.sampled_from([448, 256]), st.sampled_from(ErrorMode), st.booleans(),
        decode=st.sampled_from(["te", "stored"]),
    ),
)  # fmt: skip


@settings(max_examples=40)
@given(seeds, configs, st.integers(1, 5), st.integers(1, 4), st.integers(-60, 60))
def test_packed_and_rounded_weights_are_the_same_numbers(
    seed: int, config: NVFP4QDQConfig, experts: int, blocks: int, power: int
) -> None:
    """Codec round trip, export stream and engine store agree with quantise-dequantise, for pairs and single weights."""
    g = torch.Generator().manual_seed(seed)
    names = [f"m.mlp.experts.{e}.{h}_proj.weight" for e in range(experts) for h in ("gate", "up", "down")]
    weights = {n: torch.randn(3, 16 * blocks, generator=g) * 2.0**power * (i + 1) for i, n in enumerate(names)}
    live = {n: w.clone() for n, w in weights.items()}
    engine = PackedExperts(config)
    assert engine.refresh(live) == len(names)
    exported = dict(pack_named(weights.items(), config))
    for name, weight in weights.items():
        partner = {"gate": "up", "up": "gate"}.get(name.split(".")[-2].removesuffix("_proj"), "down")
        other = weights[name.replace(name.split(".")[-2], f"{partner}_proj")]
        amax = torch.maximum(weight.abs().max(), other.abs().max())
        assert torch.equal(live[name], nvfp4.qdq(weight, config, amax=amax))
        assert torch.equal(exported[name], engine.store[name].weight)
        assert torch.equal(exported[name + "_scale"].view(torch.uint8), engine.store[name].weight_scale)


parts = st.sampled_from(["model", "layers", "0", "1", "mlp", "experts", "gate", "weight", "norm"])
tensor_names = st.lists(st.lists(parts, min_size=1, max_size=5).map(".".join), min_size=1, max_size=12, unique=True)


@given(tensor_names, seeds)
def test_excludes_are_modules_that_hold_what_is_kept_and_nothing_quantised(names: list[str], seed: int) -> None:
    cut = seed % (len(names) + 1)
    kept, quantised = names[:cut], names[cut:]
    excludes = compact_excludes(kept, quantised)

    def inside(name: str, module: str) -> bool:
        return name == module or name.startswith(module + ".")

    assert not any(inside(name, module) for module in excludes for name in quantised)
    for name in kept:
        module = name.rpartition(".")[0] or name
        assert any(inside(name, e) for e in excludes) or any(inside(other, module) for other in quantised)


@given(tensor_names, tensor_names)
def test_a_compact_ignore_list_matches_the_same_names(entries: list[str], names: list[str]) -> None:
    full = Ignore(tuple(e + "." * (len(e) % 2) for e in entries))
    assert [full.matches(n) for n in names] == [Ignore(full.compact()).matches(n) for n in names]


@given(st.lists(st.sampled_from(["model", "layers.0", "mlp", "experts", "3", "gate_proj", "weight"]), max_size=7))
def test_no_name_with_a_shared_expert_in_it_is_quantised(words: list[str]) -> None:
    for shared in ("shared_expert", "shared_experts", "shared_expert_gate"):
        for at in range(len(words) + 1):
            assert not is_routed_expert_weight(".".join([*words[:at], shared, *words[at:]]))


@given(configs, st.lists(st.sampled_from("abcd"), unique=True))
def test_a_contract_reads_back_equal_and_its_digest_is_of_its_content(config: NVFP4QDQConfig, names: list[str]) -> None:
    mine = nvfp4_contract(config, names, source_digest="s", producer={"conversion": "test"})
    back = contract.parse(mine.canonical(), where="here")
    assert back == mine
    assert back.digest() == mine.digest()
    assert back.nvfp4() == config
    assert back.model_copy(update={"source_digest": "t"}).digest() != mine.digest()


@settings(max_examples=60)
@given(st.integers(0, 2**16))
def test_a_journal_cut_anywhere_keeps_its_whole_lines(cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        entries = [{"kind": "x"}, {"shard": "a", "bytes": 10}, {"shard": "b", "bytes": 20}]
        text = "".join(json.dumps(e) + "\n" for e in entries).encode()
        kept = text[: cut % (len(text) + 1)]
        path.write_bytes(kept)
        journal = Journal(path)
        whole = kept.count(b"\n")
        # A last line that lacks only its line feed is whole too.
        assert journal.entries in (entries[:whole], entries[: whole + 1])
        journal.append({"shard": "c"})
        assert Journal(path).entries == journal.entries


@settings(max_examples=40)
@given(st.integers(0, 400), st.integers(0, 255))
def test_a_shard_cut_or_changed_anywhere_is_read_whole_or_refused(at: int, byte: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file({"a.weight": torch.arange(8.0), "b": torch.zeros(2, 3)}, path)
        whole = path.read_bytes()
        path.write_bytes(whole[: at % len(whole)])
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            read_header(path)
        changed = bytearray(whole)
        changed[at % len(whole)] = byte
        path.write_bytes(changed)
        with contextlib.suppress(ModelError):
            assert all(entry.end >= entry.begin for entry in read_header(path).tensors.values())
