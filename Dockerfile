# A container that answers programs with the embedded model: as an ordinary user, without a network.
#
#   docker build -t ocelli .
#   docker run --rm -p 127.0.0.1:8000:8000 ocelli
#   docker run --rm -p 8000:8000 -e OCELLI_API_KEY=secret -v kept:/kept ocelli --prefix-cache /kept
#
# For CUDA: --build-arg TORCH=https://pypi.org/simple, and docker run --gpus all.
FROM python:3.11-slim

# gcc compiles the C step for the machine that runs the container, when it starts.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 ocelli \
    && install --directory --owner ocelli /kept

ARG TORCH=https://download.pytorch.org/whl/cpu
WORKDIR /ocelli
COPY requirements.txt .
RUN grep -vE '^(datasets|pyarrow|fsspec|peft|scikit-learn|scipy|prompt_toolkit)==' requirements.txt > /tmp/serving.txt \
    && pip install --no-cache-dir --extra-index-url "$TORCH" -r /tmp/serving.txt \
    && rm /tmp/serving.txt
COPY . .

USER ocelli
ENV HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
EXPOSE 8000
HEALTHCHECK CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=3)"]
ENTRYPOINT ["python", "serve.py", "--host", "0.0.0.0"]
