# syntax=docker/dockerfile:1
# Piecework on an Ascend NPU: docker build -f docker/npu.Dockerfile -t piecework:npu .
# Not yet built, nor run on one. torch_npu 2.11.0 needs CANN 9.1.0. The base image brings CANN and Python, the host the driver.
ARG CANN_IMAGE=quay.io/ascend/cann:9.1.0-910b-ubuntu22.04-py3.11

FROM ${CANN_IMAGE} AS build
ARG TORCH=torch==2.11.0+cpu
ARG TORCH_NPU=torch-npu==2.11.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/piecework
# First and alone: torch_npu is built for one version of torch, without CUDA.
COPY docker/constraints.txt /tmp/constraints.txt
RUN /opt/piecework/bin/pip install --index-url ${TORCH_INDEX} --extra-index-url https://pypi.org/simple -c /tmp/constraints.txt ${TORCH} ${TORCH_NPU}
COPY . /src
RUN /opt/piecework/bin/pip install -c /tmp/constraints.txt /src

FROM ${CANN_IMAGE}
# The devices of the host belong to its group HwHiAiUser, 1000 by default.
RUN groupadd --force --gid 1000 HwHiAiUser && useradd --create-home --uid 10001 --groups 1000 piecework
COPY --from=build /opt/piecework /opt/piecework
ENV PATH=/opt/piecework/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
WORKDIR /home/piecework
# Cut models and downloaded ones outlive the container in a volume here.
RUN mkdir -p .cache
VOLUME /home/piecework/.cache
EXPOSE 30000
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=3 \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:30000/health', timeout=4)"]
STOPSIGNAL SIGTERM
# CANN's paths come from a script of the toolkit.
ENTRYPOINT ["bash", "-c", "source /usr/local/Ascend/ascend-toolkit/set_env.sh && exec piecework serve --host 0.0.0.0 --port 30000 --device npu \"$@\"", "piecework"]
CMD ["--help"]
