// Files for run_engine: whole files, and arrays as NumPy's .npy (in C order).
#pragma once
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

using Shape = std::vector<int64_t>;

// An error for people: run_engine prints it and ends with exit code 1.
struct Failure : std::runtime_error
{
    using std::runtime_error::runtime_error;
};

struct Array
{
    std::string type; // as NumPy writes it: "<f4"
    Shape shape;
    std::vector<char> bytes;
};

inline std::vector<char> readFile(std::string const& path)
{
    if (!std::filesystem::is_regular_file(path))
        throw Failure(path + ": there is no such file");
    std::vector<char> bytes(std::filesystem::file_size(path));
    std::ifstream file(path, std::ios::binary);
    file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    if (!file || bytes.empty())
        throw Failure(path + ": " + std::to_string(file.gcount()) + " of " + std::to_string(bytes.size()) +
            " bytes can be read");
    return bytes;
}

inline void writeFile(std::string const& path, std::string const& header, std::vector<char> const& bytes)
{
    std::ofstream file(path, std::ios::binary);
    file.write(header.data(), static_cast<std::streamsize>(header.size()));
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    if (!file.flush())
        throw Failure(path + ": can't be written");
}

inline void writeNpy(std::string const& path, Array const& array)
{
    std::string sizes;
    for (auto size : array.shape)
        sizes += std::to_string(size) + ",";
    auto header = "{'descr': '" + array.type + "', 'fortran_order': False, 'shape': (" + sizes + "), }";
    header.resize((header.size() + 11 + 63) / 64 * 64 - 11, ' '); // the values begin at a multiple of 64
    header += '\n';
    std::string const magic("\x93NUMPY\x01\x00", 8);
    auto const length = header.size();
    writeFile(path, magic + static_cast<char>(length & 255) + static_cast<char>(length >> 8) + header, array.bytes);
}

inline bool isNpy(std::string const& path) { return std::filesystem::path(path).extension() == ".npy"; }

inline Array readNpy(std::string const& path)
{
    auto const file = readFile(path);
    try
    {
        auto const byte = [&](std::size_t i) { return static_cast<unsigned char>(file.at(i)); };
        std::size_t const begin = byte(6) == 1 ? 10 : 12; // from version 2 on, four bytes hold the header's length
        std::size_t const length = byte(8) + 256u * byte(9) + (begin == 10 ? 0u : 65536u * byte(10));
        std::string const all(file.begin(), file.end());
        auto const header = all.substr(begin, length);
        auto const after = [&](std::string const& key, char open, char close) {
            auto const from = header.find(open, header.find("'" + key + "':") + key.size() + 3) + 1;
            return header.substr(from, header.find(close, from) - from);
        };
        if (all.compare(0, 6, "\x93NUMPY") != 0 || header.size() < length)
            throw Failure(path + ": is no whole .npy file");
        if (header.find("'fortran_order': False") == std::string::npos)
            throw Failure(path + ": is in Fortran's order; save numpy.ascontiguousarray of it");
        Array array{after("descr", '\'', '\''), {}, {file.begin() + static_cast<long>(begin + length), file.end()}};
        auto const sizes = after("shape", '(', ')');
        for (std::size_t at = 0; (at = sizes.find_first_of("0123456789", at)) != std::string::npos;)
        {
            std::size_t digits = 0;
            array.shape.push_back(std::stoll(sizes.substr(at), &digits));
            at += digits;
        }
        return array;
    }
    catch (std::logic_error const&) // of at(), substr() and stoll()
    {
        throw Failure(path + ": is no whole .npy file");
    }
}
