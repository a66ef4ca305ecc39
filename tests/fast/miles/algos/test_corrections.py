from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from miles.algos.config import CorrectionConfig, RejectConfig
from miles.algos.corrections import importance_weights, opsm_mask
from miles.algos.sequences import Sequences

LN2 = math.log(2.0)
# Two sequences of three tokens; the last token of the first is masked and wild.
MASK = torch.tensor([True, True, False, True, True, True])
GAP = torch.tensor([2.0, -1.0, 50.0, 0.0, -1.0, -2.0]) * LN2  # old - rollout
SEQUENCES = Sequences(torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([3, 3]))

# (configuration) -> (weights, raw weights of active tokens, rejected)
GOLDEN = {
    "nothing": (CorrectionConfig(), [1, 1, 0, 1, 1, 1], [4, 0.5, 1, 0.5, 0.25], []),
    "TIS token": (CorrectionConfig(mode="truncate", hi=2.0), [2, 0.5, 0, 1, 0.5, 0.25], [4, 0.5, 1, 0.5, 0.25], []),
    "clip token": (CorrectionConfig(mode="clip", hi=2.0), [2, 0.5, 0, 1, 0.5, 0.5], [4, 0.5, 1, 0.5, 0.25], []),
    "IcePop token": (CorrectionConfig(mode="mask", hi=2.0), [0, 0.5, 0, 1, 0.5, 0], [4, 0.5, 1, 0.5, 0.25], [0, 5]),
    "IcePop with lo": (
        CorrectionConfig(mode="mask", lo=0.1, hi=2.0),
        [0, 0.5, 0, 1, 0.5, 0.25],
        [4, 0.5, 1, 0.5, 0.25],
        [0],
    ),
    "TIS sequence": (
        CorrectionConfig(mode="truncate", level="sequence", hi=1.5),
        [1.5, 1.5, 0, 0.125, 0.125, 0.125],
        [2, 2, 0.125, 0.125, 0.125],
        [],
    ),
    "TIS geometric": (
        CorrectionConfig(mode="truncate", level="geometric", hi=1.2),
        [1.2, 1.2, 0, 0.5, 0.5, 0.5],
        [2**0.5, 2**0.5, 0.5, 0.5, 0.5],
        [],
    ),
    "MIS: geometric rejection over token TIS": (
        CorrectionConfig(mode="truncate", hi=3.0, reject=RejectConfig(level="geometric", hi=1.5)),
        [3, 0.5, 0, 0, 0, 0],
        [4, 0.5, 1, 0.5, 0.25],
        [3, 4, 5],
    ),
    "MIS: veto": (
        CorrectionConfig(mode="truncate", hi=3.0, veto=0.3),
        [3, 0.5, 0, 0, 0, 0],
        [4, 0.5, 1, 0.5, 0.25],
        [3, 4, 5],
    ),
    "rejection alone": (
        CorrectionConfig(reject=RejectConfig(level="token", lo=0.4, hi=5.0)),
        [1, 1, 0, 1, 1, 0],
        [4, 0.5, 1, 0.5, 0.25],
        [5],
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_tis_icepop_mis_golden(name):
    config, weights, raw, rejected = GOLDEN[name]
    old = torch.full((6,), -2.0)
    out = importance_weights(old, old - GAP, MASK, SEQUENCES, config)
    torch.testing.assert_close(out.weights, torch.tensor([float(w) for w in weights]))
    torch.testing.assert_close(out.raw[MASK], torch.tensor([float(w) for w in raw]))
    assert out.rejected.nonzero().flatten().tolist() == rejected


def test_masked_tokens_never_reach_exp():
    rollout = torch.tensor([math.nan, -1.0, -math.inf, -1.0, -1.0, -1.0])
    mask = torch.tensor([False, True, False, True, True, True])
    config = CorrectionConfig(mode="truncate", level="sequence", veto=0.01)
    out = importance_weights(torch.full((6,), -1.0), rollout, mask, SEQUENCES, config)
    assert out.weights.tolist() == [0.0, 1.0, 0.0, 1.0, 1.0, 1.0]


def test_weights_carry_no_gradient():
    old = torch.zeros(6, requires_grad=True)
    out = importance_weights(old, -GAP, MASK, SEQUENCES, CorrectionConfig(mode="truncate"))
    assert not out.weights.requires_grad


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bypass": True, "mode": "truncate"}, "every weight is 1; drop mode, reject and veto"),
        ({"bypass": True, "veto": 0.1}, "drop mode, reject and veto"),
        (
            {"mode": "mask", "lo": 3.0, "hi": 2.0},
            "algo.correction.lo is 3.0, so the weight 1 of a sample that is exactly on policy lies outside",
        ),
        ({"hi": 3.0}, "algo.correction.hi has no effect with mode none"),
        ({"level": "sequence", "reject": {}}, "algo.correction.level has no effect with mode none"),
        ({"mode": "truncate", "lo": 0.1}, "algo.correction.lo has no effect with mode truncate"),
        ({"mode": "tis"}, "mode"),
        ({"hi": 0.5}, "greater than 1"),
    ],
)
def test_contradicting_options_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        CorrectionConfig(**options)


def one_sequence(*gaps: float, config: CorrectionConfig):
    """Weights of one sequence whose log-probs lie `gaps` above the rollout's, every token active."""
    n = len(gaps)
    sequence = Sequences(torch.zeros(n, dtype=torch.int64), torch.tensor([n]))
    return importance_weights(torch.tensor(gaps), torch.zeros(n), torch.ones(n, dtype=torch.bool), sequence, config)


def test_a_weight_exactly_at_a_bound_is_inside_it():
    up, down = (float(torch.tensor(gap).exp()) for gap in (0.5, -0.5))
    for config in (
        CorrectionConfig(mode="mask", lo=down, hi=up),
        CorrectionConfig(reject=RejectConfig(level="token", lo=down, hi=up)),
        CorrectionConfig(veto=down),
    ):
        assert not one_sequence(0.5, -0.5, config=config).rejected.any()
    for gap in (0.501, -0.501):
        assert one_sequence(gap, config=CorrectionConfig(mode="mask", lo=down, hi=up)).rejected.all()
        assert one_sequence(
            gap, config=CorrectionConfig(reject=RejectConfig(level="token", lo=down, hi=up))
        ).rejected.all()
    assert one_sequence(-0.501, 0.5, config=CorrectionConfig(veto=down)).rejected.tolist() == [True, True]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_weights_are_bounded_by_e_to_the_20_at_every_level(level):
    for sign in (1.0, -1.0):
        raw = one_sequence(sign * 150.0, sign * 150.0, config=CorrectionConfig(mode="truncate", level=level)).raw
        torch.testing.assert_close(raw, torch.full((2,), math.exp(sign * 20.0)))
    # What the bound holds above a veto below it is not vetoed.
    assert not one_sequence(-150.0, config=CorrectionConfig(veto=1e-9)).rejected.any()


def test_opsm_drops_only_negative_advantages_beyond_delta():
    old = torch.full((6,), 0.5)
    new = torch.tensor([0.0, 0.0, 0.0, -0.5, -0.5, -0.5])  # moved by exactly 0.5, and by 1
    advantages = torch.tensor([-1.0, 0.0, 1.0, -1.0, 0.0, 1.0])
    kept = opsm_mask(new, old, advantages, torch.ones(6, dtype=torch.bool), SEQUENCES, delta=0.5)
    assert kept.tolist() == [True, True, True, False, True, True]
