// Loads a TensorRT engine, runs it and writes its outputs: no Python, and no library of normdeploy, whose kernels lie
// in the engine. How to build and use it: docs/reference/cpp.md.
#include "tensors.h"

#include <NvInferRuntime.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <iomanip>
#include <iostream>
#include <memory>

namespace trt = nvinfer1;

std::map<trt::DataType, Type> const TYPES{ // NumPy has no bfloat16: in a .npy file it is two bytes, "<V2"
    {trt::DataType::kFLOAT, {"float32", "<f4", 4}}, {trt::DataType::kHALF, {"float16", "<f2", 2}},
    {trt::DataType::kBF16, {"bfloat16", "<V2", 2}}, {trt::DataType::kINT64, {"int64", "<i8", 8}},
    {trt::DataType::kINT32, {"int32", "<i4", 4}},   {trt::DataType::kINT8, {"int8", "|i1", 1}},
    {trt::DataType::kUINT8, {"uint8", "|u1", 1}},   {trt::DataType::kBOOL, {"bool", "|b1", 1}}};

// ---------------------------------------------------------------- every call is checked, nothing is left behind

void check(cudaError_t code, char const* call)
{
    if (code != cudaSuccess)
        throw Failure(std::string("CUDA: ") + call + ": " + cudaGetErrorString(code));
}

void check(bool done, std::string const& call)
{
    if (!done)
        throw Failure("TensorRT: " + call + " failed; what TensorRT says of it stands above");
}

template <auto destroy>
struct Destroy
{
    template <class T>
    void operator()(T* made) const
    {
        destroy(made);
    }
};
using Memory = std::unique_ptr<void, Destroy<cudaFree>>;
using Stream = std::unique_ptr<CUstream_st, Destroy<cudaStreamDestroy>>;
using Event = std::unique_ptr<CUevent_st, Destroy<cudaEventDestroy>>;

// What a function such as cudaEventCreate makes, in its owner.
template <class Owner, class Create, class... Rest>
Owner made(char const* call, Create create, Rest... rest)
{
    typename Owner::pointer pointer{};
    check(create(&pointer, rest...), call);
    return Owner{pointer};
}

struct Logger : trt::ILogger
{
    void log(Severity severity, char const* message) noexcept override
    {
        if (severity <= Severity::kWARNING)
            std::cerr << "TensorRT: " << message << std::endl;
    }
};

// ---------------------------------------------------------------- the engine

// Only engines with NVIDIA's own plugins need this. Ours were compiled ahead of time and registered when the engine was
// built; it holds their kernels and names no plugin.
void registerNvidiaPlugins(Logger& logger)
{
    auto const library = "libnvinfer_plugin.so." + std::to_string(NV_TENSORRT_MAJOR);
    auto* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL); // stays open as long as the program runs
    auto* const init = handle ? dlsym(handle, "initLibNvInferPlugins") : nullptr;
    if (!init)
        throw Failure(std::string("--nvidia-plugins: ") + dlerror());
    check(reinterpret_cast<bool (*)(void*, char const*)>(init)(&logger, ""), "initLibNvInferPlugins");
}

std::string version()
{
    auto const all = getInferLibVersion();
    return std::to_string(all / 10000) + "." + std::to_string(all / 100 % 100) + "." + std::to_string(all % 100);
}

std::unique_ptr<trt::ICudaEngine> load(trt::IRuntime& runtime, std::string const& path)
{
    auto const plan = readFile(path);
    std::unique_ptr<trt::ICudaEngine> engine{runtime.deserializeCudaEngine(plan.data(), plan.size())};
    if (!engine)
        throw Failure(path + ": TensorRT " + version() + " can't load it; its words stand above. The engine needs\n"
            "  the version that built it (or a newer one: build --version-compatible, then run_engine --host-code),\n"
            "  the kind of GPU that it was built for, and all of its bytes (" + std::to_string(plan.size()) +
            " were read);\n  engines of TensorRT-RTX need TensorRT-RTX");
    return engine;
}

Shape toShape(trt::Dims const& dims) { return {dims.d, dims.d + std::max(dims.nbDims, 0)}; }

