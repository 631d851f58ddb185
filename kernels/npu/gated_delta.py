"""Decodes of the gated delta rule, by a Triton kernel of sgl-kernel-npu if it is installed.

Signature, limits and meaning are those of `fused_sigmoid_gating_delta_rule_update_npu` in its fla/
folder (described in tests/npu_contract/sgl_kernel_npu.json). It has not run on an NPU here.
"""

from __future__ import annotations

import torch

from ..recurrent_steps import DeltaWeights, States, conv_step, delta_inputs
from ..recurrent_steps import delta_step as plain_delta_step
from .refusals import or_else
from .sgl_kernels import launch, obstacle

# Above this, softplus(x) is x: torch's value.
_SOFTPLUS_THRESHOLD = 20.0


def gated_delta_step(
    x: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    weights: DeltaWeights,
    states: States,
    slots: torch.Tensor,
) -> torch.Tensor:
    """See `recurrent_steps.gated_delta_step`."""
    # The convolution changes its state, so it is not part of what a refusal repeats.
    conv = conv_step(x, weights.conv, None, states.conv, slots)
    return delta_step(conv, b, a, weights, states, slots)


@or_else(plain_delta_step)
def delta_step(
    conv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    weights: DeltaWeights,
    states: States,
    slots: torch.Tensor,
) -> torch.Tensor | None:
    """Supports an even number of heads, and a sigmoid without a factor."""
    recurrent, tokens = states.recurrent, len(conv)
    _, heads, numbers, _ = recurrent.shape
    if (
        obstacle() is not None
        or tokens == 0
        or heads % 2
        or weights.most_written != 1.0
        or not recurrent.is_contiguous()  # The kernel would change a copy.
    ):
        return None
    q, k, v, _, _ = delta_inputs(conv, b, a, weights, states)
    decays = (heads, numbers) if weights.decays > 1 else (heads,)
    result: torch.Tensor = launch(
        "fla.fused_sigmoid_gating_recurrent",
        "fused_sigmoid_gating_delta_rule_update_npu",
        A_log=(-weights.a).log(),
        a=a.reshape(tokens, 1, *decays).contiguous(),
        dt_bias=weights.dt_bias.view(decays),
        softplus_beta=1.0,
        softplus_threshold=_SOFTPLUS_THRESHOLD,
        # Each token is a sequence of its own.
        q=q[:, None].contiguous(),
        k=k[:, None].contiguous(),
        v=v[:, None].contiguous(),
        b=b.reshape(tokens, 1, heads).contiguous(),
        initial_state_source=recurrent,
        initial_state_indices=slots,
        scale=1.0,  # `delta_inputs` has scaled and normalised.
        use_qk_l2norm_in_kernel=False,
        is_kda=weights.decays > 1,
    )
    recurrent[0].zero_()  # Slot 0, of padding, stays zero.
    return result.reshape(tokens, -1)
