// Marks a function that kernels call as well as the host.
#pragma once

#ifdef __CUDACC__
#define MLA_DEVICE_TOO __host__ __device__
#else
#define MLA_DEVICE_TOO
#endif
