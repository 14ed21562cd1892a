#!/usr/bin/env bash
# Make an environment in which verl 0.9.1 imports and trains on a CPU machine, for `make test-verl`.
#
#   scripts/make_verl_env.sh .venv/bin/python .venv-verl
#
# verl pins a transformers older than ours and asks for CUDA packages, so it gets an environment of its own. Of all it asks for, the packages
# below are installed, without their dependencies; torch, numpy, pytest and counterpoise (with its entry points) are seen through a .pth
# file in the environment of the given python instead of being installed twice. Nothing is done where this has been done.
set -euo pipefail

if [ "$#" -ne 2 ]; then
  echo "usage: $0 PYTHON TARGET_DIR (PYTHON: the interpreter of the environment that has torch and counterpoise)" >&2
  exit 2
fi
python=$1
target=$2

packages=(
  verl==0.9.1 tensordict==0.10.0 pyvers==0.2.3 cloudpickle==3.1.2 codetiming==1.4.0 orjson==3.13.0 torchdata==0.11.0 cachetools==8.0.0
  hydra-core==1.3.8 omegaconf==2.3.1 antlr4-python3-runtime==4.9.3
  TransferQueue==0.1.11 pyzmq==27.3.0 msgspec==0.22.0
  ray==2.60.0 msgpack==1.2.4 jsonschema==4.26.0 jsonschema-specifications==2025.9.1 referencing==0.37.0 rpds-py==2026.9.1 attrs==26.1.0
  opentelemetry-api==1.45.2 fastapi==0.162.4
  transformers==5.10.4 tokenizers==0.22.2 huggingface-hub==1.33.0 httpx==0.28.1 httpcore==1.0.9
  aiohttp==3.14.5 multidict==7.2.1 yarl==1.25.1 propcache==0.5.4 aiohappyeyeballs==2.7.1 aiosignal==1.4.0 frozenlist==1.8.0
)

shared=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
wanted="$("$python" -V) $shared ${packages[*]}"
stamp="$target/.installed"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
  exit 0
fi

"$python" -m venv --clear "$target"
own=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$target/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "${packages[@]}"
# after the installation, so that pip does not try to replace what it sees there; addsitedir, not a bare path: it also reads the .pth file
# of an editable install
echo "import site; site.addsitedir('$shared')" >"$own/shared_environment.pth"
"$target/bin/python" -W ignore -c 'import verl.trainer.ppo.v1; print("verl", verl.__version__, "imports on CPU")'
echo "$wanted" >"$stamp"
