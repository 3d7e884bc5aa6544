// What NVIDIA's compiled bindings (the wheel tensorrt_cu13_bindings) and libnvinfer know of each other as far as plugins
// go: virtual functions in the order of the vtable, data members in the order of memory. Declared here as the public
// headers of TensorRT 10.9 to 11.1 describe them, so that nothing of TensorRT is needed to compile. One thing changed
// between these releases: from 11 on the registry has no functions for IPluginCreator (LAYOUT_MAJOR is the release
// meant). probe.py calls the functions here by their slots on every release, so that a wrong order is found.
#pragma once
#include <cstdint>

namespace nvinfer1
{
enum class DataType : int32_t {};
enum class TensorFormat : int32_t {};
enum class PluginFieldType : int32_t {};
enum class TensorRTPhase : int32_t { kBUILD = 0 };
enum class PluginCapabilityType : int32_t { kCORE = 0, kBUILD = 1, kRUNTIME = 2 };
enum class QuickPluginCreationRequest : int32_t { kSTRICT_AOT = 4 };
enum class APILanguage : int32_t {};
enum class PluginArgType : int32_t {};
enum class PluginArgDataType : int32_t {};
enum class DimensionOperation : int32_t { SUM, PROD, MAX, MIN, SUB, EQUAL, LESS, FLOOR_DIV, CEIL_DIV };

class IErrorRecorder;
class IPluginCreator;
class IPluginResource;

constexpr int32_t MAX_DIMS = 8;

struct InterfaceInfo
{
    char const* kind;
    int32_t major, minor;
};

class IVersionedInterface
{
public:
    virtual APILanguage getAPILanguage() const noexcept = 0;
    virtual InterfaceInfo getInterfaceInfo() const noexcept = 0;
    virtual ~IVersionedInterface() noexcept = default;
};

// ---------------------------------------------------------------- values

struct Dims
{
    int32_t nbDims;
    int64_t d[MAX_DIMS];
};

struct PluginTensorDesc
{
    Dims dims;
    DataType type;
    TensorFormat format;
    float scale;
};

struct DynamicPluginTensorDesc
{
    PluginTensorDesc desc;
    Dims min, max, opt;
};

struct PluginField
{
    char const* name;
    void const* data;
    PluginFieldType type;
    int32_t length;
};

struct PluginFieldCollection
{
    int32_t nbFields;
    PluginField const* fields;
};

// ---------------------------------------------------------------- symbolic sizes, which the library implements

class IDimensionExpr;

namespace apiv
{
class VRoot
{
public:
    virtual ~VRoot() noexcept = default;
};

class VDimensionExpr : public VRoot
{
public:
    virtual bool isConstant() const = 0;
    virtual int64_t getConstantValue() const = 0;
    virtual bool isSizeTensor() const = 0;
};

class VExprBuilder : public VRoot
{
public:
    virtual IDimensionExpr const* constant(int64_t value) = 0;
    virtual IDimensionExpr const* operation(
        DimensionOperation op, IDimensionExpr const& first, IDimensionExpr const& second)
        = 0;
    virtual IDimensionExpr const* declareSizeTensor(
        int32_t output, IDimensionExpr const& opt, IDimensionExpr const& upper)
        = 0;
};
} // namespace apiv

// the library's own classes: a vtable of the destructor alone, then a pointer to what implements them
class IDimensionExpr
{
public:
    virtual ~IDimensionExpr() noexcept = default;
    apiv::VDimensionExpr* mImpl{};
};

class IExprBuilder
{
public:
    virtual ~IExprBuilder() noexcept = default;
    apiv::VExprBuilder* mImpl{};
};

struct DimsExprs
{
    int32_t nbDims;
    IDimensionExpr const* d[MAX_DIMS];
};

// implemented by the bindings; the one interface without a destructor
class ISymExpr
{
public:
    virtual PluginArgType getType() const noexcept = 0;
    virtual PluginArgDataType getDataType() const noexcept = 0;
    virtual void* getExpr() noexcept = 0;
};

class ISymExprsImpl
{
public:
    virtual ISymExpr* getSymExpr(int32_t index) const noexcept = 0;
    virtual bool setSymExpr(int32_t index, ISymExpr* expr) noexcept = 0;
    virtual int32_t getNbSymExprs() const noexcept = 0;
    virtual bool setNbSymExprs(int32_t count) noexcept = 0;
    virtual ~ISymExprsImpl() noexcept = default;
};

class ISymExprs
{
public:
    ISymExprsImpl* mImpl{};
    virtual ~ISymExprs() noexcept = default;
};

#define LAUNCH_PARAMETERS(each) \
    each(GridX, 0) each(GridY, 1) each(GridZ, 2) each(BlockX, 3) each(BlockY, 4) each(BlockZ, 5) each(SharedMem, 6)

class IKernelLaunchParamsImpl
{
public:
#define DECLARE(name, index) \
    virtual ISymExpr* get##name() noexcept = 0; \
    virtual bool set##name(ISymExpr* expr) noexcept = 0;
    LAUNCH_PARAMETERS(DECLARE)
#undef DECLARE
    virtual ~IKernelLaunchParamsImpl() noexcept = default;
};

class IKernelLaunchParams
{
public:
    IKernelLaunchParamsImpl* mImpl{};
    virtual ~IKernelLaunchParams() noexcept = default;
};

// ---------------------------------------------------------------- plugins, which the bindings implement

namespace v_1_0
{
class IPluginCapability : public IVersionedInterface
{
};

class IPluginCreatorInterface : public IVersionedInterface
{
};

class IPluginV3 : public IVersionedInterface
{
public:
    virtual IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept = 0;
    virtual IPluginV3* clone() noexcept = 0;
};

class IPluginV3QuickCore : public IPluginCapability
{
public:
    virtual char const* getPluginName() const noexcept = 0;
    virtual char const* getPluginVersion() const noexcept = 0;
    virtual char const* getPluginNamespace() const noexcept = 0;
};

class IPluginV3QuickBuild : public IPluginCapability
{
public:
    virtual int32_t getOutputDataTypes(DataType* outputTypes, int32_t nbOutputs, DataType const* inputTypes,
        int32_t const* inputRanks, int32_t nbInputs) const noexcept = 0;
    virtual int32_t getOutputShapes(DimsExprs const* inputs, int32_t nbInputs, DimsExprs const* shapeInputs,
        int32_t nbShapeInputs, DimsExprs* outputs, int32_t nbOutputs, IExprBuilder& builder) noexcept = 0;
    virtual int32_t configurePlugin(DynamicPluginTensorDesc const* in, int32_t nbInputs,
        DynamicPluginTensorDesc const* out, int32_t nbOutputs) noexcept = 0;
    virtual int32_t getNbSupportedFormatCombinations(
        DynamicPluginTensorDesc const* inOut, int32_t nbInputs, int32_t nbOutputs) noexcept = 0;
    virtual int32_t getSupportedFormatCombinations(DynamicPluginTensorDesc const* inOut, int32_t nbInputs,
        int32_t nbOutputs, PluginTensorDesc* supported, int32_t count) noexcept = 0;
    virtual int32_t getNbOutputs() const noexcept = 0;
    virtual int32_t getAliasedInput(int32_t output) noexcept = 0;
    virtual int32_t getValidTactics(int32_t* tactics, int32_t count) noexcept = 0;
    virtual int32_t getNbTactics() noexcept = 0;
    virtual char const* getTimingCacheID() noexcept = 0;
    virtual char const* getMetadataString() noexcept = 0;
};

class IPluginV3QuickAOTBuild : public IPluginV3QuickBuild
{
public:
    virtual int32_t getLaunchParams(DimsExprs const* inputs, DynamicPluginTensorDesc const* inOut, int32_t nbInputs,
        int32_t nbOutputs, IKernelLaunchParams* params, ISymExprs* extra, IExprBuilder& builder) noexcept = 0;
    virtual int32_t getKernel(PluginTensorDesc const* in, int32_t nbInputs, PluginTensorDesc const* out,
        int32_t nbOutputs, char const** name, char** kernel, int32_t* size) noexcept = 0;
    virtual int32_t setTactic(int32_t tactic) noexcept = 0;
};

class IPluginCreatorV3Quick : public IPluginCreatorInterface
{
public:
    virtual IPluginV3* createPlugin(char const* name, char const* space, PluginFieldCollection const* fields,
        TensorRTPhase phase, QuickPluginCreationRequest request) noexcept = 0;
    virtual PluginFieldCollection const* getFieldNames() noexcept = 0;
    virtual char const* getPluginName() const noexcept = 0;
    virtual char const* getPluginVersion() const noexcept = 0;
    virtual char const* getPluginNamespace() const noexcept = 0;
};
} // namespace v_1_0
using namespace v_1_0;

// ---------------------------------------------------------------- the registry, which the library implements

class IPluginRegistry
{
public:
#if LAYOUT_MAJOR < 11
    virtual bool registerCreator(IPluginCreator& creator, char const* space) noexcept = 0;
    virtual IPluginCreator* const* getPluginCreatorList(int32_t* count) const noexcept = 0;
    virtual IPluginCreator* getPluginCreator(char const* name, char const* version, char const* space) noexcept = 0;
#endif
    virtual ~IPluginRegistry() noexcept = default;
    virtual void setErrorRecorder(IErrorRecorder* recorder) noexcept = 0;
    virtual IErrorRecorder* getErrorRecorder() const noexcept = 0;
#if LAYOUT_MAJOR < 11
    virtual bool deregisterCreator(IPluginCreator const& creator) noexcept = 0;
#endif
    virtual bool isParentSearchEnabled() const = 0;
    virtual void setParentSearchEnabled(bool enabled) = 0;
    virtual void* loadLibrary(char const* path) noexcept = 0;
    virtual void deregisterLibrary(void* handle) noexcept = 0;
    virtual bool registerCreator(IPluginCreatorInterface& creator, char const* space) noexcept = 0;
    virtual IPluginCreatorInterface* const* getAllCreators(int32_t* count) const noexcept = 0;
    virtual IPluginCreatorInterface* getCreator(char const* name, char const* version, char const* space) noexcept = 0;
    virtual bool deregisterCreator(IPluginCreatorInterface const& creator) noexcept = 0;
    virtual IPluginResource* acquirePluginResource(char const* key, IPluginResource* resource) noexcept = 0;
    virtual int32_t releasePluginResource(char const* key) noexcept = 0;
    virtual IPluginCreatorInterface* const* getAllCreatorsRecursive(int32_t* count) noexcept = 0;
};
} // namespace nvinfer1
