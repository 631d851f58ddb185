// The functions of one block format of GGUF files: PIECEWORK_FORMAT, such as Q4_1. Each format is a library of its own.
#include "format_kernels.h"

#define NAME_OF(format) piecework_format_##format
#define NAMED(format) NAME_OF(format)

extern "C" const void* NAMED(PIECEWORK_FORMAT)() {
  using namespace piecework;
  static const FormatKernels kernels = make_kernels<PIECEWORK_FORMAT::Kind>(PIECEWORK_FORMAT::kNumber);
  return &kernels;
}
