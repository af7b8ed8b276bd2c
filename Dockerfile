# The service with the committed weights, by default on the CPU backend. It needs BuildKit.
# EXTRAS installs more of pyproject's extras: --build-arg 'EXTRAS=[cuda12]' for NVIDIA GPUs.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG EXTRAS=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_QUIET=1
# pip and setuptools stay in /build; the environment that is shipped has neither.
RUN python3 -m venv /build && python3 -m venv --without-pip /opt/lenet-serve && mkdir /home/lenet
WORKDIR /src
# First the dependencies, in a layer that a change of the source leaves valid: this installs
# lenet-serve without any code. A package mirror and its certificates can be passed as secrets
# (docker build --secret id=pip,src=pip.conf), which stay out of the layers.
COPY pyproject.toml constraints.txt ./
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=secret,id=certificates,target=/etc/ssl/mirror.pem \
    if [ -s /etc/ssl/mirror.pem ]; then export PIP_CERT=/etc/ssl/mirror.pem; fi; \
    touch README.md LICENSE; \
    /build/bin/pip install 'setuptools>=77' && \
    /build/bin/pip --python /opt/lenet-serve/bin/python install --constraint constraints.txt ".${EXTRAS}"
COPY README.md LICENSE ./
COPY lenet lenet
COPY service service
COPY trainer trainer
COPY weights weights
RUN /build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . && \
    /build/bin/pip --python /opt/lenet-serve/bin/python install --no-deps --force-reinstall /wheels/*.whl

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="lenet-serve" \
      org.opencontainers.image.description="Recognises handwritten digits over HTTP and gRPC" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/lenet-serve /opt/lenet-serve
# On a GPU the service, CuPy and the driver keep what they tuned and compiled below HOME. On the
# CPU nothing is written.
COPY --from=build --chown=65532:65532 /home/lenet /home/lenet
# A folder mounted at /srv/weights is served instead of the weights in the package.
WORKDIR /srv
USER 65532:65532
ENV PATH=/opt/lenet-serve/bin:$PATH \
    HOME=/home/lenet \
    PYTHONDONTWRITEBYTECODE=1 \
    LENET_HOST=0.0.0.0
EXPOSE 8000 8001
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=2s --start-period=30s --retries=3 \
    CMD ["python", "-m", "service.healthcheck"]
ENTRYPOINT ["python", "-m", "service"]
