// Stands for TensorRT's header of this name where NVIDIA's is not at hand: what examples/cpp and the stub of libnvinfer
// need of TensorRT 11, written from its documented interface. Names, types and values are compared with NVIDIA's own
// header by signatures.cpp; the layout (the order of the virtual functions, which the library implements) by running
// NVIDIA's compiled Python bindings over the stub. For these tests alone: programs are to be built with NVIDIA's.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cuda_runtime_api.h>

#define NV_TENSORRT_MAJOR 11
#define NV_TENSORRT_MINOR 1
#define NV_TENSORRT_PATCH 0
#define NV_TENSORRT_VERSION (NV_TENSORRT_MAJOR * 10000L + NV_TENSORRT_MINOR * 100L + NV_TENSORRT_PATCH)

namespace nvinfer1
{
enum class DataType : int32_t
{
    kFLOAT = 0,
    kHALF = 1,
    kINT8 = 2,
    kINT32 = 3,
    kBOOL = 4,
    kUINT8 = 5,
    kFP8 = 6,
    kBF16 = 7,
    kINT64 = 8
};
enum class TensorIOMode : int32_t { kNONE = 0, kINPUT = 1, kOUTPUT = 2 };
enum class TensorLocation : int32_t { kDEVICE = 0, kHOST = 1 };
enum class TensorFormat : int32_t { kLINEAR = 0 };
enum class OptProfileSelector : int32_t { kMIN = 0, kOPT = 1, kMAX = 2 };
enum class ExecutionContextAllocationStrategy : int32_t { kSTATIC = 0 };
enum class APILanguage : int32_t { kCPP = 0 };

class Dims64
{
public:
    static constexpr int32_t MAX_DIMS{8};
    int32_t nbDims;
    int64_t d[MAX_DIMS];
};
using Dims = Dims64;

class InterfaceInfo
{
public:
    char const* kind;
    int32_t major, minor;
};

class IVersionedInterface
{
public:
    virtual APILanguage getAPILanguage() const noexcept { return APILanguage::kCPP; }
    virtual InterfaceInfo getInterfaceInfo() const noexcept = 0;
    virtual ~IVersionedInterface() noexcept = default;
};

namespace v_1_0
{
class ILogger : public IVersionedInterface
{
public:
    enum class Severity : int32_t { kINTERNAL_ERROR = 0, kERROR = 1, kWARNING = 2, kINFO = 3, kVERBOSE = 4 };
    InterfaceInfo getInterfaceInfo() const noexcept override { return {"ILogger", 1, 0}; }
    virtual void log(Severity severity, char const* message) noexcept = 0;
};
} // namespace v_1_0
using ILogger = v_1_0::ILogger;

class ICudaEngine;
class IExecutionContext;
class IRuntime;

// ---------------------------------------------------------------- what the library implements

namespace apiv
{
// A function that neither the example nor the bindings call: only its place counts.
#define UNUSED(place) \
    virtual void unused##place() noexcept { std::abort(); }

class VRoot
{
public:
    virtual ~VRoot() noexcept = default;
};

class VRuntime : public VRoot
{
public:
    UNUSED(0)
    virtual ICudaEngine* deserializeCudaEngine(void const* blob, std::size_t size) noexcept = 0;
    UNUSED(2) UNUSED(3) UNUSED(4) UNUSED(5) UNUSED(6) UNUSED(7) UNUSED(8) UNUSED(9) UNUSED(10) UNUSED(11) UNUSED(12)
    UNUSED(13) UNUSED(14) UNUSED(15) UNUSED(16) UNUSED(17)
    virtual void setEngineHostCodeAllowed(bool allowed) noexcept = 0;
};

class VCudaEngine : public VRoot
{
public:
    UNUSED(0) UNUSED(1) UNUSED(2)
    virtual IExecutionContext* createExecutionContext(ExecutionContextAllocationStrategy strategy) noexcept = 0;
    UNUSED(4) UNUSED(5)
    virtual int32_t getNbOptimizationProfiles() const noexcept = 0;
    UNUSED(7) UNUSED(8) UNUSED(9) UNUSED(10) UNUSED(11) UNUSED(12)
    virtual Dims getTensorShape(char const* name) const noexcept = 0;
    virtual DataType getTensorDataType(char const* name) const noexcept = 0;
    virtual TensorLocation getTensorLocation(char const* name) const noexcept = 0;
    UNUSED(16)
    virtual TensorIOMode getTensorIOMode(char const* name) const noexcept = 0;
    UNUSED(18) UNUSED(19)
    virtual TensorFormat getTensorFormat(char const* name) const noexcept = 0;
    UNUSED(21) UNUSED(22)
    virtual Dims getProfileShape(char const* name, int32_t profile, OptProfileSelector select) const noexcept = 0;
    virtual int32_t getNbIOTensors() const noexcept = 0;
    virtual char const* getIOTensorName(int32_t index) const noexcept = 0;
};

class VExecutionContext : public VRoot
{
public:
    UNUSED(0) UNUSED(1) UNUSED(2) UNUSED(3) UNUSED(4)
    virtual ICudaEngine const& getEngine() const noexcept = 0; // called by the bindings alone
    UNUSED(6) UNUSED(7) UNUSED(8) UNUSED(9) UNUSED(10) UNUSED(11) UNUSED(12) UNUSED(13)
    virtual bool setOptimizationProfileAsync(int32_t profile, cudaStream_t stream) noexcept = 0;
    UNUSED(15) UNUSED(16) UNUSED(17)
    virtual bool setInputShape(char const* name, Dims const& dims) noexcept = 0;
    virtual Dims getTensorShape(char const* name) const noexcept = 0;
    UNUSED(20)
    virtual bool setTensorAddress(char const* name, void* data) noexcept = 0;
    UNUSED(22) UNUSED(23) UNUSED(24)
    virtual int32_t inferShapes(int32_t nbMaxNames, char const** names) noexcept = 0;
    UNUSED(26) UNUSED(27) UNUSED(28) UNUSED(29) UNUSED(30) UNUSED(31) UNUSED(32) UNUSED(33)
    virtual bool enqueueV3(cudaStream_t stream) noexcept = 0;
};
#undef UNUSED
} // namespace apiv

// ---------------------------------------------------------------- what programs call

class INoCopy
{
protected:
    INoCopy() = default;
    virtual ~INoCopy() = default;
    INoCopy(INoCopy const&) = delete;
    INoCopy& operator=(INoCopy const&) = delete;
};

class IExecutionContext : public INoCopy
{
public:
    virtual ~IExecutionContext() noexcept = default;
    bool setOptimizationProfileAsync(int32_t profile, cudaStream_t stream) noexcept
    {
        return mImpl->setOptimizationProfileAsync(profile, stream);
    }
    bool setInputShape(char const* name, Dims const& dims) noexcept { return mImpl->setInputShape(name, dims); }
    Dims getTensorShape(char const* name) const noexcept { return mImpl->getTensorShape(name); }
    bool setTensorAddress(char const* name, void* data) noexcept { return mImpl->setTensorAddress(name, data); }
    int32_t inferShapes(int32_t nbMaxNames, char const** names) noexcept
    {
        return mImpl->inferShapes(nbMaxNames, names);
    }
    bool enqueueV3(cudaStream_t stream) noexcept { return mImpl->enqueueV3(stream); }

protected:
    apiv::VExecutionContext* mImpl;
};

class ICudaEngine : public INoCopy
{
public:
    virtual ~ICudaEngine() noexcept = default;
    Dims getTensorShape(char const* name) const noexcept { return mImpl->getTensorShape(name); }
    DataType getTensorDataType(char const* name) const noexcept { return mImpl->getTensorDataType(name); }
    TensorLocation getTensorLocation(char const* name) const noexcept { return mImpl->getTensorLocation(name); }
    TensorIOMode getTensorIOMode(char const* name) const noexcept { return mImpl->getTensorIOMode(name); }
    TensorFormat getTensorFormat(char const* name) const noexcept { return mImpl->getTensorFormat(name); }
    Dims getProfileShape(char const* name, int32_t profile, OptProfileSelector select) const noexcept
    {
        return mImpl->getProfileShape(name, profile, select);
    }
    int32_t getNbOptimizationProfiles() const noexcept { return mImpl->getNbOptimizationProfiles(); }
    int32_t getNbIOTensors() const noexcept { return mImpl->getNbIOTensors(); }
    char const* getIOTensorName(int32_t index) const noexcept { return mImpl->getIOTensorName(index); }
    IExecutionContext* createExecutionContext(
        ExecutionContextAllocationStrategy strategy = ExecutionContextAllocationStrategy::kSTATIC) noexcept
    {
        return mImpl->createExecutionContext(strategy);
    }

protected:
    apiv::VCudaEngine* mImpl;
};

class IRuntime : public INoCopy
{
public:
    virtual ~IRuntime() noexcept = default;
    ICudaEngine* deserializeCudaEngine(void const* blob, std::size_t size) noexcept
    {
        return mImpl->deserializeCudaEngine(blob, size);
    }
    void setEngineHostCodeAllowed(bool allowed) noexcept { mImpl->setEngineHostCodeAllowed(allowed); }

protected:
    apiv::VRuntime* mImpl;
};
} // namespace nvinfer1

extern "C" void* createInferRuntime_INTERNAL(void* logger, int32_t version) noexcept;
extern "C" int32_t getInferLibVersion() noexcept;

namespace nvinfer1
{
// In NVIDIA's header it lies in a namespace without a name, as it depends on the version that is compiled.
namespace
{
inline IRuntime* createInferRuntime(ILogger& logger) noexcept
{
    return static_cast<IRuntime*>(createInferRuntime_INTERNAL(&logger, NV_TENSORRT_VERSION));
}
} // namespace
} // namespace nvinfer1
