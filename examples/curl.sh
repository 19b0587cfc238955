#!/usr/bin/env bash
# Uses the HTTP server with curl alone: health, a whole answer, a stream, speech into a file, sound as the question.
#
#   omni-actors launch tiny_qwen2_5_omni --http 127.0.0.1:8000
#   examples/curl.sh [URL]          with a key: OMNI_ACTORS_API_KEY=... examples/curl.sh
set -euo pipefail

url=${1:-http://127.0.0.1:8000}
url=${url%/} url=${url%/v1} # the same as for the other examples, with or without /v1
auth=()
[[ -z ${OMNI_ACTORS_API_KEY:-} ]] || auth=(-H "Authorization: Bearer $OMNI_ACTORS_API_KEY")
get() { curl --silent --show-error --fail-with-body "${auth[@]}" "$@"; }
post() { local path=$1; shift; get -H 'Content-Type: application/json' "$url$path" -d @- "$@"; }

get "$url/health"; echo
model=$(get "$url/v1/models" | sed 's/.*"id":"\([^"]*\)".*/\1/')

echo "-- a whole answer"
post /v1/chat/completions <<JSON
{"model": "$model", "max_tokens": 24, "messages": [{"role": "user", "content": "Why is the sea salt?"}]}
JSON

printf '\n-- the same as it comes\n'
post /v1/chat/completions -N <<JSON
{"model": "$model", "max_tokens": 24, "stream": true, "messages": [{"role": "user", "content": "Why is the sea salt?"}]}
JSON

echo "-- read aloud: speech.wav"
post /v1/audio/speech -o speech.wav <<JSON
{"model": "$model", "input": "The tide is full.", "response_format": "wav",
 "stage_params": {"thinker": {"max_tokens": 24}}}
JSON

echo "-- and heard again"
post /v1/chat/completions <<JSON
{"model": "$model", "max_tokens": 24, "messages": [{"role": "user", "content": [
  {"type": "input_audio", "input_audio": {"data": "$(base64 -w0 speech.wav)", "format": "wav"}},
  {"type": "text", "text": "What do you hear?"}]}]}
JSON
echo
