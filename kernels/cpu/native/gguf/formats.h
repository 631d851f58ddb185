// The list of GGUF's block formats. Everything else, also in Python (gguf_formats.py), is made from this list.
#pragma once
#include "iq4_nl.h"
#include "iq4_xs.h"
#include "mxfp4.h"
#include "nvfp4.h"
#include "q2_k.h"
#include "q3_k.h"
#include "q4_0.h"
#include "q4_1.h"
#include "q4_k.h"
#include "q5_0.h"
#include "q5_1.h"
#include "q5_k.h"
#include "q6_k.h"
#include "q8_0.h"

namespace piecework {

template <class... Each>
struct BlockFormats {
  static_assert(((0 < Each::kNumber && Each::kNumber < kMixed) && ...), "a number of a block format is also one of enum Format");

  template <class Work>
  static void each(Work&& work) {
    (work(Each{}), ...);
  }

  // Calls work(format) with the format of this number. Returns whether there is one.
  template <class Work>
  static bool with(int32_t number, Work&& work) {
    return ((number == Each::kNumber && (work(Each{}), true)) || ...);
  }
};

using GGUFFormats = BlockFormats<Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4, NVFP4>;

}  // namespace piecework
