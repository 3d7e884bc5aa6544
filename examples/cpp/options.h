// The command line of run_engine.
#pragma once
#include "npy.h"

#include <map>
#include <utility>

char const* const USAGE = R"(run_engine ENGINE [options]
  --shape NAME=4x8   the shape of a dynamic input
  --input NAME=FILE  its values: a .npy file, which also tells the shape, or raw bytes; else they are drawn
  --output FOLDER    write the outputs there, as NAME.npy
  --raw              write them as raw bytes, NAME.raw
  --seed N           of the values that are drawn (0)
  --repeat N         runs that are timed (10)
  --host-code        allow the code that a version-compatible engine brings along
  --nvidia-plugins   register the plugins of libnvinfer_plugin
)";

struct Options
{
    std::string engine, output;
    std::map<std::string, Shape> shapes;
    std::map<std::string, std::string> inputs;
    bool raw = false, hostCode = false, nvidiaPlugins = false;
    uint32_t seed = 0;
    int64_t repeat = 10;
};

struct Usage : Failure
{
    using Failure::Failure;
};

inline int64_t number(std::string const& given)
{
    if (given.empty() || given.size() > 9 || given.find_first_not_of("0123456789") != std::string::npos)
        throw Usage("'" + given + "' is no whole number below a billion");
    return std::stoll(given);
}

inline Shape shapeOf(std::string const& given)
{
    Shape shape;
    for (std::size_t at = 0, end = 0; end != std::string::npos; at = end + 1)
    {
        end = given.find('x', at);
        shape.push_back(number(given.substr(at, end - at)));
    }
    return shape;
}

inline Options parsed(std::vector<std::string> const& arguments)
{
    Options options;
    for (auto next = arguments.begin(); next != arguments.end(); ++next)
    {
        auto const option = *next;
        auto const value = [&] {
            if (++next == arguments.end())
                throw Usage(option + ": a value is missing");
            return *next;
        };
        auto const named = [&] {
            auto const given = value();
            auto const at = given.find('=');
            if (at == std::string::npos)
                throw Usage(option + " " + given + ": NAME= is missing");
            return std::pair{given.substr(0, at), given.substr(at + 1)};
        };
        if (option == "--shape")
        {
            auto const [name, shape] = named();
            options.shapes[name] = shapeOf(shape);
        }
        else if (option == "--input")
            options.inputs.insert(named());
        else if (option == "--output")
            options.output = value();
        else if (option == "--seed")
            options.seed = static_cast<uint32_t>(number(value()));
        else if (option == "--repeat")
            options.repeat = number(value());
        else if (option == "--raw")
            options.raw = true;
        else if (option == "--host-code")
            options.hostCode = true;
        else if (option == "--nvidia-plugins")
            options.nvidiaPlugins = true;
        else if (option.rfind("--", 0) == 0 || !options.engine.empty())
            throw Usage(option + ": is no option");
        else
            options.engine = option;
    }
    if (options.engine.empty())
        throw Usage("no engine is given");
    return options;
}
