// Vectors, and what of them each kind of CPU has instructions of its own for: the same functions in each of the files.
#pragma once
#if defined(__AVX2__)
#include "simd_x86.h"
#elif defined(__ARM_NEON)
#include "simd_neon.h"
#else
#include "simd_portable.h"
#endif
