"""Decodes of the gated delta rule go to sgl-kernel-npu's kernel where it is installed: called by
its own signature, and left where it does not fit or the device refuses it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from sgl_library import install, signature_of
from torch.nn import functional as F

from piecework.kernels import ops, recurrent_steps
from piecework.kernels.npu import gated_delta
from piecework.kernels.recurrent_steps import DeltaWeights, States

LIBRARY = (
    "fla.fused_sigmoid_gating_recurrent",
    "fused_sigmoid_gating_delta_rule_update_npu",
)
TOKENS, NUMBERS, SIZE, WINDOW = 4, 8, 6, 4


class Kernel:
    """The kernel in plain torch, head by head as in its source, and as strict."""

    def __init__(self) -> None:
        self.calls = 0
        self.error: Exception | None = None
        self.signature = signature_of(*LIBRARY)

    def __call__(self, **named: Any) -> torch.Tensor:
        bound = self.signature.bind(**named)
        bound.apply_defaults()
        given = bound.arguments
        if self.error is not None:
            raise self.error
        self.calls += 1
        assert given["cu_seqlens"] is None and not given["use_qk_l2norm_in_kernel"]
        for value in given.values():
            assert not isinstance(value, torch.Tensor) or value.is_contiguous()
        q, k, v, source = (given[name] for name in ("q", "k", "v", "initial_state_source"))
        _, length, groups, numbers = k.shape
        heads, size = v.shape[2:]
        assert length == 1 and heads % 2 == 0 and source.shape[1:] == (heads, numbers, size)
        out = torch.empty_like(v)
        for row, slot in enumerate(given["initial_state_indices"].tolist()):
            for head in range(heads):
                group = head // (heads // groups)
                raw = given["a"][row, 0, head] + given["dt_bias"][head]
                soft = F.softplus(raw, given["softplus_beta"], given["softplus_threshold"])
                decay = (-given["A_log"][head].exp() * soft).exp()
                assert decay.numel() == (numbers if given["is_kda"] else 1)
                key, value = k[row, 0, group], v[row, 0, head]
                state = source[slot, head] * decay.reshape(-1, 1)
                beta = given["b"][row, 0, head].float().sigmoid()
                state += key[:, None] * ((value - key @ state) * beta)
                source[slot, head] = state
                out[row, 0, head] = q[row, 0, group] * given["scale"] @ state
        return out


@pytest.fixture
def kernel(simnpu: Any, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The library, installed."""
    made = Kernel()
    install(monkeypatch, *LIBRARY, made)
    return made


class Step(NamedTuple):
    x: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor
    weights: DeltaWeights
    states: States
    slots: torch.Tensor

    def on(self, device: str) -> Step:
        """Copies, so that the states of one device are not those of another."""

        def copied(value: Any) -> Any:
            if isinstance(value, tuple):
                return type(value)(*map(copied, value))
            return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value

        return Step(*map(copied, self))


def step(heads: int = 4, decays: int = 1, most_written: float = 1.0, groups: int = 2) -> Step:
    """Two requests and padding, whose slot is 0."""
    torch.manual_seed(0)
    channels = 2 * groups * NUMBERS + heads * SIZE
    states = States(torch.randn(6, WINDOW - 1, channels), torch.randn(6, heads, NUMBERS, SIZE))
    for part in states:
        part[0] = 0
    weights = DeltaWeights(
        torch.randn(channels, WINDOW),
        -torch.rand(heads) - 0.1,
        torch.randn(heads * decays),
        most_written,
    )
    x, b = torch.randn(TOKENS, channels), torch.randn(TOKENS, heads)
    a = torch.randn(TOKENS, heads * decays)
    return Step(x, b, a, weights, states, torch.tensor([3, 5, 0, 0]))


def assert_right(given: Step) -> None:
    plain, on_npu = given.on("cpu"), given.on("npu")
    expected = recurrent_steps.gated_delta_step(*plain)
    found = ops.gated_delta_step(*on_npu)
    torch.testing.assert_close(found.cpu()[:2], expected[:2])
    for one, other in zip(on_npu.states, plain.states, strict=True):
        torch.testing.assert_close(one.cpu(), other)


@pytest.mark.parametrize("decays", [1, NUMBERS])
def test_the_kernel_is_called_as_its_source_says(kernel: Kernel, decays: int) -> None:
    assert_right(step(decays=decays))
    assert kernel.calls == 1


def test_what_it_does_not_support_goes_another_way(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_right(step(most_written=2.0))
    assert_right(step(heads=3, groups=1))
    given = step()
    turned = given.states.recurrent.transpose(2, 3).contiguous().transpose(2, 3)
    assert_right(given._replace(states=given.states._replace(recurrent=turned)))
    monkeypatch.setattr(gated_delta, "obstacle", lambda: "not installed")
    assert_right(step())
    assert kernel.calls == 0


@pytest.mark.parametrize("error", [RuntimeError("MTE out of range"), ImportError("no triton")])
def test_a_refusal_leaves_the_states_of_one_step(
    kernel: Kernel, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    kernel.error = error
    assert_right(step())
    kernel.error = None
    assert_right(step())
    (record,) = caplog.records
    assert "plain torch computes delta_step" in record.getMessage() and kernel.calls == 0
