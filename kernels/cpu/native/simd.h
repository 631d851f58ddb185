// Vectors, and functions for which each kind of CPU has its own instructions. Each of the files has the same functions.
#pragma once
#if defined(__AVX2__)
#include "simd_x86.h"
#elif defined(__ARM_NEON)
#include "simd_neon.h"
#else
#include "simd_portable.h"
#endif
