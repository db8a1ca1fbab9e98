#!/usr/bin/env bash
# OpenAI HTTP with curl: examples/curl.sh [URL]
set -euo pipefail
url=${1:-http://127.0.0.1:8000}

ask() {
    curl --silent --show-error --fail-with-body --no-buffer "$url$1" -H 'Content-Type: application/json' -d "$2"
    echo
}

curl --silent --show-error --fail-with-body "$url/v1/models"
echo
ask /v1/chat/completions '{"temperature": 0, "messages": [{"role": "user", "content": "Who are you?"}]}'
ask /v1/chat/completions '{"temperature": 0, "stream": true, "messages": [{"role": "user", "content": "Who are you?"}]}'
ask /v1/completions '{"temperature": 0, "max_tokens": 8, "prompt": ["The old moose", "The lamp"]}'
