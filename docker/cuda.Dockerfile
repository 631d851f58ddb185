# syntax=docker/dockerfile:1
# Piecework on an NVIDIA GPU: docker build -f docker/cuda.Dockerfile -t piecework:cuda .
ARG PYTHON_IMAGE=python:3.12.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG TORCH=torch==2.11.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu130
# cuda,sgl-kernel adds sglang-kernel's kernels, with TORCH=torch==2.13.0.
ARG EXTRAS=cuda
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/piecework
# First and alone: it decides which CUDA there is, and brings its libraries and Triton; the driver is the host's.
COPY docker/constraints.txt /tmp/constraints.txt
RUN /opt/piecework/bin/pip install --index-url ${TORCH_INDEX} --extra-index-url https://pypi.org/simple -c /tmp/constraints.txt ${TORCH}
COPY . /src
RUN /opt/piecework/bin/pip install -c /tmp/constraints.txt "/src[${EXTRAS}]"

FROM ${PYTHON_IMAGE}
# flashinfer is not here: it would build its kernels with nvcc, which an image of this size has not. `--attention-backend auto` is Triton.
# Triton compiles the launchers of its kernels, and Inductor its pieces, when they are first used. Debian drops old builds of g++, so its version is the image's.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 10001 piecework
COPY --from=build /opt/piecework /opt/piecework
# Triton's default lies beside .cache, where a container may not write, or loses it.
ENV PATH=/opt/piecework/bin:$PATH PYTHONUNBUFFERED=1 \
    TRITON_CACHE_DIR=/home/piecework/.cache/triton \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001
WORKDIR /home/piecework
# Compiled pieces and downloaded models outlive the container in a volume here.
RUN mkdir -p .cache
VOLUME /home/piecework/.cache
EXPOSE 30000
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:30000/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["piecework", "serve", "--host", "0.0.0.0", "--port", "30000", "--device", "cuda"]
CMD ["--help"]