std::vector<Tensor> tensorsOf(trt::ICudaEngine const& engine)
{
    std::vector<Tensor> tensors;
    for (int32_t i = 0; i < engine.getNbIOTensors(); ++i)
    {
        char const* const name = engine.getIOTensorName(i);
        auto const type = TYPES.find(engine.getTensorDataType(name));
        if (type == TYPES.end() || engine.getTensorFormat(name) != trt::TensorFormat::kLINEAR)
            throw Failure(std::string(name) + ": has a type or a format that this program does not know");
        if (engine.getTensorLocation(name) != trt::TensorLocation::kDEVICE)
            throw Failure(std::string(name) + ": lies in host memory (a shape), which this program does not handle");
        bool const input = engine.getTensorIOMode(name) == trt::TensorIOMode::kINPUT;
        tensors.push_back({name, input, type->second, {type->second.npy, toShape(engine.getTensorShape(name)), {}}});
    }
    return tensors;
}

// The first profile that takes the shapes of all inputs.
int32_t profileOf(trt::ICudaEngine const& engine, std::vector<Tensor> const& tensors)
{
    std::string reasons;
    for (int32_t profile = 0; profile < engine.getNbOptimizationProfiles(); ++profile)
    {
        bool takes = true;
        for (auto const& tensor : tensors)
        {
            if (!tensor.input)
                continue;
            auto const range = [&](trt::OptProfileSelector end) {
                return toShape(engine.getProfileShape(tensor.name.c_str(), profile, end));
            };
            auto const least = range(trt::OptProfileSelector::kMIN), most = range(trt::OptProfileSelector::kMAX);
            auto const& shape = tensor.array.shape;
            auto const within = [](Shape const& a, Shape const& b) {
                return std::equal(a.begin(), a.end(), b.begin(), b.end(), std::less_equal<>());
            };
            if (within(least, shape) && within(shape, most))
                continue;
            takes = false;
            reasons += "\n  profile " + std::to_string(profile) + " takes " + tensor.name + " of " + text(least) +
                " to " + text(most) + ", not of " + text(shape);
        }
        if (takes)
            return profile;
    }
    throw Failure("the inputs' shapes do not fit; pass shapes with --shape NAME=4x8:" + reasons);
}

// Gives the inputs their shapes and values; the profile that takes them.
int32_t setInputs(trt::ICudaEngine const& engine, std::vector<Tensor>& tensors, Options const& options)
{
    auto const expect = [&](std::string const& option, std::string const& name) {
        auto const same = [&](Tensor const& tensor) { return tensor.input && tensor.name == name; };
        if (std::none_of(tensors.begin(), tensors.end(), same))
            throw Failure(option + ": the engine has no input " + name);
    };
    for (auto const& [name, shape] : options.shapes)
        expect("--shape", name);
    for (auto const& [name, file] : options.inputs)
        expect("--input", name);
    for (auto& tensor : tensors)
        if (tensor.input)
            setShape(tensor, options);
    auto const profile = profileOf(engine, tensors);
    std::mt19937 random(options.seed);
    for (auto& tensor : tensors)
        if (tensor.input)
            setValues(tensor, options, random);
    return profile;
}

// ---------------------------------------------------------------- a run

void setShapes(trt::IExecutionContext& context, std::vector<Tensor>& tensors)
{
    for (auto const& tensor : tensors)
        if (auto const& shape = tensor.array.shape; tensor.input)
        {
            trt::Dims dims{static_cast<int32_t>(shape.size()), {}};
            std::copy(shape.begin(), shape.end(), dims.d);
            check(context.setInputShape(tensor.name.c_str(), dims), "setInputShape of " + tensor.name);
        }
    check(context.inferShapes(0, nullptr) == 0, "inferShapes");
    for (auto& tensor : tensors)
        if (auto& shape = tensor.array.shape; !tensor.input)
        {
            shape = toShape(context.getTensorShape(tensor.name.c_str()));
            if (std::count(shape.begin(), shape.end(), -1))
                throw Failure(tensor.name + ": its size depends on the values, which this program does not handle");
            tensor.array.bytes.resize(bytesOf(tensor));
        }
}

