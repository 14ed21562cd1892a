#!/usr/bin/env bash
# Does the package work outside the repository? Builds the sdist and from it the wheel, installs the
# wheel into a fresh environment and runs the commands of a first day in an empty folder.
#
#   scripts/test_wheel.sh PYTHON            third-party packages are those of PYTHON's environment,
#                                           lent by a .pth file; counterpoise comes from the wheel
#   FULL=1 scripts/test_wheel.sh PYTHON     nothing is lent: pip installs counterpoise[all]
set -euo pipefail
python=$(realpath -s "${1:?usage: scripts/test_wheel.sh PYTHON}")
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

"$python" -m venv "$work/build"
"$work/build/bin/python" -m pip install --quiet --disable-pip-version-check 'build>=1.2'
# a copy, so that nothing is left behind in the repository and nothing ignored gets into the wheel
mkdir "$work/source"
(cd "$root" && git ls-files -z --cached -- src recipes pyproject.toml README.md LICENSE | tar --null -T - -c) |
  tar -x -C "$work/source"
"$work/build/bin/python" -m build --outdir "$work/dist" "$work/source" >"$work/build.log" 2>&1 ||
  { tail -30 "$work/build.log"; exit 1; }
wheel=$(ls "$work"/dist/*.whl)

"$python" -m venv "$work/fresh"
pip=("$work/fresh/bin/python" -m pip install --quiet --disable-pip-version-check)
if [ -n "${FULL:-}" ]; then
  "${pip[@]}" -c "$root/constraints.txt" "counterpoise[all] @ file://$wheel"
else
  "${pip[@]}" --no-deps "$wheel"
  own=$("$work/fresh/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  # a bare path: the .pth files there, among them an editable counterpoise, are not read
  "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$own/lent_packages.pth"
fi

mkdir "$work/elsewhere" && cd "$work/elsewhere"
counterpoise="$work/fresh/bin/counterpoise"
"$work/fresh/bin/python" -c '
import sys
from pathlib import Path
import counterpoise
folder = Path(counterpoise.__file__).parent
assert folder.is_relative_to(sys.prefix), f"counterpoise comes from {folder}, not from the wheel"
for file in ("py.typed", "recipes/demo.yaml", "sampling/kernels/cpu.c", "policy/kernels/cpu.c", "policy/kernels/vectors.h", "policy/bundled/model.safetensors", "policy/starts/free/model.safetensors"):
    assert (folder / file).is_file(), f"the wheel has no {file}"'

"$counterpoise" --help >help.txt
"$counterpoise" methods >methods.txt
"$work/fresh/bin/python" -m counterpoise methods delta >delta.txt
"$counterpoise" init mine
"$counterpoise" train mine/recipe.yaml --set num_batches=1 --set rollouts.prompts=2 --set eval.every=0
"$counterpoise" train demo --set run_dir=run --set num_batches=2 \
  --set rollouts.prompts=4 --set eval.prompts=4 --set ledger.every=1
"$counterpoise" report run
"$counterpoise" view run --export pages
for file in help.txt methods.txt delta.txt run/report/index.html pages/index.html; do
  test -s "$file" || { echo "test_wheel: $file is missing or empty"; exit 1; }
done
echo "test_wheel: $(basename "$wheel") works outside the repository"
