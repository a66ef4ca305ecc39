"""MXFP4 to FP8 of 64 weights of 4096 x 6144 on one GPU, one launch, against a device copy of the same bytes.

    python benchmarks/mxfp4_to_fp8.py --out benchmarks/results/mxfp4_to_fp8.json

Bytes per element: 0.5 in, 1/32 scale in, 1 out, and the tile scale. The result of two weights is compared with the
reference before anything is timed. Alternatives: the same in plain torch operations, eager and under torch.compile, one
weight after the other.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu_timing import header, time_us, write

from miles.kernels.mxfp4_to_fp8 import api, reference

SHAPE, COUNT = (4096, 6144), 64


def differing(packed: torch.Tensor, scale: torch.Tensor, got: reference.Converted) -> int:
    want = reference.convert(packed.cpu(), scale.cpu())
    return sum(int((getattr(want, f) != getattr(got, f).cpu()).sum()) for f in ("q", "scale", "max_k", "lossy"))


def plain(packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(E4M3 bytes [M, N], tile codes) by ordinary torch operations in fp32; dimensions in multiples of 128, no checks."""
    m, n = packed.shape[0], packed.shape[1] * 2
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=packed.device)
    values = torch.cat((magnitudes, -magnitudes))
    x = values[torch.stack((packed & 15, packed >> 4), -1).view(m, n // 32, 32).int()]
    code = scale.int()
    largest = torch.where((x != 0).any(-1), code, -1).view(m // 128, 128, n // 128, 4).amax((1, 3))
    tile = (largest - 6).clamp_min(0)
    shift = code.view(m // 128, 128, n // 128, 4) - tile[:, None, :, None]
    y = x * torch.exp2(shift.view(m, n // 32, 1).float())
    return y.view(m, n).to(torch.float8_e4m3fn).view(torch.uint8), tile.to(torch.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--count", type=int, default=COUNT)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("mxfp4_to_fp8 needs a CUDA GPU")
    torch.manual_seed(0)
    m, n = SHAPE
    packed = [torch.randint(0, 256, (m, n // 2), dtype=torch.uint8, device="cuda") for _ in range(args.count)]
    scales = [torch.randint(118, 124, (m, n // 32), dtype=torch.uint8, device="cuda") for _ in range(args.count)]
    scales[1].copy_(torch.randint(100, 124, (m, n // 32), dtype=torch.uint8, device="cuda"))  # one lossy weight
    first = api.mxfp4_to_fp8(packed, scales)
    bad = [differing(packed[i], scales[i], first[i]) for i in (0, 1)]
    lossy = int(first[1].lossy.sum())
    ours_of_first = first[0].q.clone(), first[0].scale.clone()
    del first

    read = args.count * (m * n // 2 + m * n // 32)
    written = args.count * m * n
    total = read + written + args.count * (m // 128) * (n // 128) * 5
    source = torch.empty(total // 2, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy = time_us(lambda: target.copy_(source))
    results = {
        "differences from the reference [normal, lossy weight]": bad,
        "lossy elements of the lossy weight": lossy,
    }
    shapes = itertools.product((4, 8, 16), (32, 40, 48, 64)) if args.tune else ((),)
    for shape in shapes:
        launch = api._Launch(packed, scales, *shape)
        results[f"ours, {launch.warps} warps, {launch.registers} registers"] = time_us(launch.run)
    ours = min(v for k, v in results.items() if k.startswith("ours"))
    results |= {
        "copy of the same bytes": copy,
        "bytes": total,
        "copy TB/s": total / copy / 1e6,
        "ours TB/s": total / ours / 1e6,
    }
    results["share of copy bandwidth"] = copy / ours
    compiled = torch.compile(plain)
    pairs = list(zip(packed, scales, strict=True))
    for name, call in (("plain torch, eager", plain), ("plain torch, compiled", compiled)):
        different = sum(int((a != b).sum()) for a, b in zip(call(*pairs[0]), ours_of_first, strict=True))
        results |= {f"differences of {name}": different, name: time_us(lambda call=call: [call(*p) for p in pairs], 3)}
        results[f"ratio {name} / ours"] = results[name] / ours
    write({**header(), "unit": "us", "results": results}, args.out)


if __name__ == "__main__":
    main()
