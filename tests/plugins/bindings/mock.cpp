// Stands for libnvinfer.so, libnvonnxparser.so and libnvinfer_plugin.so where plugins are concerned: the C symbols that
// the compiled bindings want, a plugin registry, and what a builder asks of a plugin, one C function for each step
// (mock.py calls them). No network is built and no kernel runs.
#include "registry.h"

#include <cstring>

using namespace nvinfer1;
using namespace mock;

namespace
{
// One plugin on its way through the builder.
struct Plugin
{
    IPluginV3* handle;
    IPluginV3QuickCore* core;
    IPluginV3QuickAOTBuild* build;
    std::string kinds, kernel;
    std::vector<DimsExprs> in, out;
    std::vector<DataType> types; // of inputs, then of outputs
    std::vector<int32_t> ranks;
    std::vector<Expression*> symbols; // of getOutputShapes
    std::vector<DynamicPluginTensorDesc> io;
    std::vector<PluginTensorDesc> combinations;
    LaunchParams* params{};
    ExtraArguments* extra{};

    explicit Plugin(IPluginV3* plugin) : handle(plugin)
    {
        kinds = plugin->getInterfaceInfo().kind;
        IPluginCapability* found[2];
        for (auto type : {PluginCapabilityType::kCORE, PluginCapabilityType::kBUILD})
        {
            auto*& capability = found[static_cast<int32_t>(type)] = plugin->getCapabilityInterface(type);
            kinds += std::string("|") + (capability ? capability->getInterfaceInfo().kind : "none");
        }
        core = dynamic_cast<IPluginV3QuickCore*>(found[0]);
        build = dynamic_cast<IPluginV3QuickAOTBuild*>(found[1]);
    }
    int32_t inputs() const { return static_cast<int32_t>(in.size()); }
    int32_t outputs() const { return static_cast<int32_t>(out.size()); }
};

void set_dims(Dims& dims, DimsExprs const& from, int64_t (*value)(Expression const&))
{
    dims.nbDims = from.nbDims;
    for (int32_t i = 0; i < from.nbDims; ++i)
        dims.d[i] = value(*own(from.d[i]));
}

int64_t known(Expression const& e) { return e.kind == Expression::CONSTANT ? e.number : -1; }
int64_t least(Expression const& e) { return e.kind == Expression::CONSTANT ? e.number : 1; }
int64_t now(Expression const& e) { return e.value(); }
} // namespace

