# Debian's Prometheus in the form of the image that docker/compose.yaml names, for machines that cannot download that one.
ARG PYTHON_IMAGE=python:3.11-slim
FROM ${PYTHON_IMAGE}
RUN apt-get update && apt-get install --yes --no-install-recommends prometheus wget && rm -rf /var/lib/apt/lists/* \
    && install -d -o nobody -g nogroup /prometheus
USER nobody
WORKDIR /prometheus
ENTRYPOINT ["prometheus"]
