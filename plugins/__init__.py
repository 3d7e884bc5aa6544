"""normdeploy_plugins: fused normalization kernels in Triton, one file per op, and their integration into TensorRT.

``ops.OPS`` lists the ops and needs triton. ``_aot.compile_launch`` compiles a kernel to PTX. ``qdp.register`` registers
the ops with TensorRT.
"""
