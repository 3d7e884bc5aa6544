// Stands for libnvinfer: reads plans of its own, each of one small engine, x[rows, 4] to y[rows, 4]: y is 2x + 1 in
// float32, and x in other types. Compiled with our header (include/), so that programs compiled with NVIDIA's run over
// it only if the two have one layout.
#include "stub.h"

#include <NvInferRuntime.h>
#include <algorithm>
#include <map>
#include <string>
#include <vector>

using namespace nvinfer1;

namespace
{
constexpr int32_t VERSION = NV_TENSORRT_VERSION, COLUMNS = 4, ROWS = 8; // profile 0: 1 to 8 rows, 1: 9 to 16, …

enum Flag { HOST_CODE = 1, NVIDIA_PLUGIN = 2, SHAPE_TENSOR = 4, SIZED_BY_VALUES = 8, VECTORIZED = 16, STATIC = 32 };

struct Plan
{
    char magic[4];
    int32_t version, size, type, profiles, flags;
};

ILogger* theLogger;

template <class T>
T* failed(std::string const& reason, T* none = nullptr)
{
    theLogger->log(ILogger::Severity::kERROR, reason.c_str());
    return none;
}

bool refused(std::string const& reason) { return failed<void>(reason) != nullptr; }

struct Context : IExecutionContext, apiv::VExecutionContext
{
    Plan plan;
    int32_t profile{};
    int64_t rows{-1};
    std::map<std::string, char*> addresses;
    ICudaEngine const& engine;
    int& contexts;

    Context(Plan const& p, ICudaEngine const& of, int& count) : plan(p), engine(of), contexts(count)
    {
        mImpl = this;
        ++contexts;
        alive(1);
    }
    ~Context() noexcept override
    {
        --contexts;
        alive(-1);
    }
    ICudaEngine const& getEngine() const noexcept override { return engine; }
    bool setOptimizationProfileAsync(int32_t index, cudaStream_t) noexcept override
    {
        if (fails("setOptimizationProfileAsync") || index >= plan.profiles)
            return refused("there is no such profile");
        profile = index;
        return true;
    }
    bool setInputShape(char const* name, Dims const& dims) noexcept override
    {
        bool const fits = std::string(name) == "x" && dims.nbDims == 2 && dims.d[1] == COLUMNS
            && dims.d[0] > profile * ROWS && dims.d[0] <= (profile + 1) * ROWS;
        if (fails("setInputShape") || !fits)
            return refused("setInputShape: x is not within the profile");
        rows = dims.d[0];
        return true;
    }
    Dims getTensorShape(char const* name) const noexcept override
    {
        return {2, {*name == 'y' && plan.flags & SIZED_BY_VALUES ? -1 : rows, COLUMNS}};
    }
    bool setTensorAddress(char const* name, void* data) noexcept override
    {
        if (fails("setTensorAddress") || reinterpret_cast<std::size_t>(data) % 256 != 0)
            return refused("setTensorAddress: " + std::string(name) + " is not aligned to 256 bytes");
        addresses[name] = static_cast<char*>(data);
        return true;
    }
    int32_t inferShapes(int32_t room, char const** names) noexcept override
    {
        if (rows < 0 && room > 0)
            names[0] = "x";
        return fails("inferShapes") ? -1 : rows < 0;
    }
    bool enqueueV3(cudaStream_t stream) noexcept override
    {
        if (fails("enqueueV3") || rows < 0 || !addresses["x"] || !addresses["y"])
            return refused("enqueueV3: x or y has no address");
        auto const type = static_cast<DataType>(plan.type);
        bool const four = type == DataType::kFLOAT || type == DataType::kINT32;
        std::size_t const wide = type == DataType::kINT64 ? 8 : four ? 4 : 2;
        std::vector<float> values(static_cast<std::size_t>(rows) * COLUMNS);
        auto const size = values.size() * wide;
        auto *const x = addresses["x"], *const y = addresses["y"];
        auto const copy = [=] { std::memmove(y, x, size); };
        auto const compute = [=]() mutable {
            std::memcpy(values.data(), x, size);
            for (auto& value : values)
                value = 2 * value + 1;
            std::memcpy(y, values.data(), size);
        };
        type == DataType::kFLOAT ? later(stream, compute, true) : later(stream, copy, true);
        return true;
    }
};

struct Engine : ICudaEngine, apiv::VCudaEngine
{
    Plan plan;
    int& engines;
    int contexts{};

