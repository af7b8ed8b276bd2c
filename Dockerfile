# The service on its committed weights and the CPU backend. EXTRAS names more of pyproject's extras.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG EXTRAS=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN python3 -m venv /opt/lenet-serve
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY lenet lenet
COPY service service
COPY trainer trainer
# A mirror and its certificates, where one is needed, come as secrets and stay out of the layers.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=secret,id=certificates,target=/etc/ssl/mirror.pem \
    if [ -s /etc/ssl/mirror.pem ]; then export PIP_CERT=/etc/ssl/mirror.pem; fi; \
    /opt/lenet-serve/bin/python -m pip install --quiet --constraint constraints.txt ".${EXTRAS}"

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="lenet-serve" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/lenet-serve /opt/lenet-serve
COPY weights /srv/weights
WORKDIR /srv
# Nobody in particular, without a home: the service writes nothing.
USER 65532:65532
ENV PATH=/opt/lenet-serve/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    LENET_HOST=0.0.0.0
EXPOSE 8000 8001
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=2s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(f'http://127.0.0.1:{os.environ.get(\"LENET_PORT\", 8000)}/readyz', timeout=2)"]
ENTRYPOINT ["python", "-m", "service"]
