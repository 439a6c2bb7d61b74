# The project, its .venv and what DeepSpeed compiles with, for a user without privileges. No image was built of it yet.
#
#   docker build -t cookbook .                                             for CPUs
#   docker build -t cookbook --build-arg BASE=CUDA_IMAGE .                 for GPUs: Debian or Ubuntu with CUDA's toolkit
#   docker run --rm cookbook make quickstart
#   docker run --rm --gpus all --shm-size 8g -v cookbook_outputs:/app/outputs cookbook \
#     cookbook launch recipes/quickstart.yaml --strategy zero3
# A new volume belongs to the image's user, 10001. A folder of this machine in its place must be one that this user may
# write: sudo install -d -o 10001 outputs.
#
# A digest names the same image each time. Docker's own list of them is docker-library/repo-info: this one, of Python
# 3.11.16, stands in repos/python/remote/3.11-slim-bookworm.md at 40cdaf34.
ARG BASE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b
# hadolint ignore=DL3006
FROM ${BASE}

WORKDIR /app
COPY Makefile requirements.txt system.sh ./
# A torch of the base image stays if its version is that of requirements.txt: the environment sees the image's packages.
# hadolint ignore=DL3008
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends make \
 && { command -v python3 || DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3; } \
 && sh system.sh python3 venv \
 && python3 -m venv --system-site-packages .venv \
 && sh system.sh .venv/bin/python build \
 && PIP_NO_CACHE_DIR=1 make setup \
 && rm -rf /var/lib/apt/lists/*

COPY CITATION.cff LICENSE README.md pyproject.toml train.py ./
COPY accelerate_configs accelerate_configs
COPY cookbook cookbook
COPY ds_configs ds_configs
COPY examples examples
COPY recipes recipes
COPY simulated_gpus simulated_gpus
COPY slurm slurm

# Runs write below the working directory: outputs/ and .cache/. By number, as Kubernetes asks of runAsNonRoot.
RUN useradd --create-home --uid 10001 cookbook \
 && mkdir outputs .cache \
 && chown cookbook:cookbook . outputs .cache
USER 10001
ENV PATH=/app/.venv/bin:$PATH
CMD ["cookbook", "--help"]
