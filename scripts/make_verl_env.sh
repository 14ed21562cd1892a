#!/usr/bin/env bash
# Make an environment in which verl 0.9.1's core_algos can be imported on a CPU machine, for the tests with the marker `verl`.
#
#   scripts/make_verl_env.sh .venv/bin/python .venv-verl
#
# verl pins a transformers older than ours, so it gets an environment of its own. Of all it asks for, importing core_algos needs verl, ray and
# the small packages below, installed without their dependencies; torch, transformers, numpy, pytest and counterpoise are seen through a .pth
# file in the environment of the given python instead of being installed twice.
set -euo pipefail

if [ "$#" -ne 2 ]; then
  echo "usage: $0 PYTHON TARGET_DIR (PYTHON: the interpreter of the environment that has torch, transformers and counterpoise)" >&2
  exit 2
fi
python=$1
target=$2

packages=(
  verl==0.9.1 tensordict==0.10.0 pyvers==0.2.3 cloudpickle==3.1.2 omegaconf==2.4.0 codetiming==1.4.0 orjson==3.13.0
  ray==2.60.0 msgpack==1.2.4 jsonschema==4.26.0 jsonschema-specifications==2025.9.1 referencing==0.37.0 rpds-py==2026.9.1 attrs==26.1.0
)

"$python" -m venv "$target"
shared=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
own=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# addsitedir, not a bare path: it also reads the .pth file of an editable install
echo "import site; site.addsitedir('$shared')" >"$own/shared_environment.pth"

"$target/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "${packages[@]}"
"$target/bin/python" -c 'import verl.trainer.ppo.core_algos, verl; print("verl", verl.__version__, "imports on CPU")'
