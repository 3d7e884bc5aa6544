"""normdeploy_plugins: fused normalization kernels in Triton, one op one file, and what TensorRT needs to put them into
an engine.

``ops.OPS`` lists them (needs triton), ``_aot.compile_launch`` makes PTX of one, ``qdp.register`` gives them to
TensorRT.
"""
