# normdeploy with CUDA: onnxruntime's CUDA provider finds CUDA 13 and cuDNN 9 in the base image, torch brings its own. From the root of a
# checkout, where the NVIDIA Container Toolkit is installed:
#
#     docker build -f docker/cuda.Dockerfile -t normdeploy:cuda .
#     docker run --rm --gpus all -u "$(id -u):$(id -g)" -v "$PWD:/work" normdeploy:cuda verify model.pt2 model.onnx
#
# --build-arg EXTRAS=rtx,plugins,report,tensorrt adds the full TensorRT.
FROM nvidia/cuda:13.0.1-cudnn-runtime-ubuntu24.04
ARG EXTRAS=rtx,plugins,report
ENV DEBIAN_FRONTEND=noninteractive VENV=/opt/venv
RUN apt-get update && apt-get install --yes --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY normdeploy normdeploy
COPY plugins plugins
RUN python3 -m venv "$VENV"
RUN "$VENV/bin/python" -m pip install --no-cache-dir --constraint constraints.txt ".[$EXTRAS]"
ENV PATH=/opt/venv/bin:$PATH HOME=/tmp
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["normdeploy"]
