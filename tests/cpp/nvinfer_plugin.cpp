// Stands for libnvinfer_plugin: a plan that wants its plugins is told by the environment that they are there.
#include "stub.h"

extern "C" bool initLibNvInferPlugins(void* logger, char const* space)
{
    return !fails("initLibNvInferPlugins") && logger && space && setenv("STUB_PLUGINS", "1", 1) == 0;
}