// Copies the inputs to the GPU, runs once, and copies the outputs back. The memory on the GPU, which later runs need.
std::vector<Memory> run(trt::IExecutionContext& context, cudaStream_t stream, std::vector<Tensor>& tensors)
{
    std::vector<Memory> memory; // cudaMalloc aligns it to 256 bytes, as TensorRT wants it
    for (auto const& tensor : tensors)
    {
        auto const& bytes = tensor.array.bytes;
        auto const allocate = [](void** pointer, std::size_t size) { return cudaMalloc(pointer, size); };
        memory.push_back(made<Memory>("cudaMalloc", allocate, std::max<std::size_t>(bytes.size(), 1)));
        auto* const address = memory.back().get();
        check(context.setTensorAddress(tensor.name.c_str(), address), "setTensorAddress of " + tensor.name);
        if (tensor.input)
            check(cudaMemcpyAsync(address, bytes.data(), bytes.size(), cudaMemcpyHostToDevice, stream),
                "cudaMemcpyAsync to the GPU");
    }
    check(context.enqueueV3(stream), "enqueueV3");
    for (std::size_t i = 0; i < tensors.size(); ++i)
        if (auto& bytes = tensors[i].array.bytes; !tensors[i].input)
            check(cudaMemcpyAsync(bytes.data(), memory[i].get(), bytes.size(), cudaMemcpyDeviceToHost, stream),
                "cudaMemcpyAsync from the GPU");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    return memory;
}

// Writes the outputs, then prints a line for each tensor.
void report(std::vector<Tensor> const& tensors, int32_t profile, Options const& options)
{
    std::size_t width = 0;
    std::vector<std::string> files; // of each tensor, or what stands for one
    for (auto const& tensor : tensors)
    {
        width = std::max(width, tensor.name.size());
        auto const file = options.inputs.find(tensor.name);
        auto const drawn = "drawn with seed " + std::to_string(options.seed);
        files.push_back(!tensor.input ? write(tensor, options) : file == options.inputs.end() ? drawn : file->second);
    }
    std::cout << options.engine << ": TensorRT " << version() << ", profile " << profile << "\n" << std::left;
    for (std::size_t i = 0; i < tensors.size(); ++i)
        std::cout << std::setw(8) << (tensors[i].input ? "input" : "output") << std::setw(static_cast<int>(width))
                  << tensors[i].name << "  " << std::setw(8) << tensors[i].type.name << "  "
                  << text(tensors[i].array.shape) << "  " << files[i] << "\n";
}

void measure(trt::IExecutionContext& context, cudaStream_t stream, int64_t repeat)
{
    auto const begin = made<Event>("cudaEventCreate", cudaEventCreate);
    auto const end = made<Event>("cudaEventCreate", cudaEventCreate);
    check(cudaEventRecord(begin.get(), stream), "cudaEventRecord");
    for (int64_t i = 0; i < repeat; ++i)
        check(context.enqueueV3(stream), "enqueueV3");
    check(cudaEventRecord(end.get(), stream), "cudaEventRecord");
    check(cudaEventSynchronize(end.get()), "cudaEventSynchronize");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()), "cudaEventElapsedTime");
    std::cout << milliseconds / static_cast<float>(repeat) << " ms a run, mean of " << repeat << "\n";
}

void runEngine(Options const& options)
{
    Logger logger; // each of these outlives those below it
    if (options.nvidiaPlugins)
        registerNvidiaPlugins(logger);
    std::unique_ptr<trt::IRuntime> const runtime{trt::createInferRuntime(logger)};
    check(runtime != nullptr, "createInferRuntime");
    if (options.hostCode)
        runtime->setEngineHostCodeAllowed(true);
    auto const engine = load(*runtime, options.engine);
    auto tensors = tensorsOf(*engine);
    auto const profile = setInputs(*engine, tensors, options);

    std::unique_ptr<trt::IExecutionContext> const context{engine->createExecutionContext()};
    check(context != nullptr, "createExecutionContext");
    auto const stream = made<Stream>("cudaStreamCreate", cudaStreamCreate);
    if (profile != 0)
        check(context->setOptimizationProfileAsync(profile, stream.get()), "setOptimizationProfileAsync");
    setShapes(*context, tensors);
    auto const memory = run(*context, stream.get(), tensors);
    report(tensors, profile, options);
    if (options.repeat > 0)
        measure(*context, stream.get(), options.repeat);
}

// ---------------------------------------------------------------- from the command line

int main(int argc, char** argv)
{
    try
    {
        runEngine(parsed({argv + 1, argv + argc}));
        return 0;
    }
    catch (Usage const& error)
    {
        std::cerr << "error: " << error.what() << "\n" << USAGE;
        return 2;
    }
    catch (std::exception const& error)
    {
        std::cerr << "error: " << error.what() << "\n";
        return 1;
    }
}
