#!/usr/bin/env bash
# Makes a picture with curl alone, shows it on its way, and makes another one of it.
#
#   omni-actors launch echo_image --http 127.0.0.1:8000
#   examples/curl_images.sh [URL]          with a key: OMNI_ACTORS_API_KEY=... examples/curl_images.sh
set -euo pipefail

url=${1:-http://127.0.0.1:8000}
url=${url%/} url=${url%/v1} # the same as for the other examples, with or without /v1
auth=()
[[ -z ${OMNI_ACTORS_API_KEY:-} ]] || auth=(-H "Authorization: Bearer $OMNI_ACTORS_API_KEY")
post() { local path=$1; shift; curl --silent --show-error --fail-with-body "${auth[@]}" "$url$path" "$@"; }
picture() { sed 's/.*"b64_json":"\([^"]*\)".*/\1/' | base64 -d; }

echo "-- a picture: lighthouse.png"
post /v1/images/generations -H 'Content-Type: application/json' -d @- <<JSON | picture > lighthouse.png
{"prompt": "A lighthouse at night", "seed": 7}
JSON

echo "-- its steps, as they are done"
post /v1/images/generations -N -H 'Content-Type: application/json' -d @- <<JSON | grep -o '"step":.*'
{"prompt": "A lighthouse at night", "seed": 7, "stream": true, "progress": true}
JSON

echo "-- and another one of it: daylight.jpg"
post /v1/images/edits -F image=@lighthouse.png -F prompt="The same in daylight" -F output_format=jpeg | picture > daylight.jpg
