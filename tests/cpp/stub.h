// What the stubs of libcudart and libnvinfer share.
#pragma once
#include <cstdlib>
#include <cstring>
#include <cuda_runtime_api.h>
#include <functional>

// Work on a stream is done when somebody waits for it, not before.
void later(cudaStream_t stream, std::function<void()> work, bool kernel = false);

// Counts what has to be destroyed; the process ends with 99 where something is left.
void alive(int change);

// Whether this call is the one that is to fail: $STUB_FAIL is its name.
inline bool fails(char const* call)
{
    auto const* const chosen = std::getenv("STUB_FAIL");
    return chosen && std::strcmp(chosen, call) == 0;
}