extern "C"
{
// ------------------------------------------------------------ what the compiled bindings want of the three libraries

IPluginRegistry* getPluginRegistry() noexcept { return registry; }
IPluginRegistry* getBuilderPluginRegistry(int32_t) noexcept { return registry; }
void* createInferBuilder_INTERNAL(void*, int32_t) noexcept { return nullptr; }
void* createInferRefitter_INTERNAL(void*, void*, int32_t) noexcept { return nullptr; }
void* createInferRuntime_INTERNAL(void*, int32_t) noexcept { return nullptr; }
void* createNvOnnxParser_INTERNAL(void*, void*, int32_t) noexcept { return nullptr; }
void* createNvOnnxParserRefitter_INTERNAL(void*, void*, int32_t) noexcept { return nullptr; }
int32_t getNvOnnxParserVersion() noexcept { return 0; }
bool initLibNvInferPlugins(void*, char const*) noexcept { return true; }

// ------------------------------------------------------------ what Python asks of this file

void mock_size(int32_t number, int64_t size) { sizes.at(number) = size; }
char const* mock_faults() { return faults.c_str(); }
char const* mock_called() { return called.c_str(); }
void mock_forget() { faults.clear(), called.clear(); }

int32_t mock_fields(char const* name, char const* space, char const** names, int32_t* types, int32_t room)
{
    auto* creator = creator_of(name, space);
    if (!creator)
        return -1;
    auto const* fields = creator->getFieldNames();
    for (int32_t i = 0; i < fields->nbFields && i < room; ++i)
    {
        names[i] = fields->fields[i].name;
        types[i] = static_cast<int32_t>(fields->fields[i].type);
    }
    return fields->nbFields;
}

Plugin* mock_create(char const* name, char const* space, int32_t count, PluginField const* fields)
{
    auto* creator = creator_of(name, space);
    PluginFieldCollection const collection{count, fields};
    auto const phase = TensorRTPhase::kBUILD;
    auto const request = QuickPluginCreationRequest::kSTRICT_AOT;
    auto* made = creator ? creator->createPlugin(name, space, &collection, phase, request) : nullptr;
    return made ? new Plugin(made) : nullptr;
}

Plugin* mock_clone(Plugin* p)
{
    auto* made = p->handle->clone();
    return made ? new Plugin(made) : nullptr;
}

char const* mock_kinds(Plugin* p) { return p->kinds.c_str(); }
char const* mock_name(Plugin* p, int32_t which)
{
    if (!p->core)
        return nullptr;
    if (which == 0)
        return p->core->getPluginName();
    return which == 1 ? p->core->getPluginVersion() : p->core->getPluginNamespace();
}
char const* mock_timing_cache_id(Plugin* p) { return p->build->getTimingCacheID(); }
char const* mock_metadata(Plugin* p) { return p->build->getMetadataString(); }
int32_t mock_aliased(Plugin* p, int32_t output) { return p->build->getAliasedInput(output); }

// The number of outputs; their types are written to `given`, behind those of the inputs.
int32_t mock_output_types(Plugin* p, int32_t inputs, int32_t* given, int32_t const* ranks)
{
    int32_t const outputs = p->build ? p->build->getNbOutputs() : -1;
    if (outputs < 0)
        return -1;
    p->in.resize(inputs);
    p->out.resize(outputs);
    p->types.resize(inputs + outputs);
    p->ranks.assign(ranks, ranks + inputs);
    std::memcpy(p->types.data(), given, inputs * sizeof(int32_t));
    if (p->build->getOutputDataTypes(p->types.data() + inputs, outputs, p->types.data(), p->ranks.data(), inputs))
        return -1;
    std::memcpy(given, p->types.data(), p->types.size() * sizeof(int32_t));
    return outputs;
}

// `dims` of all inputs, one behind the other; -k is the dynamic dim number k.
int32_t mock_output_shapes(Plugin* p, int64_t const* dims)
{
    auto* builder = new Builder;
    for (size_t i = 0; i < p->in.size(); ++i)
    {
        p->in[i].nbDims = p->ranks[i];
        for (int32_t j = 0; j < p->ranks[i]; ++j, ++dims)
            p->in[i].d[j] = builder->keep(*dims < 0 ? new Expression(Expression::DYNAMIC, -*dims)
                                                    : new Expression(Expression::CONSTANT, *dims));
    }
    if (p->build->getOutputShapes(p->in.data(), p->inputs(), nullptr, 0, p->out.data(), p->outputs(), *builder))
        return -1;
    p->symbols = builder->made;
    p->io.assign(p->in.size() + p->out.size(), DynamicPluginTensorDesc{});
    for (size_t i = 0; i < p->io.size(); ++i)
    {
        auto const& dims = i < p->in.size() ? p->in[i] : p->out[i - p->in.size()];
        p->io[i].desc.type = p->types[i];
        p->io[i].desc.scale = -1;
        set_dims(p->io[i].desc.dims, dims, known);
        set_dims(p->io[i].min, dims, least);
        set_dims(p->io[i].opt, dims, now);
        set_dims(p->io[i].max, dims, now);
    }
    builder->gone = true;
    set_gone(p->symbols, true);
    return 0;
}

// The rank of an output; its dims at the sizes that are set now.
int32_t mock_output_dims(Plugin* p, int32_t output, int64_t* dims)
{
    for (int32_t j = 0; j < p->out[output].nbDims; ++j)
        dims[j] = own(p->out[output].d[j])->value();
    return p->out[output].nbDims;
}

int32_t mock_combinations(Plugin* p)
{
    int32_t const count = p->build->getNbSupportedFormatCombinations(p->io.data(), p->inputs(), p->outputs());
    if (count < 0)
        return -1;
    p->combinations.assign(count * p->io.size(), PluginTensorDesc{});
    auto* to = p->combinations.data();
    return p->build->getSupportedFormatCombinations(p->io.data(), p->inputs(), p->outputs(), to, count) ? -1 : count;
}

void mock_combination(Plugin* p, int32_t index, int32_t* types, int32_t* formats)
{
    for (size_t i = 0; i < p->io.size(); ++i)
    {
        auto const& desc = p->combinations.at(index * p->io.size() + i);
        types[i] = static_cast<int32_t>(desc.type);
        formats[i] = static_cast<int32_t>(desc.format);
    }
}

// With the formats of one combination.
int32_t mock_configure(Plugin* p, int32_t index)
{
    for (size_t i = 0; i < p->io.size(); ++i)
        p->io[i].desc.format = p->combinations.at(index * p->io.size() + i).format;
    return p->build->configurePlugin(p->io.data(), p->inputs(), p->io.data() + p->in.size(), p->outputs());
}

int32_t mock_tactics(Plugin* p, int32_t* tactics, int32_t room)
{
    int32_t const count = p->build->getNbTactics();
    return count < 0 || count > room || p->build->getValidTactics(tactics, count) ? -1 : count;
}

// Launch parameters and kernel of a tactic; the number of extra arguments. The symbolic sizes of getOutputShapes are
// alive again for this call, as NVIDIA's Python layer gives a plugin no others here.
int32_t mock_launch(Plugin* p, int32_t tactic, char const** name, char const** kernel, int32_t* size)
{
    if (p->build->setTactic(tactic))
        return -1;
    auto* builder = new Builder;
    p->params = new LaunchParams;
    p->extra = new ExtraArguments;
    std::vector<DimsExprs> in = p->in;
    set_gone(p->symbols, false);
    int32_t const failed = p->build->getLaunchParams(
        in.data(), p->io.data(), p->inputs(), p->outputs(), p->params, p->extra, *builder);
    set_gone(p->symbols, true);
    builder->gone = true;
    std::vector<PluginTensorDesc> descs;
    for (auto const& io : p->io)
        descs.push_back(io.desc);
    char* found{};
    *size = 0;
    if (failed
        || p->build->getKernel(
            descs.data(), p->inputs(), descs.data() + p->in.size(), p->outputs(), name, &found, size))
        return -1;
    p->kernel.assign(found, *size);
    *kernel = p->kernel.data();
    return p->extra->getNbSymExprs();
}

// The seven launch parameters and then the extra arguments at the sizes that are set now; their kinds: 10 · type + data
// type, -1 where nothing was said.
void mock_values(Plugin* p, int64_t* values, int32_t* kinds)
{
    std::vector<Argument> all(p->params->held, p->params->held + 7);
    all.insert(all.end(), p->extra->held.begin(), p->extra->held.end());
    for (size_t i = 0; i < all.size(); ++i)
    {
        values[i] = all[i].expr ? all[i].expr->value() : -1;
        kinds[i] = all[i].expr ? 10 * all[i].type + all[i].kind : -1;
    }
}

// The fields of a tensor's description as the plugin gets them, made to differ from each other, for the probe.
void mock_mark(Plugin* p)
{
    int64_t next = 100;
    for (auto& io : p->io)
    {
        for (auto* dims : {&io.desc.dims, &io.min, &io.max, &io.opt})
            for (int32_t j = 0; j < dims->nbDims; ++j)
                dims->d[j] = next++;
        io.desc.scale = 0.5f + static_cast<float>(next);
    }
}
}