    Engine(Plan const& p, int& count) : plan(p), engines(count)
    {
        mImpl = this;
        ++engines;
        alive(1);
    }
    ~Engine() noexcept override
    {
        if (contexts != 0)
            std::abort(); // a context must not outlive its engine
        --engines;
        alive(-1);
    }
    IExecutionContext* createExecutionContext(ExecutionContextAllocationStrategy) noexcept override
    {
        return fails("createExecutionContext") ? failed<Context>("no memory") : new Context(plan, *this, contexts);
    }
    int32_t getNbOptimizationProfiles() const noexcept override { return plan.profiles; }
    Dims getTensorShape(char const*) const noexcept override { return {2, {plan.flags & STATIC ? ROWS : -1, COLUMNS}}; }
    DataType getTensorDataType(char const*) const noexcept override { return static_cast<DataType>(plan.type); }
    TensorLocation getTensorLocation(char const* name) const noexcept override
    {
        return *name == 'x' && plan.flags & SHAPE_TENSOR ? TensorLocation::kHOST : TensorLocation::kDEVICE;
    }
    TensorIOMode getTensorIOMode(char const* name) const noexcept override
    {
        return *name == 'x' ? TensorIOMode::kINPUT : TensorIOMode::kOUTPUT;
    }
    TensorFormat getTensorFormat(char const*) const noexcept override
    {
        return static_cast<TensorFormat>(plan.flags & VECTORIZED ? 1 : 0);
    }
    Dims getProfileShape(char const*, int32_t profile, OptProfileSelector select) const noexcept override
    {
        bool const most = select == OptProfileSelector::kMAX || plan.flags & STATIC;
        int64_t const rows = most ? ROWS : select == OptProfileSelector::kMIN ? 1 : ROWS / 2;
        return {2, {profile * ROWS + rows, COLUMNS}};
    }
    int32_t getNbIOTensors() const noexcept override { return 2; }
    char const* getIOTensorName(int32_t index) const noexcept override { return index == 0 ? "x" : "y"; }
};

struct Runtime : IRuntime, apiv::VRuntime
{
    bool hostCode{};
    int engines{};

    Runtime()
    {
        mImpl = this;
        alive(1);
    }
    ~Runtime() noexcept override
    {
        if (engines != 0)
            std::abort(); // an engine must not outlive its runtime
        alive(-1);
    }
    ICudaEngine* deserializeCudaEngine(void const* blob, std::size_t size) noexcept override
    {
        Plan plan{};
        std::memcpy(&plan, blob, std::min(size, sizeof plan));
        if (std::memcmp(plan.magic, "stub", 4) != 0)
            return failed<Engine>("Serialization assertion failed: magic tag does not match");
        if (plan.version != VERSION)
            return failed<Engine>("Version tag does not match: " + std::to_string(plan.version));
        if (size != static_cast<std::size_t>(plan.size))
            return failed<Engine>("the plan has another size than it says");
        if (plan.flags & HOST_CODE && !hostCode)
            return failed<Engine>("the plan holds host code, which is not allowed");
        if (plan.flags & NVIDIA_PLUGIN && !std::getenv("STUB_PLUGINS"))
            return failed<Engine>("getPluginCreator could not find plugin");
        return new Engine(plan, engines);
    }
    void setEngineHostCodeAllowed(bool allowed) noexcept override { hostCode = allowed; }
};
} // namespace

extern "C" int32_t getInferLibVersion() noexcept { return VERSION; }

extern "C" void* createInferRuntime_INTERNAL(void* logger, int32_t version) noexcept
{
    theLogger = static_cast<ILogger*>(logger);
    if (fails("createInferRuntime") || version / 10000 != NV_TENSORRT_MAJOR)
        return failed<Runtime>("the program was compiled for another TensorRT, or there is no driver");
    return static_cast<IRuntime*>(new Runtime);
}
