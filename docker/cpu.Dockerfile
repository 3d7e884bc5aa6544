# normdeploy on the CPU, with TensorRT-RTX, which builds engines without a GPU. From the root of a checkout:
#
#     docker build -f docker/cpu.Dockerfile -t normdeploy .
#     docker run --rm -u "$(id -u):$(id -g)" -v "$PWD:/work" normdeploy check model.onnx
#
# TORCH_INDEX names a package index with builds of torch for the CPU; without it torch comes with CUDA, some 4 GB larger.
FROM python:3.11-slim AS build
ARG TORCH_INDEX=
ARG EXTRAS=rtx,report
ENV VENV=/opt/venv
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY normdeploy normdeploy
COPY plugins plugins
RUN python3 -m venv "$VENV"
RUN "$VENV/bin/python" -m pip install --no-cache-dir --constraint constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} ".[$EXTRAS]"

FROM python:3.11-slim
COPY --from=build /opt/venv /opt/venv
# exports that run code of the user's are signed with a key in the home folder, which any user can write here; it is gone with the container
ENV PATH=/opt/venv/bin:$PATH HOME=/tmp
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["normdeploy"]
