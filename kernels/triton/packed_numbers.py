"""Small integers as 16-bit floats, two per instruction, in PTX.

A float whose last mantissa digit counts ones holds a small integer in its lowest bits: 128 + n in
bfloat16 is 0x4300 | n, and 1024 + n in float16 is 0x6400 | n.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Four bytes of two 4-bit numbers each become four low and four high numbers, plus an offset: those
# of bytes 0, 2, 1 and 3, because a mask finds two numbers that are 16 bits apart.
# $0, $1: low numbers; $2, $3: high numbers; $4: bytes; $5, $6: the offset, four times.
_NIBBLES = """
{
    .reg .b32 shifted, bits;
    lop3.b32 bits, $4, 0x000f000f, magic, 0xea;
    fma.rn.TYPE $0, bits, ones, $5;
    shr.b32 shifted, $4, 4;
    lop3.b32 bits, shifted, 0x000f000f, magic, 0xea;
    fma.rn.TYPE $2, bits, ones, $5;
    shr.b32 shifted, $4, 8;
    lop3.b32 bits, shifted, 0x000f000f, magic, 0xea;
    fma.rn.TYPE $1, bits, ones, $6;
    shr.b32 shifted, $4, 12;
    lop3.b32 bits, shifted, 0x000f000f, magic, 0xea;
    fma.rn.TYPE $3, bits, ones, $6;
}
"""


def _typed(kind: str, magic: int, one: int) -> str:
    """Return the PTX for a dtype. An instruction has one constant at most, others are registers."""
    constants = (
        f"    .reg .b32 ones, magic;\n    mov.b32 ones, 0x{one:04x}{one:04x};\n"
        f"    mov.b32 magic, 0x{magic:04x}{magic:04x};\n"
    )
    return _NIBBLES.replace("TYPE", kind).replace("{\n", "{\n" + constants, 1)


NIBBLES_BFLOAT16 = tl.constexpr(_typed("bf16x2", 0x4300, 0x3F80))
NIBBLES_FLOAT16 = tl.constexpr(_typed("f16x2", 0x6400, 0x3C00))


@triton.jit
def _swapped(x):
    """Return x [N, K] with the middle two of every four columns swapped."""
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    pairs = tl.reshape(x, (ROWS, COLUMNS // 4, 2, 2))
    return tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), (ROWS, COLUMNS))


@triton.jit
def even_and_odd(x):
    """Return the even and the odd columns of x [M, 2 * K], each with the middle two of every four
    swapped.
    """
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    parts = tl.reshape(x, (ROWS, COLUMNS // 8, 2, 2, 2))
    parts = tl.reshape(tl.permute(parts, (0, 1, 3, 2, 4)), (ROWS, COLUMNS // 2, 2))
    return tl.split(parts)


@triton.jit
def nibbles(code, zero, like, NATIVE: tl.constexpr):
    """Return the low and the high 4-bit numbers of bytes `code` [N, K], minus `zero` [N] float32,
    in `like`'s dtype, in the order of `even_and_odd`. NATIVE: by PTX, for 16-bit dtypes.
    """
    if NATIVE:
        if like.dtype == tl.bfloat16:
            offset = tl.broadcast_to((-128.0 - zero).to(tl.bfloat16)[:, None], code.shape)
            low, high = tl.inline_asm_elementwise(
                NIBBLES_BFLOAT16, "=r,=r,=r,=r,r,r,r", [code, offset],
                dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
            )  # fmt: skip
        else:
            offset = tl.broadcast_to((-1024.0 - zero).to(tl.float16)[:, None], code.shape)
            low, high = tl.inline_asm_elementwise(
                NIBBLES_FLOAT16, "=r,=r,=r,=r,r,r,r", [code, offset],
                dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
            )  # fmt: skip
    else:
        code = _swapped(code)
        low = ((code & 15).to(tl.float32) - zero[:, None]).to(like.dtype)
        high = ((code >> 4).to(tl.float32) - zero[:, None]).to(like.dtype)
    return low, high


@triton.jit
def whole_bytes(code, zero, like):
    """Return bytes `code` [N, K] minus `zero` [N] float32 in `like`'s dtype."""
    # 2^23 + n: the mantissa's last digit counts ones.
    number = (code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
    return (number - (8388608.0 + zero)[:, None]).to(like.dtype)
