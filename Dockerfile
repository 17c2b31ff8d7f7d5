# termrl as an OpenEnv environment: `docker build -t termrl .`, or a Hugging Face Space of it (docs/openenv.md).
ARG BASE_IMAGE=python:3.12-slim-bookworm
FROM ${BASE_IMAGE}

# Debian's own Python refuses packages outside a venv, and not every base image has a Python of its own.
RUN command -v python3 >/dev/null && python3 -c 'import ensurepip, venv' 2>/dev/null \
    || { apt-get update && apt-get install -y --no-install-recommends python3-venv && rm -rf /var/lib/apt/lists/*; }
RUN python3 -m venv /opt/termrl/venv
ENV PATH=/opt/termrl/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

WORKDIR /opt/termrl
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src ./src
RUN pip install --no-cache-dir -c constraints.txt ".[openenv,bubblewrap,prometheus]" && rm -rf src

# The bundled suite; mount a folder of Harbor tasks over it, or set TB2_TASKS_DIR, to serve others.
RUN termrl tasks generate /opt/termrl/tasks --levels 1,2,3 --per-family 4

# The user that Spaces run as; /tmp is all that it writes to.
RUN useradd --create-home --uid 1000 user
USER 1000
ENV HOME=/tmp TERMRL_STATE_DIR=/tmp/termrl TB2_TASKS_DIR=/opt/termrl/tasks
WORKDIR /tmp

EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# Others reach it only with a token (a Space's secret TERMRL_TOKEN); without one it listens inside the container alone.
CMD ["sh", "-c", "exec termrl serve --port 8000 --host \"${TERMRL_HOST:-$([ -n \"$TERMRL_TOKEN\" ] && echo 0.0.0.0 || echo 127.0.0.1)}\""]
