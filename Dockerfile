# Images of lenet-serve with the committed weights; they need BuildKit. Targets:
#   service         on the CPU; what is built without --target
#   service-cuda12  on NVIDIA GPUs, where nvidia-smi says CUDA 12
#   service-cuda13  the same for CUDA 13
#   trainer         trains on the CPU, and runs the load test
# The base has Python alone: CUDA's libraries are wheels, and the driver comes from the host.
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

# The dependencies, in a layer that a change of the source leaves valid: this installs lenet-serve
# without any code. pip and setuptools stay in /build; the environment that is shipped has neither.
FROM ${PYTHON_IMAGE} AS dependencies
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_QUIET=1
RUN python3 -m venv /build && python3 -m venv --without-pip /opt/lenet-serve && \
    mkdir -p /home/lenet /srv/data /srv/runs
WORKDIR /src
COPY pyproject.toml constraints.txt deploy/image/install.sh deploy/image/left_out.py ./
# A package mirror and its certificates are passed as secrets, which stay out of the layers.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=secret,id=certificates,target=/etc/ssl/mirror.pem \
    sh install.sh '.[otel]'

FROM dependencies AS dependencies-cuda12
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=secret,id=certificates,target=/etc/ssl/mirror.pem \
    sh install.sh '.[otel,cuda12]'

FROM dependencies AS dependencies-cuda13
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=secret,id=certificates,target=/etc/ssl/mirror.pem \
    sh install.sh '.[otel,cuda13]'

FROM dependencies AS dependencies-trainer
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=secret,id=certificates,target=/etc/ssl/mirror.pem \
    sh install.sh '.[train,bench]'

# lenet-serve alone, a layer of its own: upgrading an image fetches little more than this.
FROM dependencies AS program
COPY README.md LICENSE ./
COPY lenet lenet
COPY service service
COPY trainer trainer
COPY wire wire
COPY weights weights
ARG COMMIT=""
RUN if [ -n "$COMMIT" ]; then echo "$COMMIT" >lenet/COMMIT; fi; \
    rm -r /opt/lenet-serve && python3 -m venv --without-pip /opt/lenet-serve && \
    /build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . && \
    /build/bin/pip --python /opt/lenet-serve/bin/python install --no-deps /wheels/*.whl

FROM ${PYTHON_IMAGE} AS runtime
LABEL org.opencontainers.image.title="lenet-serve" \
      org.opencontainers.image.description="Recognises handwritten digits over HTTP and gRPC" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"
# On a GPU the service, CuPy and the driver keep what they tuned and compiled below HOME. On the
# CPU nothing is written.
COPY --from=dependencies --chown=65532:65532 /home/lenet /home/lenet
# The base leaves out the compiled form of Python's own modules, and nobody would write it here:
# each process compiled them, 0.6 s of a start and 0.26 of each health check. 12 MB.
RUN python3 -m compileall -q -x '/(idlelib|lib2to3|pydoc_data|site-packages|tests?)/' \
    "$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
WORKDIR /srv
USER 65532:65532
ENV PATH=/opt/lenet-serve/bin:$PATH \
    HOME=/home/lenet \
    PYTHONDONTWRITEBYTECODE=1
STOPSIGNAL SIGTERM

FROM runtime AS trainer
# Volumes that are mounted here belong to the same user. A volume of weights begins with the
# committed ones.
COPY --from=dependencies --chown=65532:65532 /srv /srv
COPY --chown=65532:65532 weights /srv/weights
COPY --from=dependencies-trainer /opt/lenet-serve /opt/lenet-serve
COPY --from=program /opt/lenet-serve /opt/lenet-serve
ENTRYPOINT ["python", "-m", "trainer"]

# A folder mounted at /srv/weights is served instead of the weights in the package.
FROM runtime AS serving
ENV LENET_HOST=0.0.0.0
EXPOSE 8000 8001
HEALTHCHECK --interval=5s --timeout=2s --start-period=30s --retries=3 \
    CMD ["python", "-m", "service.healthcheck"]
ENTRYPOINT ["python", "-m", "service"]

# On GPUs a first start would compile the kernels: here they are compiled for all kinds of GPUs.
FROM serving AS service-cuda12
COPY --from=dependencies-cuda12 /opt/lenet-serve /opt/lenet-serve
COPY --from=program /opt/lenet-serve /opt/lenet-serve
USER root
RUN lenet-serve warm
USER 65532:65532

FROM serving AS service-cuda13
COPY --from=dependencies-cuda13 /opt/lenet-serve /opt/lenet-serve
COPY --from=program /opt/lenet-serve /opt/lenet-serve
USER root
RUN lenet-serve warm
USER 65532:65532

FROM serving AS service
COPY --from=dependencies /opt/lenet-serve /opt/lenet-serve
COPY --from=program /opt/lenet-serve /opt/lenet-serve
