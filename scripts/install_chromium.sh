#!/usr/bin/env bash
# Installs Chromium for the tests of the web page where that is possible: as root on a system with apt. Elsewhere those
# tests are skipped, with a message.
set -euo pipefail

for name in chromium chromium-browser google-chrome; do
    if command -v "$name" > /dev/null; then
        exit 0
    fi
done
if [[ "$(id -u)" != 0 ]] || ! command -v apt-get > /dev/null; then
    echo "chromium: not installed and not installable from here; the tests of the web page will be skipped" >&2
    exit 0
fi
echo "chromium: installing it for the tests of the web page"
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; } > /dev/null; then
    echo "chromium: the installation failed; the tests of the web page will be skipped" >&2
fi
