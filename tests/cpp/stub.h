// What the stubs of libcudart and libnvinfer share.
#pragma once
#include <cstdlib>
#include <cstring>
#include <cuda_runtime_api.h>
#include <functional>
#include <map>
#include <string>

// Work on a stream is done when somebody waits for it, not before.
void later(cudaStream_t stream, std::function<void()> work, bool kernel = false);

// Counts what has to be destroyed; the process ends with 99 where something is left.
void alive(int change);

// Whether this call is the one that is to fail: $STUB_FAIL is "cudaMalloc:2" for the second of that name.
inline bool fails(std::string const& call)
{
    static std::map<std::string, int> calls;
    auto const* const chosen = std::getenv("STUB_FAIL");
    return chosen && call + ":" + std::to_string(++calls[call]) == chosen;
}
