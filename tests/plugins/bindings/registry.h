// The plugin registry as the library would have it, which says what was called.
#pragma once
#include "symbols.h"

#include <map>

namespace mock
{
inline std::string called; // of the registry's functions, in order, for the probe

struct Registry : IPluginRegistry
{
    std::map<std::string, IPluginCreatorInterface*> creators;
    std::vector<IPluginCreatorInterface*> all;
    bool parents{true};

    static std::string key(char const* name, char const* version, char const* space)
    {
        return std::string(space) + "::" + name + "/" + version;
    }
#if LAYOUT_MAJOR < 11
    bool registerCreator(IPluginCreator&, char const*) noexcept override
    {
        return called += "registerCreatorV1 ", false;
    }
    IPluginCreator* const* getPluginCreatorList(int32_t* count) const noexcept override
    {
        called += "getPluginCreatorList ";
        *count = 0;
        return nullptr;
    }
    IPluginCreator* getPluginCreator(char const*, char const*, char const*) noexcept override
    {
        return called += "getPluginCreator ", nullptr;
    }
    bool deregisterCreator(IPluginCreator const&) noexcept override { return called += "deregisterCreatorV1 ", false; }
#endif
    void setErrorRecorder(IErrorRecorder*) noexcept override { called += "setErrorRecorder "; }
    IErrorRecorder* getErrorRecorder() const noexcept override { return called += "getErrorRecorder ", nullptr; }
    bool isParentSearchEnabled() const override { return called += "isParentSearchEnabled ", parents; }
    void setParentSearchEnabled(bool enabled) override { called += "setParentSearchEnabled ", parents = enabled; }
    void* loadLibrary(char const* path) noexcept override
    {
        return called += std::string("loadLibrary:") + path + " ", nullptr;
    }
    void deregisterLibrary(void*) noexcept override { called += "deregisterLibrary "; }
    bool registerCreator(IPluginCreatorInterface& creator, char const* space) noexcept override
    {
        called += "registerCreator ";
        auto* quick = dynamic_cast<IPluginCreatorV3Quick*>(&creator);
        if (!quick)
            return fault("the creator is no IPluginCreatorV3Quick"), false;
        all.push_back(&creator);
        return creators.emplace(key(quick->getPluginName(), quick->getPluginVersion(), space), &creator).second;
    }
    IPluginCreatorInterface* const* getAllCreators(int32_t* count) const noexcept override
    {
        called += "getAllCreators ";
        *count = static_cast<int32_t>(all.size());
        return all.data();
    }
    IPluginCreatorInterface* getCreator(char const* name, char const* version, char const* space) noexcept override
    {
        called += "getCreator ";
        auto const found = creators.find(key(name, version, space));
        return found == creators.end() ? nullptr : found->second;
    }
    bool deregisterCreator(IPluginCreatorInterface const& creator) noexcept override
    {
        called += "deregisterCreator ";
        for (auto const& [name, held] : creators)
            if (held == &creator)
                return creators.erase(name), true;
        return false;
    }
    IPluginResource* acquirePluginResource(char const* key, IPluginResource*) noexcept override
    {
        return called += std::string("acquirePluginResource:") + key + " ", nullptr;
    }
    int32_t releasePluginResource(char const* key) noexcept override
    {
        return called += std::string("releasePluginResource:") + key + " ", 5;
    }
    IPluginCreatorInterface* const* getAllCreatorsRecursive(int32_t* count) noexcept override
    {
        called += "Recursive:";
        return getAllCreators(count);
    }
};

inline Registry* const registry = new Registry; // never freed: Python objects are behind it

inline IPluginCreatorV3Quick* creator_of(char const* name, char const* space)
{
    return dynamic_cast<IPluginCreatorV3Quick*>(registry->getCreator(name, "1", space));
}
} // namespace mock
