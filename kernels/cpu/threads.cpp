// Functions of the thread team of threads.h that threads.py calls.

#include "threads.h"

extern "C" {

// The kernels' loops run on num_threads threads, the caller's included; helpers on `cores` only, unless there are none.
void use_threads(int num_threads, const int32_t* cores, int num_cores) {
  pdserve::Team::get().use(num_threads, cores, num_cores);
}
}
