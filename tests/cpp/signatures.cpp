// Compiled with NVIDIA's NvInferRuntime.h and with ours: every name that ours declares for programs is there with this
// type and value, so that a program compiles alike with both.
#include <NvInferRuntime.h>
#include <type_traits>

using namespace nvinfer1;

#define SIGNATURE(type, name, result, ...) \
    static_assert(static_cast<result(type::*) __VA_ARGS__>(&type::name) != nullptr)

SIGNATURE(IRuntime, deserializeCudaEngine, ICudaEngine*, (void const*, std::size_t) noexcept);
SIGNATURE(IRuntime, setEngineHostCodeAllowed, void, (bool) noexcept);
SIGNATURE(ICudaEngine, getTensorShape, Dims, (char const*) const noexcept);
SIGNATURE(ICudaEngine, getTensorDataType, DataType, (char const*) const noexcept);
SIGNATURE(ICudaEngine, getTensorLocation, TensorLocation, (char const*) const noexcept);
SIGNATURE(ICudaEngine, getTensorIOMode, TensorIOMode, (char const*) const noexcept);
SIGNATURE(ICudaEngine, getTensorFormat, TensorFormat, (char const*) const noexcept);
SIGNATURE(ICudaEngine, getProfileShape, Dims, (char const*, int32_t, OptProfileSelector) const noexcept);
SIGNATURE(ICudaEngine, getNbOptimizationProfiles, int32_t, () const noexcept);
SIGNATURE(ICudaEngine, getNbIOTensors, int32_t, () const noexcept);
SIGNATURE(ICudaEngine, getIOTensorName, char const*, (int32_t) const noexcept);
SIGNATURE(ICudaEngine, createExecutionContext, IExecutionContext*, (ExecutionContextAllocationStrategy) noexcept);
SIGNATURE(IExecutionContext, setOptimizationProfileAsync, bool, (int32_t, cudaStream_t) noexcept);
SIGNATURE(IExecutionContext, setInputShape, bool, (char const*, Dims const&) noexcept);
SIGNATURE(IExecutionContext, getTensorShape, Dims, (char const*) const noexcept);
SIGNATURE(IExecutionContext, setTensorAddress, bool, (char const*, void*) noexcept);
SIGNATURE(IExecutionContext, inferShapes, int32_t, (int32_t, char const**) noexcept);
SIGNATURE(IExecutionContext, enqueueV3, bool, (cudaStream_t) noexcept);
SIGNATURE(ILogger, log, void, (ILogger::Severity, char const*) noexcept);

static_assert(std::is_same_v<decltype(createInferRuntime), IRuntime*(ILogger&) noexcept>);
static_assert(std::is_same_v<decltype(createInferRuntime_INTERNAL), void*(void*, int32_t) noexcept>);
static_assert(std::is_same_v<decltype(getInferLibVersion), int32_t() noexcept>);

template <class Enum>
constexpr bool is(Enum value, int32_t number)
{
    return std::is_same_v<std::underlying_type_t<Enum>, int32_t> && static_cast<int32_t>(value) == number;
}

static_assert(is(DataType::kFLOAT, 0) && is(DataType::kHALF, 1) && is(DataType::kINT8, 2) && is(DataType::kINT32, 3));
static_assert(is(DataType::kBOOL, 4) && is(DataType::kUINT8, 5) && is(DataType::kFP8, 6) && is(DataType::kBF16, 7));
static_assert(is(DataType::kINT64, 8));
static_assert(is(TensorIOMode::kNONE, 0) && is(TensorIOMode::kINPUT, 1) && is(TensorIOMode::kOUTPUT, 2));
static_assert(is(TensorLocation::kDEVICE, 0) && is(TensorLocation::kHOST, 1) && is(TensorFormat::kLINEAR, 0));
static_assert(is(OptProfileSelector::kMIN, 0) && is(OptProfileSelector::kOPT, 1) && is(OptProfileSelector::kMAX, 2));
static_assert(is(ExecutionContextAllocationStrategy::kSTATIC, 0) && is(APILanguage::kCPP, 0));
static_assert(is(ILogger::Severity::kINTERNAL_ERROR, 0) && is(ILogger::Severity::kERROR, 1));
static_assert(is(ILogger::Severity::kWARNING, 2) && is(ILogger::Severity::kINFO, 3));
static_assert(is(ILogger::Severity::kVERBOSE, 4));

static_assert(std::is_same_v<Dims, Dims64> && Dims::MAX_DIMS == 8 && sizeof(Dims) == 72 && offsetof(Dims, d) == 8);
// from TensorRT 11 on; an application's logger is compiled against it, so that both have to be of one major version
static_assert(std::is_base_of_v<IVersionedInterface, ILogger> == (NV_TENSORRT_MAJOR >= 11));
static_assert(sizeof(ILogger) == 8 && sizeof(IRuntime) == 16 && sizeof(ICudaEngine) == 16);
static_assert(sizeof(IExecutionContext) == 16);
static_assert(NV_TENSORRT_VERSION == NV_TENSORRT_MAJOR * 10000L + NV_TENSORRT_MINOR * 100L + NV_TENSORRT_PATCH);
