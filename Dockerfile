# The server, as a user without rights. docs/server.md says how to run it.
FROM python:3.11-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN python -m venv /opt/specbeam && \
    /opt/specbeam/bin/pip install --no-cache-dir -c /source/constraints.txt '/source[server]'

FROM python:3.11-slim
COPY --from=build /opt/specbeam /opt/specbeam
# A number, so that Kubernetes can see that it is not root.
RUN install -d -o 10001 -g 10001 /models
USER 10001:10001
ENV PATH=/opt/specbeam/bin:$PATH HOME=/models SPECBEAM_HOME=/models HF_HOME=/models/huggingface
WORKDIR /models
VOLUME /models
EXPOSE 8000
# The first start fetches the model.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["specbeam", "serve", "--host", "0.0.0.0"]
