// Inputs and outputs in host memory: their shapes and values from the command line.
#pragma once
#include "options.h"

#include <cstring>
#include <functional>
#include <numeric>
#include <random>

struct Type
{
    char const *name, *npy;
    int64_t size;
};

struct Tensor
{
    std::string name;
    bool input;
    Type type;
    Array array; // in host memory
};

inline std::size_t bytesOf(Tensor const& tensor)
{
    auto const& shape = tensor.array.shape;
    return std::accumulate(shape.begin(), shape.end(), tensor.type.size, std::multiplies<>());
}

inline std::string text(Shape const& shape)
{
    std::string joined;
    for (auto size : shape)
        joined += (joined.empty() ? "" : "x") + (size < 0 ? "?" : std::to_string(size));
    return joined.empty() ? "scalar" : joined;
}

// The shape of an input, as it is told; values that a .npy file holds are read along with it.
inline void setShape(Tensor& tensor, Options const& options)
{
    auto const shape = options.shapes.find(tensor.name);
    auto const file = options.inputs.find(tensor.name);
    if (file != options.inputs.end() && isNpy(file->second))
    {
        tensor.array = readNpy(file->second);
        if (tensor.array.type != tensor.type.npy)
            throw Failure(file->second + ": holds " + tensor.array.type + ", but " + tensor.name + " is " +
                tensor.type.name + " (" + tensor.type.npy + ")");
        if (shape != options.shapes.end() && shape->second != tensor.array.shape)
            throw Failure(file->second + ": is " + text(tensor.array.shape) + ", not " + text(shape->second));
    }
    else if (shape != options.shapes.end())
        tensor.array.shape = shape->second;
}

// Multiples of 1/128 from -1 on, which every floating type holds exactly, so that a seed means the same values in all
// of them; of other types 0 and 1, which are indices into any table.
inline void draw(Tensor& tensor, std::mt19937& random)
{
    std::string const name = tensor.type.name;
    auto const size = static_cast<std::size_t>(tensor.type.size);
    for (std::size_t at = 0; at < tensor.array.bytes.size(); at += size)
    {
        auto const drawn = static_cast<uint32_t>(random() >> 24);
        float const value = (static_cast<float>(drawn) - 128) / 128;
        uint64_t bits = 0;
        std::memcpy(&bits, &value, sizeof value);
        if (name == "bfloat16")
            bits >>= 16;
        else if (name == "float16") // the first ten bits of the fraction; 112 is between the two types' exponents
            bits = value == 0 ? 0 : (bits >> 16 & 0x8000) | (((bits & 0x7fffffff) >> 13) - (112 << 10));
        else if (name != "float32")
            bits = drawn >> 7;
        std::memcpy(&tensor.array.bytes[at], &bits, size);
    }
}

inline void setValues(Tensor& tensor, Options const& options, std::mt19937& random)
{
    auto const file = options.inputs.find(tensor.name);
    if (file == options.inputs.end())
    {
        tensor.array.bytes.resize(bytesOf(tensor));
        draw(tensor, random);
    }
    else if (!isNpy(file->second))
        tensor.array.bytes = readFile(file->second);
    if (tensor.array.bytes.size() != bytesOf(tensor))
        throw Failure(file->second + ": has " + std::to_string(tensor.array.bytes.size()) + " bytes of values, but " +
            tensor.name + " of " + text(tensor.array.shape) + " takes " + std::to_string(bytesOf(tensor)));
}

// Writes an output; its file.
inline std::string write(Tensor const& tensor, Options const& options)
{
    if (options.output.empty())
        return "not written";
    auto name = tensor.name + (options.raw ? ".raw" : ".npy");
    std::replace(name.begin(), name.end(), '/', '_'); // of PyTorch's names
    auto const path = (std::filesystem::path(options.output) / name).string();
    std::filesystem::create_directories(options.output);
    options.raw ? writeFile(path, "", tensor.array.bytes) : writeNpy(path, tensor.array);
    return path;
}
