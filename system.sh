#!/bin/sh
# What make needs and pip cannot install. Root on Debian gets it by apt; for others one line names it, and the command.
# Nothing asks, and nothing calls sudo.
#
#   sh system.sh PYTHON venv     a virtual environment; exit code 1 where none can be made
#   sh system.sh PYTHON build    what the tests compile on first use; exit code 0, as they can go on without
set -u

python=$1
case $2 in
  venv) needs='venv' reason='for the virtual environment' ;;
  build) needs='compiler headers libaio' reason='for simulated GPUs and offload to NVMe, which compile code' ;;
  *) echo "system.sh: venv or build, not $2" >&2; exit 2 ;;
esac

is_here() {
  case $1 in
    venv) "$python" -c 'import ensurepip, venv' ;;
    compiler) command -v "${CXX:-c++}" ;;
    headers) "$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' ;;
    libaio) test -e /usr/include/libaio.h || echo '#include <libaio.h>' | "${CXX:-c++}" -E -x c++ - ;;
  esac >/dev/null 2>&1
}

look() {  # for what is missing: its names, and Debian's packages, of the Python in use
  names='' packages=''
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  for need in $needs; do
    is_here "$need" && continue
    case $need in
      venv) name="Python's venv" package=python$version-venv ;;
      compiler) name='a C++ compiler' package=g++ ;;
      headers) name="Python's headers" package=python$version-dev ;;
      libaio) name="libaio's headers" package=libaio-dev ;;
    esac
    names="${names:+$names, }$name" packages="${packages:+$packages }$package"
  done
}

look
test "$names" || exit 0
command='' error=''
if command -v apt-get >/dev/null; then
  command="; as root: apt-get update && apt-get install -y --no-install-recommends $packages"
  if test "$(id -u)" = 0; then
    echo "installing $packages, $reason"
    said=$( (apt-get update; DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y \
      --no-install-recommends $packages) </dev/null 2>&1) || error="; apt-get failed: $(echo "$said" | tail -n 1)"
    look
    test "$names" || exit 0
  fi
fi
echo "missing $reason: $names$command$error" >&2
test "$2" = build
