// Stands for libcudart: memory of the GPU is the host's, aligned to 256 bytes and full of NaN.
#include "stub.h"

#include <cstdio>
#include <map>
#include <unistd.h>
#include <vector>

struct CUstream_st
{
    std::vector<std::function<void()>> work;
};

struct CUevent_st
{
    int kernels{-1};
};

namespace
{
int made = 0, kernels = 0;
std::map<void*, void*> allocated; // what was handed out, and what is to be freed for it

struct AtTheEnd
{
    ~AtTheEnd()
    {
        if (made != 0)
        {
            std::fprintf(stderr, "stub: %d things were not destroyed\n", made);
            _exit(99);
        }
    }
} atTheEnd;

cudaError_t wait(cudaStream_t stream)
{
    for (auto& work : stream->work)
        work();
    stream->work.clear();
    return cudaSuccess;
}

template <class T>
cudaError_t create(char const* call, T** out)
{
    if (fails(call))
        return cudaErrorMemoryAllocation;
    *out = new T;
    alive(1);
    return cudaSuccess;
}

template <class T>
cudaError_t destroy(T* thing)
{
    delete thing;
    alive(-1);
    return cudaSuccess;
}

cudaStream_t recorded; // the stream of the last event: there is but one
} // namespace

void later(cudaStream_t stream, std::function<void()> work, bool kernel)
{
    stream->work.push_back(std::move(work));
    if (kernel)
        stream->work.push_back([] { ++kernels; });
}

void alive(int change) { made += change; }

extern "C"
{
cudaError_t cudaMalloc(void** out, std::size_t size)
{
    if (fails("cudaMalloc") || size == 0)
        return cudaErrorMemoryAllocation;
    std::size_t const off = fails("alignment") ? 64 : 0;
    void* memory = nullptr;
    if (posix_memalign(&memory, 256, off + size) != 0) // not a byte more, so that sanitizers see what is beyond
        return cudaErrorMemoryAllocation;
    std::memset(memory, 0xff, off + size);
    *out = static_cast<char*>(memory) + off;
    allocated[*out] = memory;
    alive(1);
    return cudaSuccess;
}

cudaError_t cudaFree(void* memory)
{
    std::free(allocated.at(memory));
    allocated.erase(memory);
    alive(-1);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, void const* from, std::size_t size, cudaMemcpyKind kind, cudaStream_t stream)
{
    auto const toGpu = kind == cudaMemcpyHostToDevice;
    if (fails(toGpu ? "cudaMemcpyAsync to the GPU" : "cudaMemcpyAsync from the GPU"))
        return cudaErrorInvalidValue;
    if (allocated.count(toGpu ? to : const_cast<void*>(from)) == 0)
        return cudaErrorInvalidValue; // the wrong direction
    later(stream, [=] { std::memcpy(to, from, size); });
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return create("cudaStreamCreate", stream); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return destroy(stream); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    return fails("cudaStreamSynchronize") ? cudaErrorIllegalAddress : wait(stream);
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return create("cudaEventCreate", event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return destroy(event); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    if (fails("cudaEventRecord"))
        return cudaErrorInvalidResourceHandle;
    recorded = stream;
    later(stream, [=] { event->kernels = kernels; });
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t)
{
    return fails("cudaEventSynchronize") ? cudaErrorIllegalAddress : wait(recorded);
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end)
{
    if (fails("cudaEventElapsedTime") || begin->kernels < 0 || end->kernels < 0)
        return cudaErrorNotReady;
    *milliseconds = 0.25f * static_cast<float>(end->kernels - begin->kernels); // each run takes a quarter
    return cudaSuccess;
}

char const* cudaGetErrorString(cudaError_t error)
{
    return error == cudaErrorMemoryAllocation ? "out of memory" : "another error of CUDA";
}
}
