#!/usr/bin/env bash
# Builds the teacher: a static program with flite's voices slt and rms, which also runs where flite is not installed.
# Needs gcc and Debian's flite1-dev (apt-get install gcc flite1-dev). Licence of flite and its voices: CMU, permissive.
#
#   tools/speaker/flite/build.sh [OUTPUT]      default: build/speaker/phones
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

output=${1:-build/speaker/phones}
if [[ ! -e /usr/include/flite/flite.h ]]; then
    echo "build.sh: flite's headers are missing: apt-get install flite1-dev" >&2
    exit 1
fi
mkdir -p "$(dirname "$output")"
gcc -O2 -static -o "$output" tools/speaker/flite/phones.c -Wl,--wrap=mlsa_resynthesis,--wrap=mlpg,--wrap=cart_interpret \
    -lflite_cmu_us_slt -lflite_cmu_us_rms -lflite_usenglish -lflite_cmulex -lflite -lm
