// OpenMP's threads, or one thread if the compiler has no OpenMP.
#pragma once
#if defined(_OPENMP)
#include <omp.h>
#else
inline int omp_get_thread_num() { return 0; }
inline int omp_get_num_threads() { return 1; }
#endif
