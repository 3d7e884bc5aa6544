// Symbolic sizes and launch parameters as the library would hold them: they can be evaluated for any sizes afterwards,
// and say when they are used after their end.
#pragma once
#include "layout.h"

#include <string>
#include <vector>

namespace mock
{
using namespace nvinfer1;

inline std::vector<int64_t> sizes(64); // of the dynamic dims, by number
inline std::string faults;             // what a plugin must not do, one a line

inline void fault(std::string const& what)
{
    faults += what + "\n";
}

// A constant, a dynamic dim by its number, or an operation. Never freed, so that a use after its end can be told.
struct Expression : IDimensionExpr, apiv::VDimensionExpr
{
    enum Kind { CONSTANT, DYNAMIC, OPERATION } kind;
    int64_t number{};
    DimensionOperation op{};
    Expression const *a{}, *b{};
    bool gone{};

    Expression(Kind k, int64_t n) : kind(k), number(n) { mImpl = this; }
    Expression(DimensionOperation o, Expression const* x, Expression const* y) : kind(OPERATION), op(o), a(x), b(y)
    {
        mImpl = this;
    }
    void used() const
    {
        if (gone)
            fault("a symbolic size was read outside of getOutputShapes and getLaunchParams");
    }
    bool isConstant() const override { return used(), kind == CONSTANT; }
    int64_t getConstantValue() const override { return used(), number; }
    bool isSizeTensor() const override { return false; }
    int64_t value() const
    {
        if (kind != OPERATION)
            return kind == CONSTANT ? number : sizes.at(number);
        int64_t const x = a->value(), y = b->value();
        switch (op)
        {
        case DimensionOperation::SUM: return x + y;
        case DimensionOperation::PROD: return x * y;
        case DimensionOperation::MAX: return x > y ? x : y;
        case DimensionOperation::MIN: return x < y ? x : y;
        case DimensionOperation::SUB: return x - y;
        case DimensionOperation::EQUAL: return x == y;
        case DimensionOperation::LESS: return x < y;
        case DimensionOperation::FLOOR_DIV: return y ? x / y : 0;
        case DimensionOperation::CEIL_DIV: return y ? (x + y - 1) / y : 0;
        }
        return 0;
    }
};

inline Expression const* own(IDimensionExpr const* expr)
{
    return static_cast<Expression const*>(expr);
}

// Lives for one call of a plugin, as the library's does.
struct Builder : IExprBuilder, apiv::VExprBuilder
{
    std::vector<Expression*> made;
    bool gone{};

    Builder() { mImpl = this; }
    Expression const* keep(Expression* expr)
    {
        if (gone)
            fault("a symbolic operation used the expression builder of an earlier call");
        made.push_back(expr);
        return expr;
    }
    IDimensionExpr const* constant(int64_t value) override { return keep(new Expression(Expression::CONSTANT, value)); }
    IDimensionExpr const* operation(DimensionOperation op, IDimensionExpr const& x, IDimensionExpr const& y) override
    {
        auto const *a = own(&x), *b = own(&y);
        a->used();
        b->used();
        auto* made = new Expression(op, a, b);
        if (a->kind == Expression::CONSTANT && b->kind == Expression::CONSTANT)
            made = new Expression(Expression::CONSTANT, made->value());
        return keep(made);
    }
    IDimensionExpr const* declareSizeTensor(
        int32_t output, IDimensionExpr const& opt, IDimensionExpr const& upper) override
    {
        int64_t const mark = 10000 * output + 100 * own(&opt)->value() + own(&upper)->value();
        return keep(new Expression(Expression::CONSTANT, mark));
    }
};

inline void set_gone(std::vector<Expression*> const& made, bool gone)
{
    for (auto* expr : made)
        expr->gone = gone;
}

// What a plugin said in one symbolic argument: read at once, as the Python object behind it may not outlive the call.
struct Argument
{
    Expression const* expr{};
    int32_t type{-1}, kind{-1};
    ISymExpr* given{};

    bool set(ISymExpr* symbolic)
    {
        given = symbolic;
        expr = own(static_cast<IDimensionExpr const*>(symbolic->getExpr()));
        type = static_cast<int32_t>(symbolic->getType());
        kind = static_cast<int32_t>(symbolic->getDataType());
        return true;
    }
};

struct LaunchParams : IKernelLaunchParams, IKernelLaunchParamsImpl
{
    Argument held[7];

    LaunchParams() { mImpl = this; }
#define DEFINE(name, index) \
    ISymExpr* get##name() noexcept override { return held[index].given; } \
    bool set##name(ISymExpr* expr) noexcept override { return held[index].set(expr); }
    LAUNCH_PARAMETERS(DEFINE)
#undef DEFINE
};

struct ExtraArguments : ISymExprs, ISymExprsImpl
{
    std::vector<Argument> held;

    ExtraArguments() { mImpl = this; }
    bool in(int32_t index) const { return index >= 0 && index < getNbSymExprs(); }
    ISymExpr* getSymExpr(int32_t index) const noexcept override { return in(index) ? held[index].given : nullptr; }
    bool setSymExpr(int32_t index, ISymExpr* expr) noexcept override { return in(index) && held[index].set(expr); }
    int32_t getNbSymExprs() const noexcept override { return static_cast<int32_t>(held.size()); }
    bool setNbSymExprs(int32_t count) noexcept override { return held.resize(count), true; }
};
} // namespace mock
