#!/usr/bin/env bash
# Tandem from a terminal. Start it with `make up`, then: examples/curl.sh [http://127.0.0.1:8000]
set -euo pipefail
url=${1:-http://127.0.0.1:8000}

ask() { # ask PATH BODY
    curl --silent --show-error --fail-with-body --no-buffer "$url/v1/$1" --header 'content-type: application/json' --data "$2"
    echo
}

echo '# Is it ready?'
curl --silent --show-error --fail-with-body "$url/health/ready"
echo

echo '# An answer, with a report on how well the draft guessed.'
ask chat/completions '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 40}'

echo '# The same as a stream: text as soon as it is certain.'
ask chat/completions '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 40, "stream": true}'

echo '# Without speculation: slower, and with a seed the very same text.'
for enabled in true false; do
    ask completions '{"prompt": "Once upon a time", "max_tokens": 20, "seed": 7, "speculation": {"enabled": '$enabled'}}'
done
