"""What the port model reads out of a compiler's assembly."""

from __future__ import annotations

import pytest

from piecework.lab.port_model import Loop, counted, loops_of, main

ASSEMBLY = """
_outer:
.L1:
	vmovaps	(%rax), %zmm9
.L2:
	vpbroadcastd	(%rax), %zmm0
	vpbroadcastd	%xmm0, %zmm0
	vpdpbusd	%zmm0, %zmm1, %zmm2
	vpdpbusd	%zmm0, %zmm3, %zmm4
	vcvtph2ps	(%rcx), %zmm5
	vmulps	%zmm5, %zmm6, %zmm7
	vfmadd231ps	%zmm5, %zmm6, %zmm8
	vpandd	%zmm1, %zmm2, %zmm3
	addq	$4, %rax
	cmpq	%rax, %rdx
	jne	.L2
	vaddps	%zmm1, %zmm2, %zmm3
	jne	.L1
_without:
.L3:
	vpandd	%zmm1, %zmm2, %zmm3
	jne	.L3
"""


def test_the_innermost_loop_alone_is_counted_and_what_takes_no_port_of_vectors_is_not() -> None:
    ((name, body),) = loops_of(ASSEMBLY)
    assert (name, counted(body)) == ("_outer", Loop(dots=2, multiplies=2, vectors=8, loads=2))


def test_intel_has_two_ports_for_all_and_amd_two_of_four_pipes_that_multiply() -> None:
    loop = Loop(dots=128, multiplies=32, vectors=200, loads=100)
    assert loop.of_intel() == 0.64
    assert loop.of_amd() == 0.8
    assert Loop(dots=128, multiplies=0, vectors=320, loads=100).of_amd() == 0.8


def test_intel_loads_one_vector_a_cycle() -> None:
    assert Loop(dots=128, multiplies=32, vectors=200, loads=128).of_intel() == 0.5


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--compiler", "/no/such/compiler"], "/no/such/compiler"),
        (["--compiler", "true"], "no loop of Bytes"),
    ],
)
def test_what_compiles_no_such_loops_is_told(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2 and said in capsys.readouterr().err
