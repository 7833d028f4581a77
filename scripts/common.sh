# Shared by the scripts of this folder: messages, Debian packages, the virtual environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\n== %s\n' "$*"; }
die() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; exit 1; }

# packages NAME...: installs the Debian packages that are missing, or says in one line which they are.
packages() {
  local missing=() name root=()
  for name in "$@"; do
    dpkg-query -W -f='${Status}' "$name" 2>/dev/null | grep -q 'ok installed' || missing+=("$name")
  done
  ((${#missing[@]})) || return 0
  local wanted="please install: ${missing[*]}"
  command -v apt-get >/dev/null || die "this machine has no apt-get; $wanted"
  if ((EUID != 0)); then
    command -v sudo >/dev/null || die "not root and no sudo; $wanted"
    root=(sudo)
  fi
  say "installing ${missing[*]}"
  "${root[@]}" apt-get update -q >/dev/null || die "apt-get update failed; $wanted"
  DEBIAN_FRONTEND=noninteractive "${root[@]}" apt-get install -y -q --no-install-recommends "${missing[@]}" >/dev/null ||
    die "apt-get install failed; $wanted"
}

# environment FOLDER REQUIREMENTS...: a virtual environment with these pinned requirement files; $python is its interpreter.
environment() {
  local folder=$1
  shift
  python="$PWD/$folder/bin/python"
  [[ -x $python ]] || python3 -m venv "$folder" || die "python3 -m venv failed; please install: python3-venv"
  local file arguments=()
  for file in "$@"; do arguments+=(-r "$file"); done
  "$python" -m pip install -q --disable-pip-version-check "${arguments[@]}" || die "pip could not install $*"
}

# install_anyflash FOLDER: builds the Python package into that environment when a source has changed since the last time.
install_anyflash() {
  local stamp=$1/anyflash.stamp
  if [[ -e $stamp && -z $(find include src python cmake CMakeLists.txt pyproject.toml -newer "$stamp" -print -quit) ]]; then
    return 0
  fi
  say "building anyflash (a minute or two)"
  "$python" -m pip install -q --disable-pip-version-check . || die "the build of the Python package failed"
  touch "$stamp"
}

build_packages=(g++ cmake ninja-build python3 python3-dev python3-venv)
