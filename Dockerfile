# The whole platform on a CPU, in one container: `docker build -t flywheel . && docker run --shm-size 1g -p 8000:8000 flywheel`.
# State lives in /data; keep it with `-v flywheel-data:/data`. The first API key is then in /data/api-key.
FROM python:3.11-slim-bookworm

# libnuma1 is needed by vLLM's CPU kernels. Its version is the base image's affair.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libnuma1 tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 flywheel \
    && install -d -o flywheel -g flywheel /app /data

USER 10001
WORKDIR /app

# The dependencies first: this layer changes only with the lock.
COPY --chown=flywheel:flywheel requirements/cpu.lock requirements/install.py requirements/
RUN python requirements/install.py --dependencies-only

COPY --chown=flywheel:flywheel . .
RUN python requirements/install.py && .venv/bin/flywheel --set home=/data model prepare

ENV PATH=/app/.venv/bin:$PATH \
    FLYWHEEL_HOME=/data \
    FLYWHEEL_SERVING__HOST=0.0.0.0

VOLUME /data
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=180s --retries=6 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health/ready', timeout=2)"]

# tini reaps; SIGTERM drains: give `docker stop` a minute (--time 60).
ENTRYPOINT ["tini", "--"]
CMD ["flywheel", "up"]
