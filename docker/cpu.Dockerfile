# syntax=docker/dockerfile:1
# Piecework on a CPU: docker build -f docker/cpu.Dockerfile -t piecework:cpu .
ARG PYTHON_IMAGE=python:3.12.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/piecework
# First and alone: left to resolve it, pip takes the newest torch, and with it gigabytes of CUDA libraries.
COPY docker/constraints.txt /tmp/constraints.txt
RUN /opt/piecework/bin/pip install --index-url ${TORCH_INDEX} --extra-index-url https://pypi.org/simple -c /tmp/constraints.txt ${TORCH}
COPY . /src
RUN /opt/piecework/bin/pip install -c /tmp/constraints.txt /src
# A container then has the kernels of any CPU, and builds none.
RUN /opt/piecework/bin/python -m piecework.kernels.cpu.native.ship

FROM ${PYTHON_IMAGE}
# Compiled pieces need a C++ compiler when they are made. Debian drops old builds of g++, so its version is the image's.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 10001 piecework
COPY --from=build /opt/piecework /opt/piecework
ENV PATH=/opt/piecework/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
WORKDIR /home/piecework
# Compiled pieces and downloaded models outlive the container in a volume here.
RUN mkdir -p .cache
VOLUME /home/piecework/.cache
EXPOSE 30000
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:30000/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["piecework", "serve", "--host", "0.0.0.0", "--port", "30000"]
CMD ["--help"]
