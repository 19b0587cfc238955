#!/usr/bin/env bash
# Makes the pictures of the web page in docs/images/, by the tests that walk over it in Chromium.
set -euo pipefail
cd "$(dirname "$0")/.."
OMNI_TEST_SCREENSHOTS=1 exec python -m pytest -q -n 0 -m "" tests/http/test_page_newcomers.py tests/http/test_page_looks.py tests/http/test_page_spoken.py \
    tests/http/test_page_pictures.py -k "example_is_sent or example_conversation or everybody"
